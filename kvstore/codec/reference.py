"""The lossy rungs' arithmetic in plain numpy: the definition that the kernels, and any other implementation, must equal bit for bit.

Everything is float32 with IEEE 754 rounding, ties to even. For one group of numbers x with lowest `low` and highest `high`:

    levels    = 2**bits - 1
    symmetric : values of 7 and 8 bits, whose means are about zero
    unit      = 1, or 2**(bits - 5) for codes above 5 bits that are not symmetric: what zeros count in
    limit     = 2**(bits - 1) - 1 if symmetric, else 127 * unit
    step      = max((high - low) / (levels - unit + 1), max(|low|, |high|) / limit)
    code_s    = step rounded up to 3 mantissa bits, as (bits of step + 2**20 - 1) >> 20, less SCALE_BASE, within 0..255
    scale     = the float32 with the bits (code_s + SCALE_BASE) << 20
    inverse   = 1 / scale
    zero      = -2**(bits - 1) if symmetric, else round((low * inverse - (unit - 1) / 2) / unit) * unit
    code      = min(max(round(x * inverse) - zero, 0), levels)
    stored    : code_s, zero / unit (unless symmetric), code
    decoded   = narrow((code + zero) * scale)

A group is up to `group` tokens of one key channel, or up to `group` channels of one value token; the last may be shorter. Since
(code + zero) * scale has at most 15 significant bits, the product is exact and `narrow`, the rounding to the dtype, is the only rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.codec.kernels import SCALE_BASE

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]

Widths = Sequence[Sequence[int]]
"""[layers][keys, values]: bits of a code."""

PARTS = {4: 2, 5: 8, 6: 4, 7: 8}
"""Into how many parts `pack_plane` cuts a plane."""


def widen(block: np.ndarray, dtype: str) -> F32:
    """float32 of a block that travels as uint16 bit patterns (bfloat16), float16 or float32."""
    if dtype == "bfloat16":
        return (block.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return block.astype(np.float32)


def narrow(values: F32, dtype: str) -> np.ndarray:
    """The elements of `dtype` nearest to float32 values, as they travel."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def form(*, values: bool, bits: int) -> tuple[int, int, bool, int]:
    """(levels, unit, symmetric, limit) of codes of `bits`."""
    symmetric = values and bits >= 7
    unit = 1 if symmetric or bits < 6 else 1 << bits - 5
    return (1 << bits) - 1, unit, symmetric, (1 << bits - 1) - 1 if symmetric else 127 * unit


def quantize(x: F32, *, values: bool, group: int, bits: int) -> tuple[U8, I8, U8]:
    """(scale codes, zeros in units, codes) of keys or values [..., tokens, channels]; scales and zeros have one entry a group."""
    axis = x.ndim - 1 if values else x.ndim - 2
    groups = [
        _quantize_group(x.take(range(start, min(start + group, x.shape[axis])), axis), axis=axis, values=values, bits=bits)
        for start in range(0, x.shape[axis], group)
    ]
    scales, zeros, codes = (np.concatenate(parts, axis) for parts in zip(*groups, strict=True))
    return scales, zeros, codes


def _quantize_group(x: F32, *, axis: int, values: bool, bits: int) -> tuple[U8, I8, U8]:
    levels, unit, symmetric, limit = form(values=values, bits=bits)
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = np.maximum((high - low) / np.float32(levels - unit + 1), np.maximum(np.abs(low), np.abs(high)) / np.float32(limit))
    number = ((step.view(np.uint32) + np.uint32(0xFFFFF)) >> np.uint32(20)).astype(np.int32) - SCALE_BASE
    scale_code = np.clip(number, 0, 255).astype(np.uint8)
    inverse = np.float32(1) / scale_of(scale_code)
    if symmetric:
        zero = np.full_like(low, -(1 << bits - 1))
    else:
        zero = np.rint((low * inverse - np.float32(unit - 1) * np.float32(0.5)) * (np.float32(1) / np.float32(unit)))
    code = np.clip(np.rint(x * inverse) - zero * np.float32(unit), 0, levels)
    return scale_code, np.zeros_like(zero, np.int8) if symmetric else zero.astype(np.int8), code.astype(np.uint8)


def dequantize(scale_codes: U8, zeros: I8, codes: U8, *, values: bool, group: int, bits: int, dtype: str) -> np.ndarray:
    """The elements that `quantize`'s result stands for, as they travel."""
    _, unit, symmetric, _ = form(values=values, bits=bits)
    axis = codes.ndim - 1 if values else codes.ndim - 2
    count = codes.shape[axis]
    scale = scale_of(scale_codes).repeat(group, axis).take(range(count), axis)
    zero = zeros.astype(np.float32).repeat(group, axis).take(range(count), axis) * np.float32(unit)
    return narrow((codes.astype(np.float32) + (np.float32(-(1 << bits - 1)) if symmetric else zero)) * scale, dtype)


