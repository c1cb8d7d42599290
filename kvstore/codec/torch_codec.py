"""The rungs int8 to int4 on a torch device: payloads equal to BlockCodec's byte for byte, without a copy of the block on the host.

The arithmetic is reference.py's: on CUDA devices as Triton kernels where Triton is installed (the extra `cuda`), otherwise as single
float32 and integer operations of torch, none of them fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import torch

from kvstore.codec.block_codec import MAX_MAGNITUDE, BlockCodec
from kvstore.codec.block_format import BITS, BlockHeader, plane_bytes
from kvstore.codec.kernels import SCALE_BASE
from kvstore.codec.reference import PARTS, Widths, form
from kvstore.errors import CodecFailure, ConfigError, UnsupportedFormat

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TorchCodec:
    """Blocks are tensors [layers, 2, heads, block_tokens, head_dim] of the layout's dtype on one device. Safe to share between threads."""

    def __init__(self, codec: BlockCodec, *, triton: bool | None = None) -> None:
        """`triton`: whether Triton's kernels work instead of torch's operations; by default where they can, on CUDA devices.

        Raises ConfigError for a rung without codes of one width."""
        if codec.rung not in BITS:
            raise ConfigError(f"on a device the rungs are {', '.join(BITS)}, not {codec.rung}")
        self._codec = codec
        self._triton = triton
        layout = codec.layout
        heads = layout.kv_heads // layout.tensor_parallel
        self._shape = (layout.layers, 2, heads, layout.block_tokens, layout.head_dim)
        self._dtype = _DTYPES[layout.dtype]

    def encode(self, block: torch.Tensor, *, start_position: int, canonical: bool = False) -> bytes:
        """As BlockCodec.encode, and with `canonical` as encode_canonical. Cost: some hundred operations of the device, then a copy of
        the codes to the host."""
        self._check(block)
        header = self._codec.header_of(start_position)
        tokens = header.exact_tokens
        exact = block[..., :tokens, :].contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
        empty = np.empty(0, np.uint8)
        if tokens == header.block_tokens:
            return self._codec.assembled([exact, empty, empty, empty], start_position=start_position, largest=0.0, squares=0.0)
        wide = block[..., tokens:, :].float()
        largest = float(wide.abs().max())
        if not np.isfinite(largest):
            raise CodecFailure("the block holds NaN or Inf", reason="not_finite")
        if largest > MAX_MAGNITUDE:
            raise CodecFailure(f"magnitudes are taken up to {MAX_MAGNITUDE}, the block holds {largest}", reason="out_of_range")
        decoded = torch.empty_like(block)
        fused = self._fused(block)
        scales: list[torch.Tensor] = []
        zeros: list[torch.Tensor] = []
        packed: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for kind, layers, bits in _runs(header.widths):
            if fused:
                from kvstore.codec import triton_kernels

                planes_of = triton_kernels.Planes(kind=kind, layers=layers, exact=tokens, group=header.group, bits=bits)
                scale, zero, planes = triton_kernels.quantize(block, planes_of)
                triton_kernels.dequantize(scale, zero, planes, decoded, planes_of)
            else:
                scale, zero, codes = _quantized(wide[layers, kind], values=kind == 1, group=header.group, bits=bits)
                numbers = _dequantized(scale, zero, codes, values=kind == 1, group=header.group, bits=bits)
                decoded[layers, kind, :, tokens:] = numbers.to(self._dtype)
                planes = _packed(codes.flatten(-2), bits)
            scales.append(scale)
            zeros += [] if form(values=kind == 1, bits=bits)[2] else [zero.view(torch.uint8)]
            packed[kind].append(planes)
        worst, squares = self._measured(block, decoded, wide, tokens)
        if canonical:
            block[..., tokens:, :] = decoded[..., tokens:, :]
        sections = [_bytes(packed[0]), _bytes(packed[1]), _bytes([*scales, *zeros])]
        return self._codec.assembled([exact, *sections], start_position=start_position, largest=worst, squares=squares)

    def decode_into(self, payload: bytes | bytearray | memoryview, out: torch.Tensor, *, start_position: int | None = None) -> BlockHeader:
        """As BlockCodec.decode_into, for payloads of the rungs int8 to int4; UnsupportedFormat for others."""
        self._check(out)
        header, (exact, *sections) = self._codec.opened(payload, start_position=start_position)
        if header.rung not in BITS:
            raise UnsupportedFormat(f"on a device the rungs are {', '.join(BITS)}, not {header.rung}")
        tokens, lossy = header.exact_tokens, header.block_tokens - header.exact_tokens
        if tokens:
            raw = torch.from_numpy(exact.copy()).to(out.device).view(self._dtype)
            out[..., :tokens, :] = raw.reshape(*self._shape[:3], tokens, self._shape[4])
        if not lossy:
            return header
        keys, values, side = (torch.from_numpy(section.copy()).to(out.device) for section in sections)
        groups = ((-(-lossy // header.group), header.head_dim), (lossy, -(-header.head_dim // header.group)))
        sizes = [header.kv_heads * count[0] * count[1] for count in groups]
        scale_at, code_at = [0, header.layers * sizes[0]], [0, 0]
        zero_at = header.layers * sum(sizes)
        for kind, layers, bits in _runs(header.widths):
            count = layers.stop - layers.start
            shape = (count, header.kv_heads, *groups[kind])
            scale = side[scale_at[kind] :][: count * sizes[kind]].reshape(shape)
            scale_at[kind] += scale.numel()
            zero = torch.zeros(shape, dtype=torch.int8, device=out.device)
            if not form(values=kind == 1, bits=bits)[2]:
                zero = side[zero_at:][: count * sizes[kind]].view(torch.int8).reshape(shape)
                zero_at += zero.numel()
            size = plane_bytes(lossy * header.head_dim, bits)
            stored = (keys, values)[kind][code_at[kind] :][: count * header.kv_heads * size].reshape(count, header.kv_heads, size)
            code_at[kind] += stored.numel()
            if self._fused(out):
                from kvstore.codec import triton_kernels

                planes_of = triton_kernels.Planes(kind=kind, layers=layers, exact=tokens, group=header.group, bits=bits)
                triton_kernels.dequantize(scale, zero, stored, out, planes_of)
                continue
            codes = _unpacked(stored, bits, count=lossy * header.head_dim).reshape(count, header.kv_heads, lossy, header.head_dim)
            numbers = _dequantized(scale, zero, codes, values=kind == 1, group=header.group, bits=bits)
            out[layers, kind, :, tokens:] = numbers.to(self._dtype)
        return header

    def _fused(self, block: torch.Tensor) -> bool:
        """Whether Triton's kernels take this block. Rows whose elements are apart go through torch."""
        wanted = block.is_cuda and find_spec("triton") is not None if self._triton is None else self._triton
        return wanted and block.stride(-1) == 1

    def _measured(self, block: torch.Tensor, decoded: torch.Tensor, wide: torch.Tensor, tokens: int) -> tuple[float, float]:
        """(largest |error|, sum of squares): float32 over the tokens of a channel in their order, then float64 in the order of channels."""
        if self._fused(block):
            from kvstore.codec import triton_kernels

            worst, squares = triton_kernels.squared_errors(block, decoded, exact=tokens)
        else:
            error = wide - decoded[..., tokens:, :].float()
            worst, squares = error.abs(), torch.zeros_like(error[..., 0, :])
            for token in range(error.shape[-2]):
                squares = squares + error[..., token, :] * error[..., token, :]
        return float(worst.max()), float(np.add.accumulate(squares.reshape(-1).cpu().numpy().astype(np.float64))[-1])

    def _check(self, block: torch.Tensor) -> None:
        if tuple(block.shape) != self._shape:
            raise CodecFailure(f"a block of this layout has the shape {self._shape}, not {tuple(block.shape)}", reason="wrong_shape")
        if block.dtype != self._dtype:
            raise CodecFailure(f"a block of this layout has {self._dtype}, not {block.dtype}", reason="wrong_dtype")


def _runs(widths: Widths) -> Iterator[tuple[int, slice, int]]:
    """(keys or values, layers, bits) for stretches of layers with equal codes: all of the keys, then all of the values."""
    for kind in range(2):
        first = 0
        for layer in range(1, len(widths) + 1):
            if layer == len(widths) or widths[layer][kind] != widths[first][kind]:
                yield kind, slice(first, layer), widths[first][kind]
                first = layer


def _quantized(x: torch.Tensor, *, values: bool, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    levels, unit, symmetric, limit = form(values=values, bits=bits)
    axis = -1 if values else -2
    scales, zeros, codes = [], [], []
    for part in torch.split(x, group, axis):
        low, high = part.amin(axis, keepdim=True), part.amax(axis, keepdim=True)
        # By tensors: a division by a number may become a product with its inverse on a device.
        spans, limits = torch.full_like(low, levels - unit + 1), torch.full_like(low, limit)
        step = torch.maximum((high - low) / spans, torch.maximum(low.abs(), high.abs()) / limits)
        scale_code = (((step.view(torch.int32) + 0xFFFFF) >> 20) - SCALE_BASE).clamp(0, 255).to(torch.uint8)
        inverse = torch.ones_like(low) / _scale(scale_code)
        zero = torch.round((low * inverse - (unit - 1) * 0.5) * (1 / unit))
        if symmetric:
            zero = torch.full_like(low, -(1 << bits - 1))
        codes.append((torch.round(part * inverse) - zero * unit).clamp(0, levels).to(torch.uint8))
        scales.append(scale_code)
        zeros.append(zero.to(torch.int8) if not symmetric else torch.zeros_like(scale_code, dtype=torch.int8))
    return torch.cat(scales, axis), torch.cat(zeros, axis), torch.cat(codes, axis)


def _dequantized(scale: torch.Tensor, zero: torch.Tensor, codes: torch.Tensor, *, values: bool, group: int, bits: int) -> torch.Tensor:
    """float32, not yet rounded to the block's dtype."""
    _, unit, symmetric, _ = form(values=values, bits=bits)
    axis = -1 if values else -2
    count = codes.shape[axis]
    spread = _scale(scale).repeat_interleave(group, axis).narrow(axis, 0, count)
    if symmetric:
        return (codes.float() - float(1 << bits - 1)) * spread
    origin = (zero.float() * unit).repeat_interleave(group, axis).narrow(axis, 0, count)
    return (codes.float() + origin) * spread


def _scale(codes: torch.Tensor) -> torch.Tensor:
    return ((codes.to(torch.int32) + SCALE_BASE) << 20).view(torch.float32)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """reference.pack_plane of each plane, the last dimension."""
    if bits == 8:
        return codes
    parts = PARTS[bits]
    carriers = parts * bits // 8
    size = -(-codes.shape[-1] // parts)
    rows = torch.nn.functional.pad(codes, (0, parts * size - codes.shape[-1])).to(torch.int32).reshape(*codes.shape[:-1], parts, size)
    rest = torch.zeros_like(rows[..., 0, :])
    for index in range(carriers, parts):
        rest |= rows[..., index, :] << bits * (index - carriers)
    pieces = [rows[..., index, :] | (rest >> (8 - bits) * index & (1 << 8 - bits) - 1) << bits for index in range(carriers)]
    return torch.cat(pieces, -1).to(torch.uint8)


def _unpacked(packed: torch.Tensor, bits: int, *, count: int) -> torch.Tensor:
    if bits == 8:
        return packed
    parts = PARTS[bits]
    carriers = parts * bits // 8
    rows = packed.to(torch.int32).reshape(*packed.shape[:-1], carriers, -1)
    mask = (1 << bits) - 1
    rest = torch.zeros_like(rows[..., 0, :])
    for index in range(carriers):
        rest |= rows[..., index, :] >> bits << (8 - bits) * index
    codes = [rows[..., index, :] & mask for index in range(carriers)]
    codes += [rest >> bits * (index - carriers) & mask for index in range(carriers, parts)]
    return torch.cat(codes, -1)[..., :count].to(torch.uint8)


def _bytes(parts: list[torch.Tensor]) -> np.ndarray:
    joined: np.ndarray = torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()
    return joined
