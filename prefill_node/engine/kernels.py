"""The CPU kernels: linear layers and paged attention, and the small team of threads that shares their work.

One array of int64, `control`, holds the present operation; its work items are claimed by counting `NEXT` down, so a thread that comes
late or stops for a while holds up nothing but the item that it claimed. All functions release the GIL.

numba caches the compiled functions on disk by this file's time stamp: when vector_ir.py or atomics.py changes, touch this file too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from prefill_node.engine.atomics import atomic_add, atomic_load, atomic_store, atomic_swap_if, yield_core
from prefill_node.engine.vector_ir import (
    exp_and_sum,
    exp_one,
    gate,
    load_f32,
    load_f32_bits,
    make_mix,
    make_tile,
    prefetch,
    rotate,
    scale_and_max,
    scale_by,
    scores,
    store_f32,
    store_u16,
    sum_of_squares,
    widen,
)

PANEL = 32
"""Columns of a weight panel: a linear layer's weight [n, k] lies as [n / PANEL, k, PANEL], so the columns of one k are one run."""

NEXT, DONE, EXIT, OPERATION = 0, 1, 2, 3
ARGUMENTS = 8
CONTROL_LENGTH = 40
LINEAR, ATTEND, GATE = 0, 1, 2
GATE_ROWS = 16
MASKED = np.float32(-1e30)

_b1, _b2, _b3, _b4 = (make_tile(rows, 4 if rows < 3 else 2, bf16=True) for rows in (1, 2, 3, 4))
_b5, _b6 = (make_tile(rows, 2, bf16=True) for rows in (5, 6))
_f1, _f2, _f3, _f4 = (make_tile(rows, 4 if rows < 3 else 2, bf16=False) for rows in (1, 2, 3, 4))
_f5, _f6 = (make_tile(rows, 2, bf16=False) for rows in (5, 6))
_mix1, _mix2, _mix4, _mix8 = (make_mix(vectors) for vectors in (1, 2, 4, 8))


def _native(function: Any) -> Any:
    """numba's decorator, which has no types."""
    return njit(nogil=True, cache=True, error_model="numpy")(function)


@_native
def _panel_bf16(x: int, x_stride: int, w: int, k: int, out: int, out_stride: int, rows: int) -> None:
    row = 0
    while row < rows:
        xr, outr, left = x + row * x_stride * 4, out + row * out_stride * 4, rows - row
        if left == 1:
            _b1(xr, x_stride, w, PANEL, k, outr, out_stride)
            row += 1
            continue
        if left == 2:
            _b2(xr, x_stride, w, PANEL, k, outr, out_stride)
            row += 2
            continue
        for half in range(2):
            wh, outh = w + half * 32, outr + half * 64
            if left >= 6:
                _b6(xr, x_stride, wh, PANEL, k, outh, out_stride)
            elif left == 5:
                _b5(xr, x_stride, wh, PANEL, k, outh, out_stride)
            elif left == 4:
                _b4(xr, x_stride, wh, PANEL, k, outh, out_stride)
            else:
                _b3(xr, x_stride, wh, PANEL, k, outh, out_stride)
        row += min(6, left)


@_native
def _panel_f32(x: int, x_stride: int, w: int, k: int, out: int, out_stride: int, rows: int) -> None:
    row = 0
    while row < rows:
        xr, outr, left = x + row * x_stride * 4, out + row * out_stride * 4, rows - row
        if left == 1:
            _f1(xr, x_stride, w, PANEL, k, outr, out_stride)
            row += 1
            continue
        if left == 2:
            _f2(xr, x_stride, w, PANEL, k, outr, out_stride)
            row += 2
            continue
        for half in range(2):
            wh, outh = w + half * 64, outr + half * 64
            if left >= 6:
                _f6(xr, x_stride, wh, PANEL, k, outh, out_stride)
            elif left == 5:
                _f5(xr, x_stride, wh, PANEL, k, outh, out_stride)
            elif left == 4:
                _f4(xr, x_stride, wh, PANEL, k, outh, out_stride)
            else:
                _f3(xr, x_stride, wh, PANEL, k, outh, out_stride)
        row += min(6, left)


