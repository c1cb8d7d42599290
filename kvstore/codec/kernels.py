"""The lossy rungs' arithmetic as fused machine code: one pass over a block, without the GIL, equal bit for bit to reference.py.

Every operation is a float32 or integer operation in a stated order (no fastmath, no contraction), so that another
implementation, torch on a device say, gives the same bytes. numba's cache on disk notices changes of the file it caches and of no other:
who changes planes.py or vectors.py touches the files whose kernels they are part of.

A block arrives flat, in C order [layers, 2, heads, tokens, head_dim], in one of two views: `half` (uint16 bit patterns of
bfloat16 or float16) or `single` (float32); the other view is empty and `kind` says which. Work goes by planes: the lossy
tokens of one head's keys, or values, in one layer, eight channels at a time in registers (vectors.py). Rows are padded to
whole vectors in a plane's working memory; the lanes beyond a row are masked where they would count.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from kvstore.codec import vectors as v
from kvstore.codec.machine_code import compiled, inlined
from kvstore.codec.planes import load_plane, narrowed, pack_plane, packed_bytes, store_plane, unpack_plane

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
SCALE_BASE = (127 - 20) << 3
"""Scale code 0 means 2**-20; eight codes an octave, so code 255 means 1.875 * 2**11."""

_ROUND = np.float32(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds |x| < 2**22 to the nearest integer, ties to even, and vectorizes."""


@compiled
def largest_bits_of_half(patterns):
    """Largest `pattern & 0x7FFF` of a 1-D array of uint16: the bits of the largest magnitude, NaN and Inf above all."""
    mask = v.h_splat(np.int16(0x7FFF))
    a = b = c = e = v.h_splat(np.int16(0))
    whole = patterns.size // 64 * 64
    for i in range(0, whole, 64):
        a = v.h_larger(a, v.h_and(v.load_i16x16(patterns, i), mask))
        b = v.h_larger(b, v.h_and(v.load_i16x16(patterns, i + 16), mask))
        c = v.h_larger(c, v.h_and(v.load_i16x16(patterns, i + 32), mask))
        e = v.h_larger(e, v.h_and(v.load_i16x16(patterns, i + 48), mask))
    sixteen = np.empty(16, np.uint16)
    v.store_u16x16(sixteen, 0, v.h_larger(v.h_larger(a, b), v.h_larger(c, e)))
    largest = np.int64(sixteen.max())
    for i in range(whole, patterns.size):
        largest = max(largest, np.int64(patterns[i] & np.uint16(0x7FFF)))
    return largest


@compiled
def largest_bits_of_single(patterns):
    """As `largest_bits_of_half` for uint32 patterns of float32."""
    largest = np.uint32(0)
    for i in range(patterns.size):
        magnitude = patterns[i] & np.uint32(0x7FFFFFFF)
        largest = magnitude if magnitude > largest else largest
    return largest


@inlined
def _form(values, bits):
    """(levels, unit of zeros, whether codes are symmetric, limit of a magnitude in steps): reference.py."""
    symmetric = values and bits >= 7
    unit = np.int32(1) if symmetric or bits < 6 else np.int32(1 << (bits - 5))
    limit = np.int32((1 << (bits - 1)) - 1) if symmetric else np.int32(127 * unit)
    return np.int32((1 << bits) - 1), unit, symmetric, limit


@inlined
def _scale_codes(low, high, levels, unit, limit):
    """I8: of the smallest steps that span [low, high] and keep |value / step| within `limit`, rounded up to codes."""
    spans = v.splat(np.float32(levels - unit + 1))
    largest = v.larger(
        v.float_of(v.i_and(v.bits_of(low), v.i_splat(np.int32(0x7FFFFFFF)))),
        v.float_of(v.i_and(v.bits_of(high), v.i_splat(np.int32(0x7FFFFFFF)))),
    )
    steps = v.larger(v.divide(v.subtract(high, low), spans), v.divide(largest, v.splat(np.float32(limit))))
    codes = v.i_subtract(v.shifted_right(v.i_add(v.bits_of(steps), v.i_splat(np.int32(0xFFFFF))), 20), v.i_splat(np.int32(SCALE_BASE)))
    return v.i_smaller(v.i_larger(codes, v.i_splat(np.int32(0))), v.i_splat(np.int32(255)))


