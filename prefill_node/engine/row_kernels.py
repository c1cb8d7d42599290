"""The kernels that work row by row: norms, what stands between the projections and attention, the MLP's gate.

numba caches them by this file's time stamp: when an _ir.py under it changes, touch this one too.
"""

from __future__ import annotations

import numpy as np

from prefill_node.engine.record import ARGUMENT, ROWS, ROWS_OF_ITEM
from prefill_node.engine.row_ir import add_to, copy, gate, narrow, rotate, scale_by, sum_of_squares
from prefill_node.engine.scalar_ir import field, load_f32, load_i32


def norm_item(op: int, item: int) -> None:
    """out [rows, width] = x divided by its root mean square, times weight; before that x += delta, in place.

    Fields: x, delta (0: none), its stride, weight, out, width, epsilon, chosen (0: all rows; else int32 [rows]: which rows of x).
    """
    x, delta, delta_stride = field(op, ARGUMENT), field(op, ARGUMENT + 1), field(op, ARGUMENT + 2)
    weight, out, width, chosen = field(op, ARGUMENT + 3), field(op, ARGUMENT + 4), field(op, ARGUMENT + 5), field(op, ARGUMENT + 7)
    epsilon = load_f32(op + (ARGUMENT + 6) * 8)
    for row in range(item * ROWS_OF_ITEM, min(field(op, ROWS), (item + 1) * ROWS_OF_ITEM)):
        source = load_i32(chosen + row * 4) if chosen else row
        at = x + source * width * 4
        if delta:
            add_to(at, delta + source * delta_stride * 4, width)
        mean = sum_of_squares(at, width) / np.float32(width)
        scale_by(at, weight, out + row * width * 4, width, np.float32(1.0) / np.sqrt(mean + epsilon))


def heads_item(op: int, item: int) -> None:
    """Queries, keys and values side by side in a row: norm the heads of queries and keys if the model does, turn both by their
    position, and round keys and values into their slot of the pool. In place.

    Fields: rows of heads, their stride, query heads, KV heads, head_dim, weight of the queries' norm (0: none), of the keys', epsilon,
    pool at this layer, bytes of a block, block_tokens, is_bf16; of the pass: cosines [rows, head_dim], sines, int32 [rows] blocks
    (-1: write nothing), int32 [rows] token slots.
    """
    x, stride, query_heads, kv_heads = field(op, ARGUMENT), field(op, ARGUMENT + 1), field(op, ARGUMENT + 2), field(op, ARGUMENT + 3)
    head_dim, q_norm, k_norm = field(op, ARGUMENT + 4), field(op, ARGUMENT + 5), field(op, ARGUMENT + 6)
    pool, block_bytes, block_tokens, is_bf16 = (
        field(op, ARGUMENT + 8),
        field(op, ARGUMENT + 9),
        field(op, ARGUMENT + 10),
        field(op, ARGUMENT + 11),
    )
    cos, sin, blocks, slots = field(op, ARGUMENT + 12), field(op, ARGUMENT + 13), field(op, ARGUMENT + 14), field(op, ARGUMENT + 15)
    epsilon, size = load_f32(op + (ARGUMENT + 7) * 8), 2 if is_bf16 else 4
    for row in range(item * ROWS_OF_ITEM, min(field(op, ROWS), (item + 1) * ROWS_OF_ITEM)):
        first = x + row * stride * 4
        for head in range(query_heads + kv_heads):
            at = first + head * head_dim * 4
            if q_norm:
                mean = sum_of_squares(at, head_dim) / np.float32(head_dim)
                weight = q_norm if head < query_heads else k_norm
                scale_by(at, weight, at, head_dim, np.float32(1.0) / np.sqrt(mean + epsilon))
            rotate(at, cos + row * head_dim * 4, sin + row * head_dim * 4, head_dim // 2)
        block = load_i32(blocks + row * 4)
        if block < 0:
            continue
        slot = pool + block * block_bytes + load_i32(slots + row * 4) * head_dim * size
        for head in range(2 * kv_heads):
            source, target = first + (query_heads + head) * head_dim * 4, slot + head * block_tokens * head_dim * size
            if is_bf16:
                narrow(source, target, head_dim)
            else:
                copy(source, target, head_dim)


def gate_item(op: int, item: int) -> None:
    """Fields: gates and ups side by side in a row, its stride, width of each, out [rows, width]."""
    both, stride, width, out = field(op, ARGUMENT), field(op, ARGUMENT + 1), field(op, ARGUMENT + 2), field(op, ARGUMENT + 3)
    for row in range(item * ROWS_OF_ITEM, min(field(op, ROWS), (item + 1) * ROWS_OF_ITEM)):
        at = both + row * stride * 4
        gate(at, at + width * 4, out + row * width * 4, width)
