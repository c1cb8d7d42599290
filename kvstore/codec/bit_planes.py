"""Stepping codes down to fewer bits without decoding them: low bit planes are dropped, group by group, no more than it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvstore.codec.block_format import BlockHeader, plane_bytes, symmetric_values
from kvstore.codec.reference import I8, U8, Widths, form, pack_plane, unpack_plane

MOST_BITS = 5
"""Of the result: with wider codes zeros count in units, which dropped planes do not meet."""

_CODES_AN_OCTAVE = 8
"""Of the scale codes: one plane less is one octave more."""

_LOWEST_ZERO, _HIGHEST_ZERO = -128, 127


def stepped_down(header: BlockHeader, keys: U8, values: U8, side: U8, *, widths: Widths) -> tuple[bytes, bytes, bytes]:
    """The sections keys, values and side, unpacked, of the same block with codes of `widths`: MOST_BITS at most, none wider than now."""
    scales: tuple[list[U8], list[U8]] = ([], [])
    zeros: tuple[list[I8], list[I8]] = ([], [])
    packed: tuple[list[U8], list[U8]] = ([], [])
    for kind, layer, scale, steps in _planes(header, keys, values, side):
        new_scale, zero, codes = dropped(scale, steps, axis=1 + kind, group=header.group, bits=widths[layer][kind])
        scales[kind].append(new_scale)
        zeros[kind].append(zero)
        packed[kind].extend(pack_plane(plane, widths[layer][kind]) for plane in codes)
    new_side = b"".join(part.tobytes() for parts in (*scales, *zeros) for part in parts)
    return b"".join(part.tobytes() for part in packed[0]), b"".join(part.tobytes() for part in packed[1]), new_side


def dropped(scale_codes: U8, steps: np.ndarray, *, axis: int, group: int, bits: int) -> tuple[U8, I8, U8]:
    """(scale codes, zeros, codes of `bits`) for numbers of steps; groups of up to `group` along `axis`.

    A group keeps its planes from the lowest one with which its numbers span at most 2**bits - 1 steps and its zero fits a byte.
    Halves are rounded up. The numbers of a group stay within half a step of the new scale.
    """
    levels = (1 << bits) - 1
    scales, zeros, kept = [], [], []
    for index, start in enumerate(range(0, steps.shape[axis], group)):
        own = steps.take(range(start, min(start + group, steps.shape[axis])), axis).astype(np.int32)
        low, high = own.min(axis, keepdims=True), own.max(axis, keepdims=True)
        planes = np.full_like(low, 6)
        for count in (5, 4, 3, 2, 1, 0):
            first = _rounded(low, count)
            fits = (_rounded(high, count) - first <= levels) & (first >= _LOWEST_ZERO) & (first <= _HIGHEST_ZERO)
            planes = np.where(fits, count, planes)
        zero = _rounded(low, planes)
        scales.append((scale_codes.take([index], axis).astype(np.int32) + _CODES_AN_OCTAVE * planes).astype(np.uint8))
        zeros.append(zero.astype(np.int8))
        kept.append((_rounded(own, planes) - zero).astype(np.uint8))
    return np.concatenate(scales, axis), np.concatenate(zeros, axis), np.concatenate(kept, axis)


def _planes(header: BlockHeader, keys: U8, values: U8, side: U8) -> Iterator[tuple[int, int, U8, np.ndarray]]:
    """(kind, layer, scale codes [heads, ...], numbers of steps [heads, tokens, channels]): of all keys first, then of all values."""
    lossy = header.block_tokens - header.exact_tokens
    shapes = (
        (header.kv_heads, math.ceil(lossy / header.group), header.head_dim),
        (header.kv_heads, lossy, math.ceil(header.head_dim / header.group)),
    )
    zero_at = header.layers * (math.prod(shapes[0]) + math.prod(shapes[1]))
    scale_at = 0
    for kind, section in enumerate((keys, values)):
        code_at = 0
        count = math.prod(shapes[kind])
        for layer, both in enumerate(header.widths):
            bits = both[kind]
            scales = side[scale_at : scale_at + count].reshape(shapes[kind])
            scale_at += count
            _, unit, symmetric, _ = form(values=kind == 1, bits=bits)
            assert symmetric == (kind == 1 and symmetric_values(bits))
            zero = np.full(shapes[kind], -(1 << bits - 1), np.int32)
            if not symmetric:
                zero = side[zero_at : zero_at + count].view(np.int8).reshape(shapes[kind]).astype(np.int32) * unit
                zero_at += count
            size = plane_bytes(lossy * header.head_dim, bits)
            stored = section[code_at : code_at + header.kv_heads * size].reshape(header.kv_heads, size)
            code_at += stored.size
            codes = np.stack([unpack_plane(plane, bits, count=lossy * header.head_dim) for plane in stored])
            codes = codes.reshape(header.kv_heads, lossy, header.head_dim).astype(np.int32)
            spread = zero.repeat(header.group, 1 + kind).take(range(codes.shape[1 + kind]), 1 + kind)
            yield kind, layer, scales, codes + spread


def _rounded(steps: np.ndarray, planes: np.ndarray | int) -> np.ndarray:
    halves = np.left_shift(1, planes) >> 1
    result: np.ndarray = (steps + halves) >> planes
    return result