@inlined
def _scales(codes):
    return v.float_of(v.shifted_left(v.i_add(codes, v.i_splat(np.int32(SCALE_BASE))), 20))


@inlined
def _zeros(low, inverse, levels, unit, symmetric):
    """F8: the integers that code 0 stands for, in units."""
    if symmetric:
        return v.splat(np.float32(-(levels + 1) // 2))
    shifted = v.subtract(v.multiply(low, inverse), v.splat(np.float32(unit - 1) * np.float32(0.5)))
    rounding = v.splat(_ROUND)
    return v.subtract(v.add(v.multiply(shifted, v.splat(np.float32(1) / np.float32(unit))), rounding), rounding)


@inlined
def _codes(x, inverse, origin, levels):
    """I8 of 0 to `levels`; `origin` is _ROUND plus the zero in steps."""
    steps = v.i_subtract(v.bits_of(v.add(v.multiply(x, inverse), v.splat(_ROUND))), v.bits_of(origin))
    return v.i_smaller(v.i_larger(steps, v.i_splat(np.int32(0))), v.i_splat(levels))


@inlined
def _absolute(x):
    return v.float_of(v.i_and(v.bits_of(x), v.i_splat(np.int32(0x7FFFFFFF))))


@compiled
def quantize(half, single, kind, shape, exact, group, widths, canonical, side, keys, values):
    """Fills the sections of a block whose numbers are finite and within range; returns (max |error|, sum of squares).

    `shape` is (layers, heads, tokens, head_dim), `widths` uint8 [layers, 2] the bits of a code of keys and of values. The sections are
    uint8, as block_format.py says. With `canonical` each lossy element is replaced by what `dequantize` will give.

    Squares are summed in float32 per channel of a plane, in token order, then in float64 in the order of planes and channels.
    """
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    padded = (width + 7) // 8 * 8
    rows = (lossy + 7) // 8 * 8
    token_groups, channel_groups = (lossy + group - 1) // group, (width + group - 1) // group
    tile = np.empty(lossy * padded, np.float32)
    codes = np.zeros(lossy * width + 128, np.uint8)
    lows, highs = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    inverses, scales, zeros = np.empty(rows, np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    numbers = np.empty(rows, np.int32)
    squares, eight, sixteen = np.empty(padded, np.float32), np.empty(8, np.float32), np.empty(16, np.uint8)
    for i in range(8):
        eight[i] = np.float32(1) if padded - 8 + i < width else np.float32(0)
    key_scale = 0
    value_scale = layers * heads * token_groups * width
    key_zero = value_scale + layers * heads * lossy * channel_groups
    value_zero = key_zero + value_scale
    key_at = value_at = 0
    total = 0.0
    worst = v.splat(np.float32(0))
    whole, own = v.splat(np.float32(1)), v.load_f32(eight, 0)
    for layer in range(layers):
        for is_value in range(2):
            bits = np.int64(widths[layer, is_value])
            levels, unit, symmetric, limit = _form(is_value == 1, bits)
            plane_bytes = packed_bytes(lossy * width, bits)
            for head in range(heads):
                first = (((layer * 2 + is_value) * heads + head) * tokens + exact) * width
                load_plane(half, single, kind, first, width, tile)
                for d in range(0, padded, 8):
                    v.store_f32(squares, d, v.splat(np.float32(0)))
                if is_value == 0:
                    for start in range(0, lossy, group):
                        stop = min(start + group, lossy)
                        for d in range(padded - 8, -1, -8):  # backwards: what a last vector writes beyond its row is overwritten
                            low = v.load_f32(tile, start * padded + d)
                            high = low
                            for t in range(start + 1, stop):
                                x = v.load_f32(tile, t * padded + d)
                                low, high = v.smaller(low, x), v.larger(high, x)
                            number = _scale_codes(low, high, levels, unit, limit)
                            scale = _scales(number)
                            inverse = v.divide(whole, scale)
                            zero = _zeros(low, inverse, levels, unit, symmetric)
                            if d + 8 <= width:
                                v.store_u8(side, key_scale + d, number)
                                v.store_u8(side, key_zero + d, v.to_int(zero))
                            else:
                                v.store_u8(sixteen, 0, number)
                                v.store_u8(sixteen, 8, v.to_int(zero))
                                for i in range(width - d):
                                    side[key_scale + d + i], side[key_zero + d + i] = sixteen[i], sixteen[8 + i]
                            zero = v.multiply(zero, v.splat(np.float32(unit)))
                            origin = v.add(zero, v.splat(_ROUND))
                            square = v.load_f32(squares, d)
                            for t in range(start, stop):
                                x = v.load_f32(tile, t * padded + d)
                                code = _codes(x, inverse, origin, levels)
                                v.store_u8(codes, t * width + d, code)
                                decoded = narrowed(v.multiply(v.add(v.to_float(code), zero), scale), kind)
                                v.store_f32(tile, t * padded + d, decoded)
                                error = v.subtract(x, decoded)
                                square = v.add(square, v.multiply(error, error))
                                worst = v.larger(worst, _absolute(error))
                            v.store_f32(squares, d, square)
                        key_scale += width
                        key_zero += width
                else:
                    for index in range(channel_groups - 1, -1, -1):  # backwards, as above
                        start = index * group
                        stop = min(start + group, width)
                        full = start + (stop - start) // 8 * 8
                        for t in range(lossy):
                            row = t * padded
                            bottom, top = tile[row + start], tile[row + start]
                            if full > start:
                                low = v.load_f32(tile, row + start)
                                high = low
                                for d in range(start + 8, full, 8):
                                    x = v.load_f32(tile, row + d)
                                    low, high = v.smaller(low, x), v.larger(high, x)
                                bottom, top = v.smallest_lane(low), v.largest_lane(high)
                            for d in range(full, stop):
                                bottom, top = min(bottom, tile[row + d]), max(top, tile[row + d])
                            lows[t], highs[t] = bottom, top
                        for t in range(0, rows, 8):
                            low = v.load_f32(lows, t)
                            number = _scale_codes(low, v.load_f32(highs, t), levels, unit, limit)
                            scale = _scales(number)
                            inverse = v.divide(whole, scale)
                            v.store_i32(numbers, t, number)
                            v.store_f32(scales, t, scale)
                            v.store_f32(inverses, t, inverse)
                            v.store_f32(zeros, t, _zeros(low, inverse, levels, unit, symmetric))
                        for t in range(lossy):
                            side[value_scale + t * channel_groups + index] = np.uint8(numbers[t])
                            if not symmetric:
                                side[value_zero + t * channel_groups + index] = np.uint8(np.int32(zeros[t]))
                            scale, inverse = v.splat(scales[t]), v.splat(inverses[t])
                            zero = v.splat(zeros[t] * np.float32(unit))
                            origin = v.add(zero, v.splat(_ROUND))
                            for d in range(start, stop, 8):
                                x = v.load_f32(tile, t * padded + d)
                                code = _codes(x, inverse, origin, levels)
                                v.store_u8(codes, t * width + d, code)
                                decoded = narrowed(v.multiply(v.add(v.to_float(code), zero), scale), kind)
                                v.store_f32(tile, t * padded + d, decoded)
                                error = v.subtract(x, decoded)
                                if d + 8 > width:
                                    error = v.multiply(error, own)
                                v.store_f32(squares, d, v.add(v.load_f32(squares, d), v.multiply(error, error)))
                                worst = v.larger(worst, _absolute(error))
                    value_scale += lossy * channel_groups
                    if not symmetric:
                        value_zero += lossy * channel_groups
                for i in range(lossy * width, codes.size):
                    codes[i] = np.uint8(0)
                if is_value:
                    pack_plane(codes, bits, values[value_at : value_at + plane_bytes], sixteen)
                    value_at += plane_bytes
                else:
                    pack_plane(codes, bits, keys[key_at : key_at + plane_bytes], sixteen)
                    key_at += plane_bytes
                for d in range(width):
                    total += np.float64(squares[d])
                if canonical:
                    store_plane(tile, half, single, kind, first, width)
    return v.largest_lane(worst), total


@compiled
def dequantize(half, single, kind, shape, exact, group, widths, side, keys, values):
    """Writes the lossy elements of a block: narrow((code + zero) * scale). Sections as in `quantize`; exact tokens are left alone."""
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    padded = (width + 7) // 8 * 8
    token_groups, channel_groups = (lossy + group - 1) // group, (width + group - 1) // group
    tile = np.empty(lossy * padded, np.float32)
    unpacked = np.zeros(lossy * width + 128, np.uint8)
    sixteen = np.zeros(16, np.uint8)
    key_scale = 0
    value_scale = layers * heads * token_groups * width
    key_zero = value_scale + layers * heads * lossy * channel_groups
    value_zero = key_zero + value_scale
    key_at = value_at = 0
    for layer in range(layers):
        for is_value in range(2):
            bits = np.int64(widths[layer, is_value])
            levels, unit, symmetric, _ = _form(is_value == 1, bits)
            plane_bytes = packed_bytes(lossy * width, bits)
            units = v.i_splat(unit)
            for head in range(heads):
                first = (((layer * 2 + is_value) * heads + head) * tokens + exact) * width
                packed = values[value_at : value_at + plane_bytes] if is_value else keys[key_at : key_at + plane_bytes]
                codes = unpacked
                if bits != 8:
                    unpack_plane(packed, bits, unpacked)
                elif width % 8 == 0:
                    codes = packed
                else:
                    unpacked[: packed.size] = packed
                if is_value == 0:
                    key_at += plane_bytes
                    for start in range(0, lossy, group):
                        stop = min(start + group, lossy)
                        for d in range(0, padded, 8):
                            if d + 8 <= width:
                                number, zero = v.load_u8(side, key_scale + d), v.load_i8(side, key_zero + d)
                            else:
                                for i in range(width - d):
                                    sixteen[i], sixteen[8 + i] = side[key_scale + d + i], side[key_zero + d + i]
                                number, zero = v.load_u8(sixteen, 0), v.load_i8(sixteen, 8)
                            scale = _scales(number)
                            origin = v.to_float(v.i_multiply(zero, units))
                            for t in range(start, stop):
                                decoded = v.multiply(v.add(v.to_float(v.load_u8(codes, t * width + d)), origin), scale)
                                v.store_f32(tile, t * padded + d, decoded)
                        key_scale += width
                        key_zero += width
                else:
                    value_at += plane_bytes
                    for t in range(lossy):
                        for index in range(channel_groups):
                            scale = _scales(v.i_splat(np.int32(side[value_scale])))
                            value_scale += 1
                            origin = v.splat(np.float32(-(levels + 1) // 2))
                            if not symmetric:
                                origin = v.splat(np.float32(np.int32(np.int8(side[value_zero])) * unit))
                                value_zero += 1
                            for d in range(index * group, min((index + 1) * group, width), 8):
                                decoded = v.multiply(v.add(v.to_float(v.load_u8(codes, t * width + d)), origin), scale)
                                v.store_f32(tile, t * padded + d, decoded)
                store_plane(tile, half, single, kind, first, width)
