"""Rung fp8: e4m3 bytes with one power of two for each head's keys, and values, in each layer. What engines hold that compute in fp8.

exponent  the smallest e with max |x| <= MAX_E4M3 * 2**e, within -100..127
code      sign, 4 bits of exponent (bias 7), 3 of mantissa: x / 2**e rounded to nearest, ties to even; S.1111.111 (NaN) never
decoded   narrow(value of code * 2**e): exact in every dtype but for float16's smallest numbers; NaN decodes to 480 * 2**e

Kernels take a block as those of kernels.py do, and measure errors in the same order.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from kvstore.codec import vectors as v
from kvstore.codec.machine_code import compiled, inlined
from kvstore.codec.planes import load_plane, narrowed, store_plane

MAX_E4M3 = 448.0
MIN_EXPONENT, MAX_EXPONENT = -100, 127


@inlined
def _power(exponent):
    """2**exponent, for -126 to 127."""
    return np.uint32((exponent + 127) << 23).view(np.float32)


@inlined
def _exponent_of(largest):
    """Of a plane whose largest magnitude this is."""
    bits = np.int64(np.float32(largest).view(np.uint32))
    exponent = (bits >> 23) - 126 - 9 + (1 if bits & 0x7FFFFF > 0x600000 else 0)  # 448 is .875 * 2**9
    return min(max(exponent, np.int64(MIN_EXPONENT)), np.int64(MAX_EXPONENT))


@inlined
def _codes(scaled):
    """I8 of the codes nearest to an F8."""
    bits = v.bits_of(scaled)
    magnitude = v.i_and(bits, v.i_splat(np.int32(0x7FFFFFFF)))
    small = v.below(magnitude, v.i_splat(np.int32(121 << 23)))  # below 2**-6: the sum with 2**14, whose last place is 2**-9
    fine = v.i_subtract(v.bits_of(v.add(v.float_of(magnitude), v.splat(np.float32(16384.0)))), v.i_splat(np.int32(0x46800000)))
    odd = v.i_and(v.shifted_right(magnitude, 20), v.i_splat(np.int32(1)))
    coarse = v.i_add(v.i_add(magnitude, v.i_splat(np.int32(0x7FFFF))), odd)
    coarse = v.i_subtract(v.shifted_right(coarse, 20), v.i_splat(np.int32((127 - 7) << 3)))
    code = v.i_or(v.i_and(fine, small), v.i_and(coarse, v.i_subtract(v.i_splat(np.int32(-1)), small)))
    return v.i_or(v.i_smaller(code, v.i_splat(np.int32(0x7E))), v.i_and(v.shifted_right(bits, 24), v.i_splat(np.int32(0x80))))


@inlined
def _values(codes):
    """F8 of the numbers that codes stand for, before their plane's power of two."""
    magnitude = v.float_of(v.shifted_left(v.i_and(codes, v.i_splat(np.int32(0x7F))), 20))
    sign = v.shifted_left(v.i_and(codes, v.i_splat(np.int32(0x80))), 24)
    return v.float_of(v.i_or(v.bits_of(v.multiply(magnitude, v.splat(np.float32(2.0**120)))), sign))


@compiled
def encode(half, single, kind, shape, exact, canonical, exponents, keys, values):
    """Fills exponents int8 [2, layers * heads] and codes uint8 of the keys and of the values; returns (max |error|, sum of squares).

    The block's numbers are finite and within range; the rest as `kernels.quantize`.
    """
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    padded = (width + 7) // 8 * 8
    tile = np.empty(lossy * padded, np.float32)
    squares, eight = np.empty(padded, np.float32), np.empty(8, np.uint8)
    total = 0.0
    worst = v.splat(np.float32(0))
    sign = v.i_splat(np.int32(0x7FFFFFFF))
    for layer in range(layers):
        for is_value in range(2):
            for head in range(heads):
                first = (((layer * 2 + is_value) * heads + head) * tokens + exact) * width
                plane = layer * heads + head
                codes = values if is_value else keys
                load_plane(half, single, kind, first, width, tile)
                largest = v.splat(np.float32(0))
                for i in range(0, tile.size, 8):
                    largest = v.larger(largest, v.float_of(v.i_and(v.bits_of(v.load_f32(tile, i)), sign)))
                exponent = _exponent_of(v.largest_lane(largest))
                exponents[is_value, plane] = np.int8(exponent)
                scale, inverse = v.splat(_power(exponent)), v.splat(_power(min(-exponent, np.int64(127))))
                for d in range(0, padded, 8):
                    square = v.splat(np.float32(0))
                    for t in range(lossy):
                        x = v.load_f32(tile, t * padded + d)
                        code = _codes(v.multiply(x, inverse))
                        at = (plane * lossy + t) * width + d
                        if d + 8 <= width:
                            v.store_u8(codes, at, code)
                        else:
                            v.store_u8(eight, 0, code)
                            for i in range(width - d):
                                codes[at + i] = eight[i]
                        decoded = narrowed(v.multiply(_values(code), scale), kind)
                        v.store_f32(tile, t * padded + d, decoded)
                        error = v.subtract(x, decoded)
                        square = v.add(square, v.multiply(error, error))
                        worst = v.larger(worst, v.float_of(v.i_and(v.bits_of(error), sign)))
                    v.store_f32(squares, d, square)
                for d in range(width):
                    total += np.float64(squares[d])
                if canonical:
                    store_plane(tile, half, single, kind, first, width)
    return v.largest_lane(worst), total


@compiled
def decode(half, single, kind, shape, exact, exponents, keys, values):
    """Inverse of `encode`, up to the rounding; codes that no writer makes decode to numbers. Exact tokens are left alone."""
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    padded = (width + 7) // 8 * 8
    tile = np.empty(lossy * padded, np.float32)
    eight = np.zeros(8, np.uint8)
    for layer in range(layers):
        for is_value in range(2):
            for head in range(heads):
                first = (((layer * 2 + is_value) * heads + head) * tokens + exact) * width
                plane = layer * heads + head
                codes = values if is_value else keys
                scale = v.splat(_power(max(np.int64(exponents[is_value, plane]), np.int64(-126))))
                for t in range(lossy):
                    for d in range(0, padded, 8):
                        at = (plane * lossy + t) * width + d
                        if d + 8 <= width:
                            code = v.load_u8(codes, at)
                        else:
                            for i in range(width - d):
                                eight[i] = codes[at + i]
                            code = v.load_u8(eight, 0)
                        v.store_f32(tile, t * padded + d, v.multiply(_values(code), scale))
                store_plane(tile, half, single, kind, first, width)
