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
    gate,
    largest,
    load_f32,
    load_f32_bits,
    make_mix,
    make_tile,
    make_turn,
    prefetch,
    rotate,
    scale_by,
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
_mix1, _mix2, _mix3, _mix4, _mix5, _mix6 = (make_mix(rows, 2) for rows in (1, 2, 3, 4, 5, 6))
_mix1_wide = make_mix(1, 8)
_turn_bf16, _turn_f32 = make_turn(bf16=True), make_turn(bf16=False)


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
def _mix(p: int, p_stride: int, v: int, head_dim: int, tokens: int, out: int, keep: int, rows: int) -> None:
    """out [rows, head_dim] = out * keep [rows] + p [rows, tokens] x v [tokens, head_dim]."""
    row = 0
    while row < rows:
        pr, outr, keepr, left = p + row * p_stride * 4, out + row * head_dim * 4, keep + row * 4, rows - row
        d = 0
        while d < head_dim:
            vd, outd = v + d * 4, outr + d * 4
            if left == 1 and head_dim - d >= 64:
                _mix1_wide(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
                d += 64
                continue
            if left >= 6:
                _mix6(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
            elif left == 5:
                _mix5(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
            elif left == 4:
                _mix4(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
            elif left == 3:
                _mix3(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
            elif left == 2:
                _mix2(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
            else:
                _mix1(pr, p_stride, vd, head_dim, tokens, outd, head_dim, keepr)
            d += 16
        row += min(6, left)


@_native
def _attend_block(
    q: int,
    keys: int,
    values: int,
    head_dim: int,
    block_tokens: int,
    visible: int,
    queries: int,
    weights: Any,
    keep: Any,
    best: Any,
    total: Any,
    mixed: int,
) -> None:
    """`queries` of them see the first `visible` tokens of a block: one step of the running softmax. `keys` are panels of the block's K,
    turned; `values` its V; `weights` and `keep` scratch; `best`, `total` and `mixed` (address) the state, at the first query."""
    width = (block_tokens + PANEL - 1) // PANEL * PANEL
    w_at = weights.ctypes.data
    for panel in range(width // PANEL):
        _panel_f32(q, head_dim, keys + panel * head_dim * PANEL * 4, head_dim, w_at + panel * PANEL * 4, width, queries)
    # Stage by stage over all queries, so that one query's latencies hide behind another's work.
    for i in range(queries):
        for token in range(visible, block_tokens):
            weights[i * width + token] = MASKED
        top = max(best[i], largest(w_at + i * width * 4, block_tokens))
        keep[i] = best[i] - top
        best[i] = top
    for i in range(queries, (queries + 7) // 8 * 8):
        keep[i] = 0.0
    exp_and_sum(keep.ctypes.data, (queries + 7) // 8 * 8, np.float32(0.0))
    for i in range(queries):
        total[i] = total[i] * keep[i] + exp_and_sum(w_at + i * width * 4, block_tokens, best[i])
    _mix(w_at, width, values, head_dim, visible, mixed, keep.ctypes.data, queries)


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
    panels = (block_tokens + PANEL - 1) // PANEL
    keys = np.zeros(panels * head_dim * PANEL, np.float32)
    values = np.empty(block_tokens * head_dim, np.float32)
    weights = np.empty(rows * heads * panels * PANEL, np.float32)
    keep = np.empty((rows * heads + 7) // 8 * 8, np.float32)
    best = np.full(rows * heads, MASKED, np.float32)
    total = np.zeros(rows * heads, np.float32)
    mixed = np.zeros(rows * heads * head_dim, np.float32)
    scaled = np.empty(rows * heads * head_dim, np.float32)
    for i in range(rows * heads):
        at = q + ((first_row + i // heads) * q_row + (kv_head * heads + i % heads) * q_head) * 4
        for d in range(head_dim):
            scaled[i * head_dim + d] = load_f32(at + d * 4) * scaling
    longest = load_f32_bits(lengths + (first_row + rows - 1) * 4)
    blocks = (longest + block_tokens - 1) // block_tokens
    for block in range(blocks):
        # Asked in each round: numba frees an array after its last use, and an address is none.
        keys_at, v_at = keys.ctypes.data, values.ctypes.data
        if block + 1 < blocks:
            # Blocks lie apart, which the hardware's prefetcher cannot foresee: without this a row waits for memory half its time.
            ahead = pool + load_f32_bits(table + (block + 1) * 4) * block_bytes + head_offset
            prefetch(ahead, block_tokens * head_dim * size)
            prefetch(ahead + half_bytes, block_tokens * head_dim * size)
        base = pool + load_f32_bits(table + block * 4) * block_bytes + head_offset
        for panel in range(panels):
            tokens = min(PANEL, block_tokens - panel * PANEL)
            source, target = base + panel * PANEL * head_dim * size, keys_at + panel * head_dim * PANEL * 4
            if is_bf16:
                _turn_bf16(source, tokens, head_dim, target, PANEL)
            else:
                _turn_f32(source, tokens, head_dim, target, PANEL)
        if is_bf16:
            widen(base + half_bytes, v_at, block_tokens * head_dim)
        else:
            v_at = base + half_bytes
        row = 0
        while row < rows:
            visible = min(block_tokens, load_f32_bits(lengths + (first_row + row) * 4) - block * block_tokens)
            end = row + 1
            while end < rows and min(block_tokens, load_f32_bits(lengths + (first_row + end) * 4) - block * block_tokens) == visible:
                end += 1
            if visible > 0:
                at = row * heads
                _attend_block(
                    scaled[at * head_dim :].ctypes.data,
                    keys_at,
                    v_at,
                    head_dim,
                    block_tokens,
                    visible,
                    (end - row) * heads,
                    weights,
                    keep,
                    best[at:],
                    total[at:],
                    mixed[at * head_dim :].ctypes.data,
                )
            row = end
    for i in range(rows * heads):
        at = out + (((first_row + i // heads) * kv_heads + kv_head) * heads + i % heads) * head_dim * 4
        share = np.float32(1.0) / total[i]
        for d in range(head_dim):
            store_f32(at + d * 4, mixed[i * head_dim + d] * share)


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
