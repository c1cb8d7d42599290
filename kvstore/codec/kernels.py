"""The lossy rungs' arithmetic as fused machine code: one pass over a block, without the GIL, equal bit for bit to reference.py.

Every operation is a float32 operation of IEEE 754 in a stated order (no fastmath, no contraction), so that another
implementation, torch on a device say, gives the same bytes. All kernels and what they call stay in this one file, because
numba's cache on disk notices changes of the file it caches and of no other.

Inner loops run from 0 over a slice: an index such as `first + i` might be negative, and the test for that keeps LLVM from
vectorizing (2 to 3 times slower).

A block arrives flat, in C order [layers, 2, heads, tokens, head_dim], in one of two views: `half` (uint16 bit patterns of
bfloat16 or float16) or `single` (float32); the other view is empty and `kind` says which. Work goes by tiles: the lossy
tokens of one head's keys, or values, in one layer.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

Kernel = Callable[..., Any]

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
SCALE_BASE = (127 - 20) << 3
"""Scale code 0 means 2**-20; eight codes an octave, so code 255 means 1.875 * 2**11."""

_ROUND = np.float32(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds |x| < 2**22 to the nearest integer, ties to even, and vectorizes."""


def compiled(function: Kernel) -> Kernel:
    """`function` as a GIL-free kernel, cached on disk beside this file or in the user's cache folder.

    Where neither can be written (a read-only installation without a home) it is compiled anew in each process.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba: "no locator available"
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]


def inlined(function: Kernel) -> Kernel:
    """A part of a kernel. Without forced inlining its calls, some thirty arguments each, cost ten times its work."""
    return numba.njit(forceinline=True)(function)  # type: ignore[no-any-return]


@compiled
def largest_bits(patterns, mask):
    """Largest `patterns & mask` of a 1-D array of unsigned integers: the bits of the largest magnitude, NaN and Inf above all."""
    largest = patterns[0] & mask
    for i in range(patterns.size):
        magnitude = patterns[i] & mask
        largest = magnitude if magnitude > largest else largest
    return largest


@inlined
def _to_float(bits):
    return np.uint32(bits).view(np.float32)


@inlined
def _to_bits(value):
    return np.float32(value).view(np.uint32)


@inlined
def _bfloat16_bits(value):
    bits = _to_bits(value)
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@inlined
def _float16_bits(value):
    bits = _to_bits(value)
    sign = np.uint32(bits & np.uint32(0x80000000))
    bits = np.uint32(bits ^ sign)
    if bits < np.uint32(113 << 23):  # below 2**-14: the sum with 0.5 rounds to a multiple of float16's smallest step
        narrow = np.uint32(_to_bits(_to_float(bits) + np.float32(0.5)) - np.uint32(126 << 23))
    else:
        narrow = np.uint32(bits + np.uint32(0xC8000FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    return np.uint32(narrow | (sign >> np.uint32(16)))


@inlined
def _float16_value(bits):
    magnitude = _to_float((bits & np.uint32(0x7FFF)) << np.uint32(13)) * np.float32(2.0**112)
    return _to_float(_to_bits(magnitude) | ((bits & np.uint32(0x8000)) << np.uint32(16)))


@inlined
def _load(half, single, kind, first, out):
    """`out.size` elements from `first` on, widened to float32; exact for every finite value."""
    if kind == 2:
        wide = single[first : first + out.size]
        for i in range(out.size):
            out[i] = wide[i]
    else:
        bits = half[first : first + out.size]
        if kind == 0:
            for i in range(out.size):
                out[i] = _to_float(np.uint32(bits[i]) << np.uint32(16))
        else:
            for i in range(out.size):
                out[i] = _float16_value(np.uint32(bits[i]))


@inlined
def _narrow(values, kind):
    """Rounds float32 `values` in place to what the dtype can hold, ties to even."""
    if kind == 0:
        for i in range(values.size):
            values[i] = _to_float(_bfloat16_bits(values[i]) << np.uint32(16))
    elif kind == 1:
        for i in range(values.size):
            values[i] = _float16_value(_float16_bits(values[i]))


@inlined
def _store(values, half, single, kind, first):
    """Writes float32 `values` as the dtype's elements from `first` on, rounded as by `_narrow`."""
    if kind == 2:
        wide = single[first : first + values.size]
        for i in range(values.size):
            wide[i] = values[i]
    else:
        bits = half[first : first + values.size]
        if kind == 0:
            for i in range(values.size):
                bits[i] = np.uint16(_bfloat16_bits(values[i]))
        else:
            for i in range(values.size):
                bits[i] = np.uint16(_float16_bits(values[i]))


