"""The kernel of paged attention. numba caches it by this file's time stamp: when an _ir.py under it changes, touch this one too."""

from __future__ import annotations

import numpy as np

from prefill_node.engine.product_ir import PANEL, make_panel, make_turn, mix
from prefill_node.engine.record import ARGUMENT
from prefill_node.engine.row_ir import exp_and_sum, largest, widen
from prefill_node.engine.scalar_ir import field, load_f32, load_i32, prefetch, store_f32

MASKED = np.float32(-1e30)

_panel_f32 = make_panel(bf16=False)
_turn_bf16, _turn_f32 = make_turn(bf16=True), make_turn(bf16=False)


def attend_item(op: int, item: int) -> None:
    """One group of rows of one sequence with one KV head, block by block: a running softmax with float32 sums, whose order depends
    on a row's length alone.

    Fields: rows of query heads, their stride, query heads of a KV head, KV heads, head_dim, pool at this layer, bytes of a block,
    block_tokens, is_bf16, scaling, out [rows, query heads, head_dim]; of the pass, all int32: tables [sequences, width], width, table
    of each row, length of each row, groups [G, 2] of (first row, rows).
    """
    q, q_stride, heads, kv_heads = field(op, ARGUMENT), field(op, ARGUMENT + 1), field(op, ARGUMENT + 2), field(op, ARGUMENT + 3)
    head_dim, pool, block_bytes = field(op, ARGUMENT + 4), field(op, ARGUMENT + 5), field(op, ARGUMENT + 6)
    block_tokens, is_bf16, out = field(op, ARGUMENT + 7), field(op, ARGUMENT + 8), field(op, ARGUMENT + 10)
    scaling = load_f32(op + (ARGUMENT + 9) * 8)
    tables, width, table_of = field(op, ARGUMENT + 11), field(op, ARGUMENT + 12), field(op, ARGUMENT + 13)
    lengths, groups = field(op, ARGUMENT + 14), field(op, ARGUMENT + 15)
    group, kv_head = item // kv_heads, item % kv_heads
    first_row = load_i32(groups + group * 8)
    rows = load_i32(groups + group * 8 + 4)
    table = tables + load_i32(table_of + first_row * 4) * width * 4
    size = 2 if is_bf16 else 4
    head_bytes = block_tokens * head_dim * size
    half_bytes = kv_heads * head_bytes
    panels = (block_tokens + PANEL - 1) // PANEL
    padded = panels * PANEL
    state = (rows * heads + 7) // 8 * 8
    # One allocation, in parts; an address is no reference, so `memory` is used once more at the end.
    memory = np.zeros(padded * head_dim + block_tokens * head_dim + state * (padded + 3 + 2 * head_dim), np.float32)
    keys = memory.ctypes.data
    widened = keys + padded * head_dim * 4
    weights = widened + block_tokens * head_dim * 4
    keep = weights + state * padded * 4
    best = keep + state * 4
    total = best + state * 4
    mixed = total + state * 4
    scaled = mixed + state * head_dim * 4
    for i in range(rows * heads):
        store_f32(best + i * 4, MASKED)
        at = q + ((first_row + i // heads) * q_stride + (kv_head * heads + i % heads) * head_dim) * 4
        for d in range(head_dim):
            store_f32(scaled + (i * head_dim + d) * 4, load_f32(at + d * 4) * scaling)
    longest = load_i32(lengths + (first_row + rows - 1) * 4)
    blocks = (longest + block_tokens - 1) // block_tokens
    for block in range(blocks):
        base = pool + load_i32(table + block * 4) * block_bytes + kv_head * head_bytes
        if block + 1 < blocks:
            # Blocks lie apart, which the hardware's prefetcher cannot foresee: without this a row waits for memory half its time.
            ahead = pool + load_i32(table + (block + 1) * 4) * block_bytes + kv_head * head_bytes
            prefetch(ahead, head_bytes)
            prefetch(ahead + half_bytes, head_bytes)
        values = base + half_bytes
        for panel in range(panels):
            tokens = min(PANEL, block_tokens - panel * PANEL)
            source, target = base + panel * PANEL * head_dim * size, keys + panel * head_dim * PANEL * 4
            if is_bf16:
                _turn_bf16(source, tokens, head_dim, target, PANEL)
            else:
                _turn_f32(source, tokens, head_dim, target, PANEL)
        if is_bf16:
            widen(values, widened, block_tokens * head_dim)
            values = widened
        row = 0
        while row < rows:
            # Neighbouring rows that see equally much of the block: all but those that lie in it themselves.
            visible = min(block_tokens, load_i32(lengths + (first_row + row) * 4) - block * block_tokens)
            end = row + 1
            while end < rows and min(block_tokens, load_i32(lengths + (first_row + end) * 4) - block * block_tokens) == visible:
                end += 1
            first, queries = row * heads, (end - row) * heads
            row = end
            if visible <= 0:
                continue
            q_at = scaled + first * head_dim * 4
            for panel in range(panels):
                key_panel = keys + panel * head_dim * PANEL * 4
                _panel_f32(q_at, head_dim, key_panel, head_dim, weights + panel * PANEL * 4, padded, queries)
            # Stage by stage over all queries, so that one query's latencies hide behind another's work.
            for i in range(queries):
                at, best_at = weights + i * padded * 4, best + (first + i) * 4
                for token in range(visible, block_tokens):
                    store_f32(at + token * 4, MASKED)
                before = load_f32(best_at)
                top = max(before, largest(at, block_tokens))
                store_f32(keep + i * 4, before - top)
                store_f32(best_at, top)
            rounded = (queries + 7) // 8 * 8
            for i in range(queries, rounded):
                store_f32(keep + i * 4, np.float32(0.0))
            exp_and_sum(keep, rounded, np.float32(0.0))
            for i in range(queries):
                part = exp_and_sum(weights + i * padded * 4, block_tokens, load_f32(best + (first + i) * 4))
                at = total + (first + i) * 4
                store_f32(at, load_f32(at) * load_f32(keep + i * 4) + part)
            mix(weights, padded, values, head_dim, visible, mixed + first * head_dim * 4, keep, queries)
    for i in range(rows * heads):
        at = out + (((first_row + i // heads) * kv_heads + kv_head) * heads + i % heads) * head_dim * 4
        share = np.float32(1.0) / load_f32(total + i * 4)
        for d in range(head_dim):
            store_f32(at + d * 4, load_f32(mixed + (i * head_dim + d) * 4) * share)
    memory[0] = 0.0
