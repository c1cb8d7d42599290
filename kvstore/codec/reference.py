"""The lossy rungs' arithmetic in plain numpy: the definition that the kernels, and any other implementation, must equal bit for bit.

Everything is float32 with IEEE 754 rounding, ties to even. For one group of numbers x with lowest `low` and highest `high`:

    levels  = 2**bits - 1
    step    = max((high - low) / levels, max(|low|, |high|) / 127)
    code_s  = step rounded up to 3 mantissa bits, as (bits of step + 2**20 - 1) >> 20, less SCALE_BASE, within 0..255
    scale   = the float32 with the bits (code_s + SCALE_BASE) << 20
    inverse = 1 / scale
    zero    = -128 at 8 bits, else round(low * inverse)
    k       = min(max(round(x * inverse), zero), zero + levels)
    stored  : code_s, zero (below 8 bits), k - zero
    decoded = narrow(k * scale)

A group is up to `group` tokens of one key channel, or up to `group` channels of one value token; the last may be shorter. Since
k * scale has at most 12 significant bits, the product is exact and `narrow`, the rounding to the dtype, is the only rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.codec.kernels import SCALE_BASE

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I8 = npt.NDArray[np.int8]


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


def quantize(x: F32, *, axis: int, group: int, bits: int) -> tuple[U8, I8, U8]:
    """(scale codes, zeros, codes) of `x`, grouped along `axis`; scales and zeros have one entry for each group there."""
    scales, zeros, codes = [], [], []
    for start in range(0, x.shape[axis], group):
        part = x.take(range(start, min(start + group, x.shape[axis])), axis)
        scale, zero, code = _quantize_group(part, axis=axis, bits=bits)
        scales.append(scale)
        zeros.append(zero)
        codes.append(code)
    return np.concatenate(scales, axis), np.concatenate(zeros, axis), np.concatenate(codes, axis)


def _quantize_group(x: F32, *, axis: int, bits: int) -> tuple[U8, I8, U8]:
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    levels = np.float32(2**bits - 1)
    step = np.maximum((high - low) / levels, np.maximum(np.abs(low), np.abs(high)) / np.float32(127))
    code = ((step.view(np.uint32) + np.uint32(0xFFFFF)) >> np.uint32(20)).astype(np.int32) - SCALE_BASE
    scale_code = np.clip(code, 0, 255).astype(np.uint8)
    inverse = np.float32(1) / scale_of(scale_code)
    zero = np.full_like(low, -128) if bits == 8 else np.rint(low * inverse)
    k = np.minimum(np.maximum(np.rint(x * inverse), zero), zero + levels)
    return scale_code, zero.astype(np.int8), (k - zero).astype(np.uint8)


def dequantize(scale_codes: U8, zeros: I8, codes: U8, *, axis: int, group: int, dtype: str) -> np.ndarray:
    """The elements that `quantize`'s result stands for, as they travel."""
    count = codes.shape[axis]
    scale = scale_of(scale_codes).repeat(group, axis).take(range(count), axis)
    zero = zeros.astype(np.float32).repeat(group, axis).take(range(count), axis)
    return narrow((codes.astype(np.float32) + zero) * scale, dtype)


def scale_of(codes: U8) -> F32:
    return ((codes.astype(np.uint32) + np.uint32(SCALE_BASE)) << np.uint32(20)).view(np.float32)


def pack_rows(codes: U8, bits: int) -> U8:
    """Rows as stored. Below 8 bits: byte j of a half row holds the low four bits of codes j (low) and j + half (high); then for each
    further bit an eighth of a row, bit b of byte j being that of code b * eighth + j. Rows are padded with zeros."""
    if bits == 8:
        return codes
    width = codes.shape[-1]
    half, eighth = (width + 1) // 2, (width + 7) // 8
    padded = np.zeros((*codes.shape[:-1], 8 * eighth), np.uint8)
    padded[..., :width] = codes
    low = padded & 15
    pieces = [np.bitwise_or(low[..., :half], np.left_shift(low[..., half : 2 * half], 4, dtype=np.uint8))]
    for plane in range(4, bits):
        columns = (padded >> plane & 1).reshape(*codes.shape[:-1], 8, eighth)
        pieces.append(np.packbits(columns, axis=-2, bitorder="little")[..., 0, :])
    return np.concatenate(pieces, axis=-1)


def lossy_sections(block: np.ndarray, *, dtype: str, exact: int, group: int, bits: int) -> tuple[bytes, bytes, bytes]:
    """The sections side, keys and values of a block [layers, 2, heads, tokens, head_dim] (block_format.py), before packing."""
    x = widen(block, dtype)[..., exact:, :]
    key_scales, key_zeros, keys = quantize(x[:, 0], axis=2, group=group, bits=bits)
    value_scales, value_zeros, values = quantize(x[:, 1], axis=3, group=group, bits=bits)
    side = key_scales.tobytes() + value_scales.tobytes()
    if bits != 8:
        side += key_zeros.tobytes() + value_zeros.tobytes()
    return side, pack_rows(keys, bits).tobytes(), pack_rows(values, bits).tobytes()


def canonical(block: np.ndarray, *, dtype: str, exact: int, group: int, bits: int) -> np.ndarray:
    """decode(encode(block)): the first `exact` tokens as they are, the others quantized and back."""
    result = block.copy()
    x = widen(block, dtype)[..., exact:, :]
    for kv, axis in ((0, 2), (1, 3)):
        scale, zero, codes = quantize(x[:, kv], axis=axis, group=group, bits=bits)
        result[:, kv, :, exact:] = dequantize(scale, zero, codes, axis=axis, group=group, dtype=dtype)
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