@inlined
def _scale_code(low, high, levels):
    """The smallest step that spans [low, high] in `levels` steps and keeps |value / step| within 127, rounded up to a code."""
    step = (high - low) / np.float32(levels)
    largest = max(abs(low), abs(high)) / np.float32(127.0)
    step = largest if largest > step else step
    code = np.int32((_to_bits(step) + np.uint32(0xFFFFF)) >> np.uint32(20)) - np.int32(SCALE_BASE)
    return np.uint8(min(max(code, np.int32(0)), np.int32(255)))


@inlined
def _scale(code):
    return _to_float((np.uint32(code) + np.uint32(SCALE_BASE)) << np.uint32(20))


@inlined
def _zero(low, inverse, bits):
    """The integer that code 0 stands for: fixed at 8 bits, where the codes reach from -128 to 127 anyway."""
    if bits == 8:
        return np.float32(-128.0)
    return (low * inverse + _ROUND) - _ROUND


@inlined
def _channel_extents(tile, low, high):
    """(low, high) of each channel over the rows of a tile; four rows at a time, to touch `low` and `high` less often."""
    rows, width = tile.shape
    for d in range(width):
        low[d] = tile[0, d]
        high[d] = tile[0, d]
    row = 1
    while row + 4 <= rows:
        for d in range(width):
            a, b, c, e = tile[row, d], tile[row + 1, d], tile[row + 2, d], tile[row + 3, d]
            below = a if a < b else b
            below_too = c if c < e else e
            below = below if below < below_too else below_too
            low[d] = low[d] if low[d] < below else below
            above = a if a > b else b
            above_too = c if c > e else e
            above = above if above > above_too else above_too
            high[d] = high[d] if high[d] > above else above
        row += 4
    while row < rows:
        for d in range(width):
            value = tile[row, d]
            low[d] = low[d] if low[d] < value else value
            high[d] = high[d] if high[d] > value else value
        row += 1