@_native
def _linear_item(a: Any, item: int) -> None:
    """Arguments: x, k, w, panels, out, out_stride, rows, is_bf16, rows of a row block, panels of an item."""
    x, k, w, panels, out, out_stride, rows, is_bf16, row_block, panel_group = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]
    groups = (panels + panel_group - 1) // panel_group
    first_row, first_panel = item // groups * row_block, item % groups * panel_group
    count = min(row_block, rows - first_row)
    x, out = x + first_row * k * 4, out + first_row * out_stride * 4
    for panel in range(first_panel, min(panels, first_panel + panel_group)):
        if is_bf16:
            _panel_bf16(x, k, w + panel * k * PANEL * 2, k, out + panel * PANEL * 4, out_stride, count)
        else:
            _panel_f32(x, k, w + panel * k * PANEL * 4, k, out + panel * PANEL * 4, out_stride, count)


@_native
def _mix(p: int, v: int, head_dim: int, tokens: int, out: int, keep: float) -> None:
    d = 0
    while d < head_dim:
        left = head_dim - d
        if left >= 64:
            _mix8(p, v + d * 4, head_dim, tokens, out + d * 4, keep)
            d += 64
        elif left >= 32:
            _mix4(p, v + d * 4, head_dim, tokens, out + d * 4, keep)
            d += 32
        elif left >= 16:
            _mix2(p, v + d * 4, head_dim, tokens, out + d * 4, keep)
            d += 16
        else:
            _mix1(p, v + d * 4, head_dim, tokens, out + d * 4, keep)
            d += 8


@_native
def _attend_item(a: Any, item: int) -> None:
    """One group of rows of one sequence with one KV head.

    Arguments: q, q row stride, q head stride (elements), pool, bytes of a block, byte offset of the layer, is_bf16, kv_heads,
    query heads of a KV head, block_tokens, head_dim, tables, table width, table_of, lengths, groups, out, bits of the scaling.
    """
    q, q_row, q_head, pool, block_bytes, layer_offset, is_bf16 = a[0], a[1], a[2], a[3], a[4], a[5], a[6]
    kv_heads, heads, block_tokens, head_dim = a[7], a[8], a[9], a[10]
    tables, width, table_of, lengths, groups, out, scaling_at = a[11], a[12], a[13], a[14], a[15], a[16], a[17]
    scaling = load_f32(scaling_at)
    group, kv_head = item // kv_heads, item % kv_heads
    first_row = load_f32_bits(groups + group * 8)
    rows = load_f32_bits(groups + group * 8 + 4)
    table = tables + load_f32_bits(table_of + first_row * 4) * width * 4
    size = 2 if is_bf16 else 4
    half_bytes = kv_heads * block_tokens * head_dim * size
    head_offset = layer_offset + kv_head * block_tokens * head_dim * size
    keys = np.empty(block_tokens * head_dim, np.float32)
    values = np.empty(block_tokens * head_dim, np.float32)
    weights = np.empty(block_tokens, np.float32)
    best = np.full(rows * heads, MASKED, np.float32)
    total = np.zeros(rows * heads, np.float32)
    k_at, v_at, w_at = keys.ctypes.data, values.ctypes.data, weights.ctypes.data
    for row in range(rows):
        at = out + ((first_row + row) * kv_heads + kv_head) * heads * head_dim * 4
        for i in range(heads * head_dim):
            store_f32(at + i * 4, np.float32(0.0))
    longest = load_f32_bits(lengths + (first_row + rows - 1) * 4)
    blocks = (longest + block_tokens - 1) // block_tokens
    for block in range(blocks):
        if block + 1 < blocks:
            # Blocks lie apart, which the hardware's prefetcher cannot foresee: without this a row waits for memory half its time.
            ahead = pool + load_f32_bits(table + (block + 1) * 4) * block_bytes + head_offset
            prefetch(ahead, block_tokens * head_dim * size)
            prefetch(ahead + half_bytes, block_tokens * head_dim * size)
        base = pool + load_f32_bits(table + block * 4) * block_bytes + head_offset
        if is_bf16:
            widen(base, k_at, block_tokens * head_dim)
            widen(base + half_bytes, v_at, block_tokens * head_dim)
        else:
            k_at, v_at = base, base + half_bytes
        for row in range(rows):
            visible = min(block_tokens, load_f32_bits(lengths + (first_row + row) * 4) - block * block_tokens)
            if visible <= 0:
                continue
            for head in range(heads):
                index = row * heads + head
                scores(q + ((first_row + row) * q_row + (kv_head * heads + head) * q_head) * 4, k_at, head_dim, block_tokens, w_at)
                for token in range(visible, block_tokens):
                    weights[token] = MASKED
                top = max(best[index], scale_and_max(w_at, block_tokens, scaling))
                keep = exp_one(best[index] - top)
                total[index] = total[index] * keep + exp_and_sum(w_at, block_tokens, top)
                best[index] = top
                at = out + (((first_row + row) * kv_heads + kv_head) * heads + head) * head_dim * 4
                _mix(w_at, v_at, head_dim, visible, at, keep)
    for row in range(rows):
        for head in range(heads):
            at = out + (((first_row + row) * kv_heads + kv_head) * heads + head) * head_dim * 4
            share = np.float32(1.0) / total[row * heads + head]
            for d in range(head_dim):
                store_f32(at + d * 4, load_f32(at + d * 4) * share)


