"""Products of matrices as LLVM IR inside numba functions: the panels of linear layers, and what attention makes of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from prefill_node.engine.vector_ir import (
    I32,
    LANES,
    bytes_of,
    call_llvm,
    constant,
    counted,
    i64,
    in_ir,
    load_bf16,
    load_vector,
    spread_at,
    store_vector,
)

PANEL = 32
"""Columns of a weight panel: a linear layer's weight [n, k] lies as [n / PANEL, k, PANEL], so the columns of one k are one run."""
TILE_ROWS = 6


def _tile(builder: Any, rows: int, vectors: int, load: Any, size: int, x: Any, x_step: Any, w: Any, w_step: Any, k: Any) -> list[Any]:
    """The sums over k of x[r, k] * w[k, c], in the order of k, for `rows` rows and LANES * `vectors` columns; steps in bytes."""
    x_rows = [builder.add(x, builder.mul(x_step, i64(row))) for row in range(rows)]

    def body(i: Any, sums: list[Any]) -> list[Any]:
        w_at = builder.add(w, builder.mul(i, w_step))
        columns = [load(builder, builder.add(w_at, i64(v * LANES * size))) for v in range(vectors)]
        offset = bytes_of(builder, i, 4)
        result = []
        for row in range(rows):
            spread = spread_at(builder, builder.add(x_rows[row], offset))
            result += [call_llvm(builder, "llvm.fma", spread, columns[v], sums[row * vectors + v]) for v in range(vectors)]
        return result

    return counted(builder, k, [constant(0.0)] * (rows * vectors), body)


