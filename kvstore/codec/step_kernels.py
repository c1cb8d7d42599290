"""Stepping codes down to fewer bits as machine code, without the GIL: equal bit for bit to bit_planes.py. And what that moved.

numba's cache on disk notices changes of the file it caches and of no other: who changes planes.py or vectors.py touches this file too.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore.codec.block_format import BlockHeader, Rung
from kvstore.codec.kernels import BFLOAT16, FLOAT16
from kvstore.codec.machine_code import compiled, inlined
from kvstore.codec.planes import pack_plane, packed_bytes, unpack_plane
from kvstore.codec.reference import U8, Widths, form
from kvstore.errors import CodecFailure

LARGEST_SCALE_CODE = 255


def stepped_down(header: BlockHeader, keys: U8, values: U8, side: U8, *, widths: Widths) -> tuple[bytes, bytes, bytes]:
    """bit_planes.stepped_down. Raises CodecFailure (out_of_range) when a scale would not fit its code."""
    after = replace(header, rung=Rung.INT5, widths=tuple((keys_bits, values_bits) for keys_bits, values_bits in widths))
    _, *sizes = after.unpacked_section_bytes
    new_keys, new_values, new_side = (np.empty(size, np.uint8) for size in sizes)
    largest = drop_planes(
        (header.layers, header.kv_heads, header.block_tokens, header.head_dim),
        header.exact_tokens,
        header.group,
        np.array(header.widths, np.uint8),
        np.array([[_unit_of_zeros(kind == 1, bits) for kind, bits in enumerate(both)] for both in header.widths], np.int32),
        np.array(widths, np.uint8),
        (side, keys, values),
        (new_side, new_keys, new_values),
    )
    if largest > LARGEST_SCALE_CODE:
        raise CodecFailure("a scale would not fit its code", reason="out_of_range")
    return new_keys.tobytes(), new_values.tobytes(), new_side.tobytes()


def _unit_of_zeros(values: bool, bits: int) -> int:
    """In steps; 0 where codes are symmetric, without zeros."""
    _, unit, symmetric, _ = form(values=values, bits=bits)
    return 0 if symmetric else unit


@inlined
def _rounded(steps, planes):
    return (steps + ((1 << planes) >> 1)) >> planes


@inlined
def _planes(low, high, levels):
    """How many planes a group loses whose numbers of steps go from `low` to `high`: bit_planes.dropped."""
    for planes in range(6):
        first = _rounded(low, planes)
        if _rounded(high, planes) - first <= levels and -128 <= first <= 127:
            return planes
    return 6


@compiled
def drop_planes(shape, exact, group, widths, units, new_widths, sections, new_sections):
    """Fills `new_sections` from `sections`, both (side, keys, values) of uint8 as block_format.py says; returns the largest new scale code,
    which may be above LARGEST_SCALE_CODE.

    `shape` is (layers, heads, tokens, head_dim); `widths` and `new_widths` uint8 [layers, 2] are the bits of a code of keys and of
    values, the new ones bit_planes.MOST_BITS at most; `units` int32 [layers, 2] the steps of a zero, 0 where codes are symmetric.
    """
    layers, heads, tokens, width = shape
    lossy = tokens - exact
    side, keys, values = sections
    new_side, new_keys, new_values = new_sections
    token_groups, channel_groups = (lossy + group - 1) // group, (width + group - 1) // group
    unpacked, codes = np.zeros(lossy * width + 128, np.uint8), np.zeros(lossy * width + 128, np.uint8)
    sixteen = np.empty(16, np.uint8)
    bases, lows, highs, planes = np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32)
    key_scale = 0
    value_scale = layers * heads * token_groups * width
    key_zero = value_scale + layers * heads * lossy * channel_groups
    value_zero = new_value_zero = key_zero + value_scale
    at = np.zeros(2, np.int64)
    new_at = np.zeros(2, np.int64)
    largest = 0
    for layer in range(layers):
        for is_value in range(2):
            bits, new_bits = np.int64(widths[layer, is_value]), np.int64(new_widths[layer, is_value])
            unit, levels = np.int32(units[layer, is_value]), np.int32((1 << new_bits) - 1)
            plane_bytes, new_plane_bytes = packed_bytes(lossy * width, bits), packed_bytes(lossy * width, new_bits)
            for _ in range(heads):
                stored = (values if is_value else keys)[at[is_value] : at[is_value] + plane_bytes]
                at[is_value] += plane_bytes
                if bits == 8:
                    unpacked[:plane_bytes] = stored
                else:
                    unpack_plane(stored, bits, unpacked)
                if is_value == 0:
                    for start in range(0, lossy, group):
                        stop = min(start + group, lossy)
                        for d in range(width):
                            bases[d] = np.int32(np.int8(side[key_zero + d])) * unit
                            lows[d] = highs[d] = unpacked[start * width + d]
                        for t in range(start + 1, stop):
                            for d in range(width):
                                code = np.int32(unpacked[t * width + d])
                                lows[d], highs[d] = min(lows[d], code), max(highs[d], code)
                        for d in range(width):
                            low = lows[d] + bases[d]
                            fewer = _planes(low, highs[d] + bases[d], levels)
                            zero = _rounded(low, fewer)
                            scale = np.int64(side[key_scale + d]) + 8 * fewer
                            largest = max(largest, scale)
                            new_side[key_scale + d], new_side[key_zero + d] = np.uint8(scale), np.uint8(zero)
                            planes[d] = fewer
                            lows[d] = zero
                            bases[d] += np.int32((1 << fewer) >> 1)
                        for t in range(start, stop):
                            for d in range(width):
                                rounded = (np.int32(unpacked[t * width + d]) + bases[d]) >> planes[d]
                                codes[t * width + d] = np.uint8(rounded - lows[d])
                        key_scale += width
                        key_zero += width
                else:
                    for t in range(lossy):
                        for index in range(channel_groups):
                            start = t * width + index * group
                            stop = t * width + min((index + 1) * group, width)
                            base = np.int32(-(1 << (bits - 1)))
                            if unit != 0:
                                base = np.int32(np.int8(side[value_zero])) * unit
                                value_zero += 1
                            low = high = np.int32(unpacked[start])
                            for i in range(start + 1, stop):
                                code = np.int32(unpacked[i])
                                low, high = min(low, code), max(high, code)
                            fewer = _planes(low + base, high + base, levels)
                            zero = _rounded(low + base, fewer)
                            scale = np.int64(side[value_scale]) + 8 * fewer
                            largest = max(largest, scale)
                            new_side[value_scale], new_side[new_value_zero] = np.uint8(scale), np.uint8(zero)
                            value_scale += 1
                            new_value_zero += 1
                            base += np.int32((1 << fewer) >> 1)
                            for i in range(start, stop):
                                codes[i] = np.uint8(((np.int32(unpacked[i]) + base) >> fewer) - zero)
                packed = (new_values if is_value else new_keys)[new_at[is_value] : new_at[is_value] + new_plane_bytes]
                new_at[is_value] += new_plane_bytes
                pack_plane(codes, new_bits, packed, sixteen)
    return largest


@inlined
def _wide(half, single, kind, at):
    if kind == BFLOAT16:
        return np.float64(np.uint32(np.uint32(half[at]) << np.uint32(16)).view(np.float32))
    if kind == FLOAT16:
        magnitude = np.uint32((half[at] & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        return np.float64(-magnitude if half[at] & np.uint32(0x8000) else magnitude)
    return np.float64(single[at])


@compiled
def moved(half, single, new_half, new_single, kind):
    """(largest |difference|, sum of its squares in index order) of two blocks, flat, in the views that kernels.py names."""
    worst = total = 0.0
    for at in range(max(half.size, single.size)):
        difference = _wide(half, single, kind, at) - _wide(new_half, new_single, kind, at)
        worst = max(worst, abs(difference))
        total += difference * difference
    return worst, total