@_native
def _gate_item(a: Any, item: int) -> None:
    """Arguments: gates and ups side by side [rows, 2 * width], rows, width, out [rows, width]."""
    both, rows, width, out = a[0], a[1], a[2], a[3]
    for row in range(item * GATE_ROWS, min(rows, (item + 1) * GATE_ROWS)):
        at = both + row * width * 8
        gate(at, at + width * 4, out + row * width * 4, width)


@_native
def normalize(x: int, weight: int, out: int, rows: int, width: int, epsilon: float) -> None:
    """Each row of x divided by its root mean square, times weight; float32, contiguous, width a multiple of 8."""
    for row in range(rows):
        at = x + row * width * 4
        mean = sum_of_squares(at, width) / np.float32(width)
        scale_by(at, weight, out + row * width * 4, width, np.float32(1.0) / np.sqrt(mean + np.float32(epsilon)))


@_native
def rotate_rows(x: int, row_stride: int, rows: int, heads: int, head_dim: int, cos: int, sin: int) -> None:
    """Rotary positions in place on `heads` neighbouring heads of each row; cos and sin float32 [rows, head_dim], halves alike."""
    for row in range(rows):
        for head in range(heads):
            rotate(x + (row * row_stride + head * head_dim) * 4, cos + row * head_dim * 4, sin + row * head_dim * 4, head_dim // 2)


@_native
def write_kv(
    k: int,
    v: int,
    row_stride: int,
    head_stride: int,
    v_row_stride: int,
    v_head_stride: int,
    pool: Any,
    layer: int,
    blocks: Any,
    offsets: Any,
) -> None:
    """Round each row's K and V (float32, by address and element strides) into its slot of `pool` ([blocks, layers, 2, kv_heads,
    block_tokens, head_dim], uint16 bits of bf16 or float32). Rows with block -1 are left out."""
    kv_heads, head_dim = pool.shape[3], pool.shape[5]
    is_bf16 = pool.itemsize == 2
    for row in range(len(blocks)):
        if blocks[row] < 0:
            continue
        for half in range(2):
            for head in range(kv_heads):
                source = (
                    (k + (row * row_stride + head * head_stride) * 4)
                    if half == 0
                    else (v + (row * v_row_stride + head * v_head_stride) * 4)
                )
                target = pool[blocks[row], layer, half, head, offsets[row]].ctypes.data
                for d in range(head_dim):
                    if is_bf16:
                        bits = load_f32_bits(source + d * 4)
                        store_u16(target + d * 2, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
                    else:
                        store_f32(target + d * 4, load_f32(source + d * 4))


@_native
def _work(control: Any) -> bool:
    """Claim and do one item. False: there was none."""
    at = control.ctypes.data
    while True:
        left = atomic_load(at + NEXT * 8)
        if left <= 0:
            return False
        if atomic_swap_if(at + NEXT * 8, left, left - 1):
            break
    # The operation cannot change while this item is unfinished.
    if control[OPERATION] == LINEAR:
        _linear_item(control[ARGUMENTS:], left - 1)
    elif control[OPERATION] == ATTEND:
        _attend_item(control[ARGUMENTS:], left - 1)
    else:
        _gate_item(control[ARGUMENTS:], left - 1)
    atomic_add(at + DONE * 8, 1)
    return True


@_native
def share(control: Any, items: int) -> None:
    """Do all items of the operation in `control`, with whoever helps; returns when all are done."""
    at = control.ctypes.data
    atomic_store(at + DONE * 8, 0)
    atomic_store(at + NEXT * 8, items)
    while _work(control):
        pass
    spins = 0
    while atomic_load(at + DONE * 8) < items:
        spins += 1
        if spins > 200:
            yield_core()


@_native
def help_out(control: Any) -> None:
    """Work beside `share` until EXIT is set."""
    at = control.ctypes.data
    spins = 0
    while atomic_load(at + EXIT * 8) == 0:
        if _work(control):
            spins = 0
        else:
            spins += 1
            if spins > 50:
                yield_core()