def scale_of(codes: U8) -> F32:
    return ((codes.astype(np.uint32) + np.uint32(SCALE_BASE)) << np.uint32(20)).view(np.float32)


def pack_plane(codes: U8, bits: int) -> U8:
    """The codes of one plane as bytes, `plane_bytes` of them.

    They are cut into parts of equal size, padded with zeros: 2 at 4 bits, 4 at 6, 8 at 5 and 7. Byte j of the first 8 * parts * bits /
    64 of them has code j of its part below and, above, a piece of what the other parts' codes j make in one row of bits: the
    lowest piece in the first part. So long rows of bytes unpack with shifts alone.
    """
    flat = codes.reshape(-1)
    if bits == 8:
        return flat
    parts = PARTS[bits]
    carriers = parts * bits // 8
    size = -(-flat.size // parts)
    padded = np.zeros(parts * size, np.uint16)
    padded[: flat.size] = flat
    rows = padded.reshape(parts, size)
    rest = np.zeros(size, np.uint16)
    for index, row in enumerate(rows[carriers:]):
        rest |= row << np.uint16(bits * index)
    pieces = [
        rows[index] | (rest >> np.uint16((8 - bits) * index) & np.uint16((1 << 8 - bits) - 1)) << np.uint16(bits)
        for index in range(carriers)
    ]
    return np.concatenate(pieces).astype(np.uint8)


def unpack_plane(packed: U8, bits: int, *, count: int) -> U8:
    """The first `count` codes of a packed plane."""
    if bits == 8:
        return packed
    parts = PARTS[bits]
    rows = packed.reshape(parts * bits // 8, -1).astype(np.uint16)
    rest = np.zeros(rows.shape[1], np.uint16)
    for index, row in enumerate(rows):
        rest |= (row >> np.uint16(bits)) << np.uint16((8 - bits) * index)
    mask = np.uint16((1 << bits) - 1)
    codes = [*(rows & mask), *(rest >> np.uint16(bits * index) & mask for index in range(parts - len(rows)))]
    return np.concatenate(codes)[:count].astype(np.uint8)


def sections(block: np.ndarray, *, dtype: str, exact: int, group: int, widths: Widths) -> tuple[bytes, bytes, bytes]:
    """The sections side, keys and values of a block [layers, 2, heads, tokens, head_dim] (block_format.py), before packing."""
    x = widen(block, dtype)[..., exact:, :]
    side: list[list[bytes]] = [[], [], [], []]
    packed: list[list[bytes]] = [[], []]
    for layer, bits_of in enumerate(widths):
        for kind, bits in enumerate(bits_of):
            scales, zeros, codes = quantize(x[layer, kind], values=kind == 1, group=group, bits=bits)
            side[kind].append(scales.tobytes())
            if not form(values=kind == 1, bits=bits)[2]:
                side[2 + kind].append(zeros.tobytes())
            packed[kind] += [pack_plane(plane, bits).tobytes() for plane in codes]
    return b"".join(map(b"".join, side)), b"".join(packed[0]), b"".join(packed[1])


def canonical(block: np.ndarray, *, dtype: str, exact: int, group: int, widths: Widths) -> np.ndarray:
    """decode(encode(block)): the first `exact` tokens as they are, the others quantized and back."""
    result = block.copy()
    x = widen(block, dtype)[..., exact:, :]
    for layer, bits_of in enumerate(widths):
        for kind, bits in enumerate(bits_of):
            stored = quantize(x[layer, kind], values=kind == 1, group=group, bits=bits)
            result[layer, kind, :, exact:] = dequantize(*stored, values=kind == 1, group=group, bits=bits, dtype=dtype)
    return result


def measured_error(block: np.ndarray, decoded: np.ndarray, *, dtype: str, exact: int) -> tuple[float, float]:
    """(largest |error|, root mean square error over all elements of the block), summed in the kernels' order.

    Squares are summed in float32 over the tokens of each (layer, K or V, head, channel), then in float64 in index order.
    """
    error = (widen(block, dtype) - widen(decoded, dtype))[..., exact:, :]
    squares = np.zeros((*error.shape[:3], error.shape[4]), np.float32)
    for token in range(error.shape[3]):
        squares = squares + error[..., token, :] * error[..., token, :]
    total = np.add.accumulate(squares.reshape(-1).astype(np.float64))[-1]
    return float(np.abs(error).max()), float(np.sqrt(total / block.size))