@inlined
def _row_extent(row):
    """(smallest, largest) of a row, compared as integers in the order of the floats: float reductions do not vectorize."""
    smallest = np.int32(0x7FFFFFFF)
    largest = np.int32(-0x80000000)
    for d in range(row.size):
        bits = np.int32(_to_bits(row[d]))
        key = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        smallest = key if key < smallest else smallest
        largest = key if key > largest else largest
    smallest = np.int32(smallest ^ ((smallest >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    largest = np.int32(largest ^ ((largest >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return _to_float(smallest), _to_float(largest)


@inlined
def _quantize_row(row, scale, inverse, zero, levels, codes, decoded):
    # Two loops, because LLVM gives up on vectorizing one loop over six arrays that might overlap.
    for d in range(row.size):
        step = (row[d] * inverse[d] + _ROUND) - _ROUND
        top = zero[d] + levels
        step = step if step > zero[d] else zero[d]
        decoded[d] = step if step < top else top
    for d in range(row.size):
        step = decoded[d]
        codes[d] = np.uint8(np.int32(step - zero[d]))
        decoded[d] = step * scale[d]


@inlined
def _dequantize(packed, bits, scale, zero, decoded):
    """A row of keys, whose scales and zeros differ by channel."""
    width = decoded.size
    if bits == 8:
        for d in range(width):
            decoded[d] = (np.float32(packed[d]) + zero[d]) * scale[d]
    elif bits == 4:
        half = packed.size
        for d in range(half):
            decoded[d] = (np.float32(packed[d] & np.uint8(15)) + zero[d]) * scale[d]
        upper, upper_zero, upper_scale = decoded[half:], zero[half:], scale[half:]
        for d in range(width - half):
            upper[d] = (np.float32(packed[d] >> np.uint8(4)) + upper_zero[d]) * upper_scale[d]
    else:
        half, eighth = (width + 1) // 2, (width + 7) // 8
        for d in range(half):
            decoded[d] = np.float32(packed[d] & np.uint8(15))
        upper = decoded[half:]
        for d in range(width - half):
            upper[d] = np.float32(packed[d] >> np.uint8(4))
        for plane in range(bits - 4):
            row = packed[half + plane * eighth : half + (plane + 1) * eighth]
            worth = np.float32(16 << plane)
            for bit in range(8):
                part = decoded[min(bit * eighth, width) : min((bit + 1) * eighth, width)]
                for d in range(part.size):
                    part[d] += np.float32((row[d] >> np.uint8(bit)) & np.uint8(1)) * worth
        for d in range(width):
            decoded[d] = (decoded[d] + zero[d]) * scale[d]


@inlined
def _pack_row(codes, bits, out):
    """8 bits: as they are. Fewer: byte j of the first half row holds the low four bits of code j, and above them those of code
    j + half, so that both halves stay contiguous; then a row of an eighth for each further bit: bit b of byte j is that of code
    b * eighth + j. `codes` has one 0 more than the row."""
    width = codes.size - 1
    if bits == 8:
        for d in range(width):
            out[d] = codes[d]
    else:
        half, eighth = (width + 1) // 2, (width + 7) // 8
        upper = codes[half:]
        for d in range(half):
            out[d] = (codes[d] & np.uint8(15)) | np.uint8(upper[d] << np.uint8(4))
        for plane in range(bits - 4):
            row = out[half + plane * eighth : half + (plane + 1) * eighth]
            row[:] = np.uint8(0)
            for bit in range(8):
                part = codes[min(bit * eighth, width) : min((bit + 1) * eighth, width)]
                for d in range(part.size):
                    row[d] |= ((part[d] >> np.uint8(4 + plane)) & np.uint8(1)) << np.uint8(bit)


@inlined
def _measure(tile, decoded, worst, squares):
    """Moves `worst` and `squares` of each channel by the rows of a tile, in their order; four at a time."""
    rows, width = tile.shape
    row = 0
    while row + 4 <= rows:
        for d in range(width):
            a = tile[row, d] - decoded[row, d]
            b = tile[row + 1, d] - decoded[row + 1, d]
            c = tile[row + 2, d] - decoded[row + 2, d]
            e = tile[row + 3, d] - decoded[row + 3, d]
            squares[d] = (((squares[d] + a * a) + b * b) + c * c) + e * e
            a, b, c, e = abs(a), abs(b), abs(c), abs(e)
            a = a if a > b else b
            c = c if c > e else e
            a = a if a > c else c
            worst[d] = worst[d] if worst[d] > a else a
        row += 4
    while row < rows:
        for d in range(width):
            a = abs(tile[row, d] - decoded[row, d])
            squares[d] += a * a
            worst[d] = worst[d] if worst[d] > a else a
        row += 1


@compiled
def quantize(
    half, single, kind, shape, exact, group, bits, canonical, key_scales, value_scales, key_zeros, value_zeros, key_codes, value_codes
):
    """Fills scales, zeros and codes of a block whose values are finite and within range; returns (max |error|, sum of squares).

    `shape` is (layers, heads, tokens, head_dim). key_scales [layers * heads, token groups, head_dim] and value_scales
    [layers * heads, tokens - exact, channel groups] are uint8; zeros int8 of the same shapes, or empty at 8 bits; codes
    [layers * heads, tokens - exact, packed row] uint8. With `canonical` each lossy element is replaced by what `dequantize`
    will give.

    Squares are summed in float32 per channel of a tile, in token order, then in float64 in the order of tiles and channels.
    """
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    levels = np.float32((1 << bits) - 1)
    tile = np.empty((lossy, width), np.float32)
    decoded = np.empty((lossy, width), np.float32)
    low = np.empty(width, np.float32)
    high = np.empty(width, np.float32)
    scale = np.empty(width, np.float32)
    inverse = np.empty(width, np.float32)
    zero = np.empty(width, np.float32)
    codes = np.zeros(width + 1, np.uint8)  # one more for the last nibble of an odd row
    worst = np.zeros(width, np.float32)
    squares = np.empty(width, np.float32)
    total = 0.0
    for index in range(layers * 2 * heads):
        values = index // heads % 2 == 1
        plane = index // (2 * heads) * heads + index % heads
        first = (index * tokens + exact) * width
        _load(half, single, kind, first, tile.reshape(-1))
        for t in range(lossy):
            if values:
                for g in range(value_scales.shape[2]):
                    start, stop = g * group, min((g + 1) * group, width)
                    bottom, top = _row_extent(tile[t, start:stop])
                    code = _scale_code(bottom, top, levels)
                    step = _scale(code)
                    origin = _zero(bottom, np.float32(1.0) / step, bits)
                    value_scales[plane, t, g] = code
                    scale[start:stop] = step
                    inverse[start:stop] = np.float32(1.0) / step
                    zero[start:stop] = origin
                    if bits != 8:
                        value_zeros[plane, t, g] = np.int8(origin)
            elif t % group == 0:
                _channel_extents(tile[t : min(t + group, lossy)], low, high)
                for d in range(width):
                    code = _scale_code(low[d], high[d], levels)
                    key_scales[plane, t // group, d] = code
                    scale[d] = _scale(code)
                    inverse[d] = np.float32(1.0) / scale[d]
                    zero[d] = _zero(low[d], inverse[d], bits)
                if bits != 8:
                    for d in range(width):
                        key_zeros[plane, t // group, d] = np.int8(zero[d])
            _quantize_row(tile[t], scale, inverse, zero, levels, codes, decoded[t])
            _pack_row(codes, bits, value_codes[plane, t] if values else key_codes[plane, t])
        _narrow(decoded.reshape(-1), kind)
        squares[:] = np.float32(0)
        _measure(tile, decoded, worst, squares)
        for d in range(width):
            total += np.float64(squares[d])
        if canonical:
            _store(decoded.reshape(-1), half, single, kind, first)
    largest = np.float32(0)
    for d in range(width):
        largest = max(largest, worst[d])
    return largest, total


@compiled
def dequantize(half, single, kind, shape, exact, group, bits, key_scales, value_scales, key_zeros, value_zeros, key_codes, value_codes):
    """Writes the lossy elements of a block: narrow((code + zero) * scale). Shapes as in `quantize`; exact tokens are left alone."""
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    decoded = np.empty(width, np.float32)
    scale = np.empty(width, np.float32)
    zero = np.full(width, np.float32(-128.0))
    for index in range(layers * 2 * heads):
        values = index // heads % 2 == 1
        plane = index // (2 * heads) * heads + index % heads
        first = (index * tokens + exact) * width
        for t in range(lossy):
            if values:
                for g in range(value_scales.shape[2]):
                    start, stop = g * group, min((g + 1) * group, width)
                    scale[start:stop] = _scale(value_scales[plane, t, g])
                    if bits != 8:
                        zero[start:stop] = np.float32(value_zeros[plane, t, g])
            elif t % group == 0:
                for d in range(width):
                    scale[d] = _scale(key_scales[plane, t // group, d])
                if bits != 8:
                    for d in range(width):
                        zero[d] = np.float32(key_zeros[plane, t // group, d])
            _dequantize(value_codes[plane, t] if values else key_codes[plane, t], bits, scale, zero, decoded)
            _store(decoded, half, single, kind, first + t * width)
