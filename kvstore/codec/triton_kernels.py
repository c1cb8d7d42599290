"""The rungs int8 to int4 on CUDA devices, as Triton kernels that read and write the engine's blocks where they lie. Equal bit for bit to
reference.py: float32 operations of IEEE 754 in its order, divisions rounded, nothing contracted.

One program works on one plane: the lossy tokens of one head's keys, or values, in one layer. A block is [layers, 2, heads, tokens,
head_dim] with any strides but for the last dimension, whose elements lie side by side. bfloat16 goes by its bit patterns.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvstore.codec.block_format import plane_bytes
from kvstore.codec.kernels import SCALE_BASE
from kvstore.codec.reference import PARTS, form

_SCALE_BASE = tl.constexpr(SCALE_BASE)
_ROUND = tl.constexpr(12582912.0)
_PACK_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """Which of a block's planes one launch works on, and how."""

    kind: int
    """0: keys, 1: values."""
    layers: slice
    exact: int
    """First tokens that are left out."""
    group: int
    bits: int


def quantize(block: torch.Tensor, planes: Planes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale codes uint8 [layers, heads, groups], zeros int8 of the same shape, packed codes uint8 [layers, heads, bytes])."""
    kind, group, bits = planes.kind, planes.group, planes.bits
    block, plain = _plain(block)
    own = block[planes.layers, kind, :, planes.exact :]
    count, heads, tokens, width = own.shape
    levels, unit, symmetric, limit = form(values=kind == 1, bits=bits)
    groups = (-(-tokens // group), width) if kind == 0 else (tokens, -(-width // group))
    scales = torch.empty(count, heads, *groups, dtype=torch.uint8, device=block.device)
    zeros = torch.empty(scales.shape, dtype=torch.int8, device=block.device)
    codes = torch.empty(count, heads, tokens * width, dtype=torch.uint8, device=block.device)
    _quantize[(count * heads,)](
        own, *own.stride()[:3], scales, zeros, codes, heads, tokens, width, -(-own.shape[2 + kind] // group), group, levels, unit, limit,
        BITS=bits, VALUES=kind == 1, SYMMETRIC=symmetric, PATTERNS=plain,
        ROWS=triton.next_power_of_2(tokens), COLUMNS=triton.next_power_of_2(width), enable_fp_fusion=False,
    )  # fmt: skip
    if bits == 8:
        return scales, zeros, codes
    packed = torch.empty(count, heads, plane_bytes(tokens * width, bits), dtype=torch.uint8, device=block.device)
    parts = PARTS[bits]
    size = -(-tokens * width // parts)
    _pack[(count * heads, triton.cdiv(size, _PACK_AT_ONCE))](
        codes, packed, tokens * width, size, BITS=bits, PARTS=parts, AT_ONCE=_PACK_AT_ONCE
    )
    return scales, zeros, packed


def dequantize(scales: torch.Tensor, zeros: torch.Tensor, packed: torch.Tensor, out: torch.Tensor, planes: Planes) -> None:
    """Writes the elements that `quantize`'s result stands for into a block."""
    kind, group, bits = planes.kind, planes.group, planes.bits
    out, plain = _plain(out)
    own = out[planes.layers, kind, :, planes.exact :]
    count, heads, tokens, width = own.shape
    _, unit, symmetric, _ = form(values=kind == 1, bits=bits)
    parts = PARTS.get(bits, 1)
    _dequantize[(count * heads,)](
        scales, zeros, packed, own, *own.stride()[:3], heads, tokens, width, packed.shape[-1], -(-tokens * width // parts), group,
        scales.shape[-1], unit, BITS=bits, PARTS=parts, VALUES=kind == 1, SYMMETRIC=symmetric, PATTERNS=plain,
        ROWS=triton.next_power_of_2(tokens), COLUMNS=triton.next_power_of_2(width), enable_fp_fusion=False,
    )  # fmt: skip


def squared_errors(block: torch.Tensor, decoded: torch.Tensor, *, exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest |error| of each plane, sums of squares of each plane's channels in the order of its tokens), float32."""
    block, plain = _plain(block)
    decoded, _ = _plain(decoded)
    own, other = block[..., exact:, :], decoded[..., exact:, :]
    layers, kinds, heads, tokens, width = own.shape
    worst = torch.empty(layers, kinds, heads, device=block.device)
    squares = torch.empty(layers, kinds, heads, width, device=block.device)
    _measure[(layers * kinds * heads,)](
        own, *own.stride()[:4], other, *other.stride()[:4], worst, squares, kinds, heads, tokens, width,
        PATTERNS=plain, COLUMNS=triton.next_power_of_2(width), enable_fp_fusion=False,
    )  # fmt: skip
    return worst, squares


def _plain(block: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The block as the kernels take it, and whether that is bit patterns of bfloat16."""
    return (block.view(torch.int16), True) if block.dtype == torch.bfloat16 else (block, False)


@triton.jit
def _widened(loaded, PATTERNS: tl.constexpr):
    if PATTERNS:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return loaded.to(tl.float32)


@triton.jit
def _narrowed(values, PATTERNS: tl.constexpr, TYPE: tl.constexpr):
    if PATTERNS:
        bits = values.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    return values.to(TYPE)


@triton.jit
def _scale(codes):
    return ((codes.to(tl.int32) + _SCALE_BASE) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def _quantize(
    block, layer_stride, head_stride, token_stride, scales, zeros, codes, heads, tokens, width, groups, group, levels, unit, limit,
    BITS: tl.constexpr, VALUES: tl.constexpr, SYMMETRIC: tl.constexpr, PATTERNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (rows < tokens) & (columns < width)
    at = (plane // heads) * layer_stride + (plane % heads) * head_stride
    x = _widened(tl.load(block + at + rows * token_stride + columns, mask=inside, other=0), PATTERNS)
    for index in range(groups):
        own = inside & ((columns if VALUES else rows) // group == index)
        axis: tl.constexpr = 1 if VALUES else 0
        low = tl.min(tl.where(own, x, float("inf")), axis, keep_dims=True)
        high = tl.max(tl.where(own, x, float("-inf")), axis, keep_dims=True)
        there = rows < tokens if VALUES else columns < width
        low, high = tl.where(there, low, 0.0), tl.where(there, high, 0.0)
        spans = low * 0.0 + (levels - unit + 1).to(tl.float32)
        limits = low * 0.0 + limit.to(tl.float32)
        step = tl.maximum(tl.div_rn(high - low, spans), tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)), limits))
        number = ((step.to(tl.int32, bitcast=True) + 0xFFFFF) >> 20) - _SCALE_BASE
        number = tl.minimum(tl.maximum(number, 0), 255)
        inverse = tl.div_rn(low * 0.0 + 1.0, _scale(number))
        units = unit.to(tl.float32)
        if SYMMETRIC:
            zero = low * 0.0 - (1 << BITS - 1)
        else:
            zero = _rounded((low * inverse - (units - 1.0) * 0.5) * tl.div_rn(low * 0.0 + 1.0, low * 0.0 + units))
        code = tl.minimum(tl.maximum(_rounded(x * inverse) - zero * units, 0.0), levels.to(tl.float32))
        tl.store(codes + plane * tokens * width + rows * width + columns, code.to(tl.uint8), mask=own)
        place = plane * tokens * groups + rows * groups + index if VALUES else (plane * groups + index) * width + columns
        tl.store(scales + place, number.to(tl.uint8), mask=there)
        tl.store(zeros + place, (zero * 0.0 if SYMMETRIC else zero).to(tl.int8), mask=there)


@triton.jit
def _pack(codes, packed, count, size, BITS: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    plane = tl.program_id(0)
    CARRIERS: tl.constexpr = PARTS * BITS // 8
    j = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    rest = j * 0
    for part in tl.static_range(CARRIERS, PARTS):
        at = part * size + j
        code = tl.load(codes + plane * count + at, mask=(j < size) & (at < count), other=0)
        rest |= code.to(tl.int32) << BITS * (part - CARRIERS)
    for part in tl.static_range(CARRIERS):
        at = part * size + j
        code = tl.load(codes + plane * count + at, mask=(j < size) & (at < count), other=0)
        piece = (rest >> (8 - BITS) * part) & ((1 << 8 - BITS) - 1)
        tl.store(packed + plane * size * CARRIERS + at, (code.to(tl.int32) | (piece << BITS)).to(tl.uint8), mask=j < size)


@triton.jit
def _dequantize(
    scales, zeros, packed, out, layer_stride, head_stride, token_stride, heads, tokens, width, plane_size, size, group, groups, unit,
    BITS: tl.constexpr, PARTS: tl.constexpr, VALUES: tl.constexpr, SYMMETRIC: tl.constexpr, PATTERNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (rows < tokens) & (columns < width)
    flat = rows * width + columns
    base = packed + plane * plane_size
    if BITS == 8:
        codes = tl.load(base + flat, mask=inside, other=0).to(tl.int32)
    else:
        CARRIERS: tl.constexpr = PARTS * BITS // 8
        part, j = flat // size, flat % size
        carried = part < CARRIERS
        rest = flat * 0
        for carrier in tl.static_range(CARRIERS):
            byte = tl.load(base + carrier * size + j, mask=inside & (part >= CARRIERS), other=0).to(tl.int32)
            rest |= (byte >> BITS) << (8 - BITS) * carrier
        plain = tl.load(base + flat, mask=inside & carried, other=0).to(tl.int32)
        codes = tl.where(carried, plain, rest >> tl.where(carried, 0, BITS * (part - CARRIERS))) & ((1 << BITS) - 1)
    if VALUES:
        place = plane * tokens * groups + rows * groups + columns // group
    else:
        place = (plane * ((tokens + group - 1) // group) + rows // group) * width + columns
    scale = _scale(tl.load(scales + place, mask=inside, other=0))
    if SYMMETRIC:
        origin = scale * 0.0 - (1 << BITS - 1)
    else:
        origin = (tl.load(zeros + place, mask=inside, other=0).to(tl.int32) * unit).to(tl.float32)
    numbers = _narrowed((codes.to(tl.float32) + origin) * scale, PATTERNS, out.dtype.element_ty)
    at = (plane // heads) * layer_stride + (plane % heads) * head_stride
    tl.store(out + at + rows * token_stride + columns, numbers, mask=inside)


@triton.jit
def _measure(
    block, layer_stride, kind_stride, head_stride, token_stride,
    decoded, other_layer_stride, other_kind_stride, other_head_stride, other_token_stride,
    worst, squares, kinds, heads, tokens, width, PATTERNS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    layer, kind, head = plane // (kinds * heads), plane // heads % kinds, plane % heads
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    first = block + layer * layer_stride + kind * kind_stride + head * head_stride + columns
    second = decoded + layer * other_layer_stride + kind * other_kind_stride + head * other_head_stride + columns
    total = tl.zeros((COLUMNS,), tl.float32)
    largest = tl.zeros((COLUMNS,), tl.float32)
    for token in range(tokens):
        x = _widened(tl.load(first + token * token_stride, mask=inside, other=0), PATTERNS)
        error = x - _widened(tl.load(second + token * other_token_stride, mask=inside, other=0), PATTERNS)
        total += error * error
        largest = tl.maximum(largest, tl.abs(error))
    tl.store(squares + plane * width + columns, total, mask=inside)
    tl.store(worst + plane, tl.max(largest, 0))