def make_panel(*, bf16: bool) -> Any:
    """panel(x, x_stride, w, k, out, out_stride, rows): out[r, c] = sum over k of x[r, k] * w[k, c], in the order of k, for the PANEL
    columns of `w` [k, PANEL], bf16 or float32; x, out float32; strides in elements between rows.

    Rows are taken six at a time (12 of 16 vector registers hold sums), what is left over in one tile of its own.
    """
    size = 2 if bf16 else 4
    load = load_bf16 if bf16 else load_vector

    @in_ir
    def panel(typingctx: Any, x: Any, x_stride: Any, w: Any, k: Any, out: Any, out_stride: Any, rows: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_, x_stride_, w_, k_, out_, out_stride_, rows_ = arguments
            x_step, out_step = bytes_of(builder, x_stride_, 4), bytes_of(builder, out_stride_, 4)

            def tile_of(count: int) -> Callable[[Any, Any], None]:
                vectors = PANEL // LANES if count < 3 else PANEL // LANES // 2

                def emit(builder: Any, first: Any) -> None:
                    x_at, out_at = builder.add(x_, builder.mul(first, x_step)), builder.add(out_, builder.mul(first, out_step))

                    def part(index: Any, state: list[Any]) -> list[Any]:
                        column = builder.mul(index, i64(vectors * LANES))
                        w_at = builder.add(w_, bytes_of(builder, column, size))
                        sums = _tile(builder, count, vectors, load, size, x_at, x_step, w_at, i64(PANEL * size), k_)
                        for row in range(count):
                            to = builder.add(builder.add(out_at, builder.mul(out_step, i64(row))), bytes_of(builder, column, 4))
                            for v in range(vectors):
                                store_vector(builder, sums[row * vectors + v], builder.add(to, i64(v * LANES * 4)))
                        return state

                    counted(builder, i64(PANEL // LANES // vectors), [], part)

                return emit

            _by_sixes(builder, rows_, tile_of)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return panel


def _by_sixes(builder: Any, rows: Any, tile_of: Callable[[int], Callable[[Any, Any], None]]) -> None:
    """`tile_of(6)(builder, first row)` for each whole six of the rows, then `tile_of(left)` for what is left."""

    def six(index: Any, state: list[Any]) -> list[Any]:
        tile_of(TILE_ROWS)(builder, builder.mul(index, i64(TILE_ROWS)))
        return state

    sixes = builder.udiv(rows, i64(TILE_ROWS))
    counted(builder, sixes, [], six)
    first = builder.mul(sixes, i64(TILE_ROWS))
    after = builder.append_basic_block("after_rows")
    choice = builder.switch(builder.sub(rows, first), after)
    for count in range(1, TILE_ROWS):
        block = builder.append_basic_block(f"rows_{count}")
        choice.add_case(i64(count), block)
        builder.position_at_end(block)
        tile_of(count)(builder, first)
        builder.branch(after)
    builder.position_at_end(after)


def make_turn(*, bf16: bool) -> Any:
    """turn(source, rows, columns, target, target_stride): target[c, r] = source[r, c] as float32, source bf16 or float32 and contiguous;
    rows and columns are multiples of 8, target_stride in elements."""
    size = 2 if bf16 else 4
    load = load_bf16 if bf16 else load_vector

    @in_ir
    def turn(typingctx: Any, source: Any, rows: Any, columns: Any, target: Any, target_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source_, rows_, columns_, target_, stride_ = arguments
            row_step, target_step = bytes_of(builder, columns_, size), bytes_of(builder, stride_, 4)

            def eight_rows(row_group: Any, state: list[Any]) -> list[Any]:
                from_row = builder.add(source_, builder.mul(builder.mul(row_group, i64(LANES)), row_step))
                to_row = builder.add(target_, builder.mul(row_group, i64(LANES * 4)))

                def square(column_group: Any, inner: list[Any]) -> list[Any]:
                    at = builder.add(from_row, builder.mul(column_group, i64(LANES * size)))
                    lines = [load(builder, builder.add(at, builder.mul(row_step, i64(r)))) for r in range(LANES)]
                    to = builder.add(to_row, builder.mul(builder.mul(column_group, i64(LANES)), target_step))
                    for c, line in enumerate(_turned(builder, lines)):
                        store_vector(builder, line, builder.add(to, builder.mul(target_step, i64(c))))
                    return inner

                counted(builder, builder.udiv(columns_, i64(LANES)), [], square)
                return state

            counted(builder, builder.udiv(rows_, i64(LANES)), [], eight_rows)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return turn


def _turned(builder: Any, lines: list[Any]) -> list[Any]:
    """Eight vectors of eight, rows and columns exchanged: by neighbours, by pairs, by halves."""

    def pick(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, LANES), lanes))

    halves = []
    for first in (0, 4):
        a, b, c, d = lines[first : first + 4]
        low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
        ab, cd = (pick(a, b, low), pick(a, b, high)), (pick(c, d, low), pick(c, d, high))
        pairs = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
        halves.append([pick(ab[which], cd[which], lanes) for which in (0, 1) for lanes in pairs])
    sides = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    return [pick(halves[0][i], halves[1][i], lanes) for lanes in sides for i in range(4)]


@in_ir
def mix(typingctx: Any, p: Any, p_stride: Any, v: Any, head_dim: Any, tokens: Any, out: Any, keep: Any, rows: Any) -> Any:
    """mix(p, p_stride, v, head_dim, tokens, out, keep, rows): out[r, d] = out[r, d] * keep[r] + sum over t of p[r, t] * v[t, d], in the
    order of t; all float32, v and out contiguous, head_dim a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        p_, p_stride_, v_, head_dim_, tokens_, out_, keep_, rows_ = arguments
        p_step, step = bytes_of(builder, p_stride_, 4), bytes_of(builder, head_dim_, 4)

        def columns(rows: int, vectors: int, first: Any, column: Any) -> None:
            p_at, keep_at = builder.add(p_, builder.mul(first, p_step)), builder.add(keep_, bytes_of(builder, first, 4))
            offset = bytes_of(builder, column, 4)
            to = builder.add(builder.add(out_, builder.mul(first, step)), offset)
            places = [
                builder.add(builder.add(to, builder.mul(step, i64(row))), i64(v * LANES * 4)) for row in range(rows) for v in range(vectors)
            ]

            def body(t: Any, sums: list[Any]) -> list[Any]:
                v_row = builder.add(builder.add(v_, builder.mul(t, step)), offset)
                values = [load_vector(builder, builder.add(v_row, i64(i * LANES * 4))) for i in range(vectors)]
                result = []
                for row in range(rows):
                    weight = spread_at(builder, builder.add(builder.add(p_at, builder.mul(p_step, i64(row))), bytes_of(builder, t, 4)))
                    result += [call_llvm(builder, "llvm.fma", weight, values[i], sums[row * vectors + i]) for i in range(vectors)]
                return result

            kept = [spread_at(builder, builder.add(keep_at, i64(row * 4))) for row in range(rows)]
            start = [builder.fmul(load_vector(builder, place), kept[index // vectors]) for index, place in enumerate(places)]
            for value, place in zip(counted(builder, tokens_, start, body), places, strict=True):
                store_vector(builder, value, place)

        def tile_of(count: int) -> Callable[[Any, Any], None]:
            def emit(builder: Any, first: Any) -> None:
                def part(index: Any, state: list[Any]) -> list[Any]:
                    columns(count, 2, first, builder.mul(index, i64(2 * LANES)))
                    return state

                counted(builder, builder.udiv(head_dim_, i64(2 * LANES)), [], part)

            return emit

        _by_sixes(builder, rows_, tile_of)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
