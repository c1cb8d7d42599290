"""Vector building blocks of the CPU kernels, as LLVM IR inside numba functions.

Written by hand for one reason beside speed: the order of every floating point operation of a row is fixed here, so a row's bits are
the same for every number of rows beside it, on every machine with fused multiply-add. Addresses are int64 byte addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 8
PANEL = 32
"""Columns of a weight panel: a linear layer's weight [n, k] lies as [n / PANEL, k, PANEL], so the columns of one k are one run."""
TILE_ROWS = 6
F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)


def in_ir(function: Any) -> Any:
    """numba's decorator, which has no types."""
    return intrinsic(function)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, VECTOR), align=4)


def _load_bf16(builder: Any, address: Any) -> Any:
    bits = builder.load(pointer(builder, address, ir.VectorType(I16, LANES)), align=2)
    wide = builder.zext(bits, ir.VectorType(I32, LANES))
    shift = ir.Constant(ir.VectorType(I32, LANES), [16] * LANES)
    return builder.bitcast(builder.shl(wide, shift), VECTOR)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, pointer(builder, address, VECTOR), align=4)


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def _spread(builder: Any, address: Any) -> Any:
    """The float32 there, in all lanes."""
    return _splat(builder, builder.load(pointer(builder, address, F32), align=4))


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    full = f"{name}.v{LANES}f32"  # declare_intrinsic cannot name vector types
    known = builder.module.globals.get(full)
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(arguments))
    return builder.call(known if known is not None else ir.Function(builder.module, kind, full), arguments)


def _bytes(builder: Any, count: Any, size: int) -> Any:
    return builder.mul(count, ir.Constant(I64, size))


def _i64(value: int) -> Any:
    return ir.Constant(I64, value)


def _counted(builder: Any, count: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`for i in range(count): state = body(i, state)`; returns the last state."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(_i64(0), before)
    carried = []
    for value in state:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        carried.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    next_state = body(index, carried)
    index.add_incoming(builder.add(index, _i64(1)), builder.block)
    for phi, value in zip(carried, next_state, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return list(carried)


def _tile(builder: Any, rows: int, vectors: int, load: Any, size: int, x: Any, x_step: Any, w: Any, w_step: Any, k: Any) -> list[Any]:
    """The sums over k of x[r, k] * w[k, c], in the order of k, for `rows` rows and LANES * `vectors` columns; steps in bytes."""
    x_rows = [builder.add(x, builder.mul(x_step, _i64(row))) for row in range(rows)]

    def body(i: Any, sums: list[Any]) -> list[Any]:
        w_at = builder.add(w, builder.mul(i, w_step))
        columns = [load(builder, builder.add(w_at, _i64(v * LANES * size))) for v in range(vectors)]
        offset = _bytes(builder, i, 4)
        result = []
        for row in range(rows):
            spread = _spread(builder, builder.add(x_rows[row], offset))
            result += [_call(builder, "llvm.fma", spread, columns[v], sums[row * vectors + v]) for v in range(vectors)]
        return result

    return _counted(builder, k, [_constant(0.0)] * (rows * vectors), body)


def make_panel(*, bf16: bool) -> Any:
    """panel(x, x_stride, w, k, out, out_stride, rows): out[r, c] = sum over k of x[r, k] * w[k, c], in the order of k, for the PANEL
    columns of `w` [k, PANEL], bf16 or float32; x, out float32; strides in elements between rows.

    Rows are taken six at a time (12 of 16 vector registers hold sums), what is left over in one tile of its own.
    """
    size = 2 if bf16 else 4
    load = _load_bf16 if bf16 else _load

    @in_ir
    def panel(typingctx: Any, x: Any, x_stride: Any, w: Any, k: Any, out: Any, out_stride: Any, rows: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_, x_stride_, w_, k_, out_, out_stride_, rows_ = arguments
            x_step, out_step = _bytes(builder, x_stride_, 4), _bytes(builder, out_stride_, 4)

            def tile_of(count: int) -> Callable[[Any, Any], None]:
                vectors = PANEL // LANES if count < 3 else PANEL // LANES // 2

                def emit(builder: Any, first: Any) -> None:
                    x_at, out_at = builder.add(x_, builder.mul(first, x_step)), builder.add(out_, builder.mul(first, out_step))

                    def part(index: Any, state: list[Any]) -> list[Any]:
                        column = builder.mul(index, _i64(vectors * LANES))
                        w_at = builder.add(w_, _bytes(builder, column, size))
                        sums = _tile(builder, count, vectors, load, size, x_at, x_step, w_at, _i64(PANEL * size), k_)
                        for row in range(count):
                            to = builder.add(builder.add(out_at, builder.mul(out_step, _i64(row))), _bytes(builder, column, 4))
                            for v in range(vectors):
                                _store(builder, sums[row * vectors + v], builder.add(to, _i64(v * LANES * 4)))
                        return state

                    _counted(builder, _i64(PANEL // LANES // vectors), [], part)

                return emit

            _by_sixes(builder, rows_, tile_of)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return panel


def _by_sixes(builder: Any, rows: Any, tile_of: Callable[[int], Callable[[Any, Any], None]]) -> None:
    """`tile_of(6)(builder, first row)` for each whole six of the rows, then `tile_of(left)` for what is left."""

    def six(index: Any, state: list[Any]) -> list[Any]:
        tile_of(TILE_ROWS)(builder, builder.mul(index, _i64(TILE_ROWS)))
        return state

    sixes = builder.udiv(rows, _i64(TILE_ROWS))
    _counted(builder, sixes, [], six)
    first = builder.mul(sixes, _i64(TILE_ROWS))
    after = builder.append_basic_block("after_rows")
    choice = builder.switch(builder.sub(rows, first), after)
    for count in range(1, TILE_ROWS):
        block = builder.append_basic_block(f"rows_{count}")
        choice.add_case(_i64(count), block)
        builder.position_at_end(block)
        tile_of(count)(builder, first)
        builder.branch(after)
    builder.position_at_end(after)


def make_turn(*, bf16: bool) -> Any:
    """turn(source, rows, columns, target, target_stride): target[c, r] = source[r, c] as float32, source bf16 or float32 and contiguous;
    rows and columns are multiples of 8, target_stride in elements."""
    size = 2 if bf16 else 4
    load = _load_bf16 if bf16 else _load

    @in_ir
    def turn(typingctx: Any, source: Any, rows: Any, columns: Any, target: Any, target_stride: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source_, rows_, columns_, target_, stride_ = arguments
            row_step, target_step = _bytes(builder, columns_, size), _bytes(builder, stride_, 4)

            def eight_rows(row_group: Any, state: list[Any]) -> list[Any]:
                from_row = builder.add(source_, builder.mul(builder.mul(row_group, _i64(LANES)), row_step))
                to_row = builder.add(target_, builder.mul(row_group, _i64(LANES * 4)))

                def square(column_group: Any, inner: list[Any]) -> list[Any]:
                    at = builder.add(from_row, builder.mul(column_group, _i64(LANES * size)))
                    lines = [load(builder, builder.add(at, builder.mul(row_step, _i64(r)))) for r in range(LANES)]
                    to = builder.add(to_row, builder.mul(builder.mul(column_group, _i64(LANES)), target_step))
                    for c, line in enumerate(_turned(builder, lines)):
                        _store(builder, line, builder.add(to, builder.mul(target_step, _i64(c))))
                    return inner

                _counted(builder, builder.udiv(columns_, _i64(LANES)), [], square)
                return state

            _counted(builder, builder.udiv(rows_, _i64(LANES)), [], eight_rows)
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


def _across(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One float from the lanes, halves first."""
    for width in (4, 2, 1):
        lanes = [(lane + width) % LANES for lane in range(LANES)]
        turned = builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, LANES), lanes))
        vector = combine(vector, turned)
    return builder.extract_element(vector, _i64(0))


@in_ir
def largest(typingctx: Any, values: Any, count: Any) -> Any:
    """largest(values, count): of float32; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            value = _load(builder, builder.add(arguments[0], builder.mul(i, _i64(LANES * 4))))
            return [_call(builder, "llvm.maxnum", state[0], value)]

        (best,) = _counted(builder, builder.udiv(arguments[1], _i64(LANES)), [_constant(-math.inf)], body)
        return _across(builder, best, lambda a, b: _call(builder, "llvm.maxnum", a, b))

    return types.float32(types.int64, types.int64), codegen


def _exp(builder: Any, x: Any) -> Any:
    """e**x for x <= 0, within 2 units in the last place; 0 below -87. Source: Cephes expf (Moshier)."""
    kept = builder.fcmp_ordered(">", x, _constant(-87.0))
    x = builder.select(kept, x, _constant(-87.0))
    n = _call(builder, "llvm.rint", builder.fmul(x, _constant(1.4426950408889634)))
    r = _call(builder, "llvm.fma", n, _constant(-0.693359375), x)
    r = _call(builder, "llvm.fma", n, _constant(2.12194440054690583e-4), r)
    y = _constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = _call(builder, "llvm.fma", y, r, _constant(coefficient))
    y = builder.fadd(_call(builder, "llvm.fma", y, builder.fmul(r, r), r), _constant(1.0))
    integers = ir.VectorType(I32, LANES)
    power = builder.shl(builder.add(builder.fptosi(n, integers), ir.Constant(integers, [127] * LANES)), ir.Constant(integers, [23] * LANES))
    return builder.select(kept, builder.fmul(y, builder.bitcast(power, VECTOR)), _constant(0.0))


@in_ir
def exp_and_sum(typingctx: Any, values: Any, count: Any, shift: Any) -> Any:
    """exp_and_sum(values, count, shift) -> the sum of values = exp(values - shift) (in place); count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, count_, shift_ = arguments
        shift_ = _splat(builder, shift_)

        def body(i: Any, state: list[Any]) -> list[Any]:
            at = builder.add(values_, builder.mul(i, _i64(LANES * 4)))
            result = _exp(builder, builder.fsub(_load(builder, at), shift_))
            _store(builder, result, at)
            return [builder.fadd(state[0], result)]

        (total,) = _counted(builder, builder.udiv(count_, _i64(LANES)), [_constant(0.0)], body)
        return _across(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), codegen


@in_ir
def gate(typingctx: Any, gates: Any, ups: Any, out: Any, count: Any) -> Any:
    """gate(gates, ups, out, count): out = gates * sigmoid(gates) * ups; float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, _i64(LANES * 4))
            x = _load(builder, builder.add(arguments[0], offset))
            small = _exp(builder, builder.fneg(_call(builder, "llvm.fabs", x)))
            top = builder.select(builder.fcmp_ordered("<", x, _constant(0.0)), small, _constant(1.0))
            sigmoid = builder.fdiv(top, builder.fadd(small, _constant(1.0)))
            product = builder.fmul(builder.fmul(x, sigmoid), _load(builder, builder.add(arguments[1], offset)))
            _store(builder, product, builder.add(arguments[2], offset))
            return state

        _counted(builder, builder.udiv(arguments[3], _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@in_ir
def sum_of_squares(typingctx: Any, values: Any, count: Any) -> Any:
    """sum_of_squares(values, count): float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            x = _load(builder, builder.add(arguments[0], builder.mul(i, _i64(LANES * 4))))
            return [_call(builder, "llvm.fma", x, x, state[0])]

        (total,) = _counted(builder, builder.udiv(arguments[1], _i64(LANES)), [_constant(0.0)], body)
        return _across(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64), codegen


@in_ir
def scale_by(typingctx: Any, values: Any, weights: Any, out: Any, count: Any, factor: Any) -> Any:
    """scale_by(values, weights, out, count, factor): out = weights * (values * factor); float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor_ = _splat(builder, arguments[4])

        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, _i64(LANES * 4))
            scaled = builder.fmul(_load(builder, builder.add(arguments[0], offset)), factor_)
            _store(builder, builder.fmul(_load(builder, builder.add(arguments[1], offset)), scaled), builder.add(arguments[2], offset))
            return state

        _counted(builder, builder.udiv(arguments[3], _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), codegen


@in_ir
def rotate(typingctx: Any, values: Any, cos: Any, sin: Any, half: Any) -> Any:
    """rotate(values, cos, sin, half): in place, the pairs (values[i], values[i + half]) turned by the angles whose cosines and sines
    are cos[i] and sin[i]; float32, half a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, cos_, sin_, half_ = arguments
        second = builder.add(values_, _bytes(builder, half_, 4))

        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, _i64(LANES * 4))
            a_at, b_at = builder.add(values_, offset), builder.add(second, offset)
            a, b = _load(builder, a_at), _load(builder, b_at)
            c, s = _load(builder, builder.add(cos_, offset)), _load(builder, builder.add(sin_, offset))
            _store(builder, builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), a_at)
            _store(builder, builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), b_at)
            return state

        _counted(builder, builder.udiv(half_, _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@in_ir
def mix(typingctx: Any, p: Any, p_stride: Any, v: Any, head_dim: Any, tokens: Any, out: Any, keep: Any, rows: Any) -> Any:
    """mix(p, p_stride, v, head_dim, tokens, out, keep, rows): out[r, d] = out[r, d] * keep[r] + sum over t of p[r, t] * v[t, d], in the
    order of t; all float32, v and out contiguous, head_dim a multiple of 16."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        p_, p_stride_, v_, head_dim_, tokens_, out_, keep_, rows_ = arguments
        p_step, step = _bytes(builder, p_stride_, 4), _bytes(builder, head_dim_, 4)

        def columns(rows: int, vectors: int, first: Any, column: Any) -> None:
            p_at, keep_at = builder.add(p_, builder.mul(first, p_step)), builder.add(keep_, _bytes(builder, first, 4))
            offset = _bytes(builder, column, 4)
            to = builder.add(builder.add(out_, builder.mul(first, step)), offset)
            places = [
                builder.add(builder.add(to, builder.mul(step, _i64(row))), _i64(v * LANES * 4))
                for row in range(rows)
                for v in range(vectors)
            ]

            def body(t: Any, sums: list[Any]) -> list[Any]:
                v_row = builder.add(builder.add(v_, builder.mul(t, step)), offset)
                values = [_load(builder, builder.add(v_row, _i64(i * LANES * 4))) for i in range(vectors)]
                result = []
                for row in range(rows):
                    weight = _spread(builder, builder.add(builder.add(p_at, builder.mul(p_step, _i64(row))), _bytes(builder, t, 4)))
                    result += [_call(builder, "llvm.fma", weight, values[i], sums[row * vectors + i]) for i in range(vectors)]
                return result

            kept = [_spread(builder, builder.add(keep_at, _i64(row * 4))) for row in range(rows)]
            start = [builder.fmul(_load(builder, place), kept[index // vectors]) for index, place in enumerate(places)]
            for value, place in zip(_counted(builder, tokens_, start, body), places, strict=True):
                _store(builder, value, place)

        def tile_of(count: int) -> Callable[[Any, Any], None]:
            def emit(builder: Any, first: Any) -> None:
                def part(index: Any, state: list[Any]) -> list[Any]:
                    columns(count, 2, first, builder.mul(index, _i64(2 * LANES)))
                    return state

                _counted(builder, builder.udiv(head_dim_, _i64(2 * LANES)), [], part)

            return emit

        _by_sixes(builder, rows_, tile_of)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@in_ir
def widen(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """widen(source, target, count): bf16 to float32; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, target_, count_ = arguments

        def body(i: Any, state: list[Any]) -> list[Any]:
            value = _load_bf16(builder, builder.add(source_, builder.mul(i, _i64(LANES * 2))))
            _store(builder, value, builder.add(target_, builder.mul(i, _i64(LANES * 4))))
            return state

        _counted(builder, builder.udiv(count_, _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def prefetch(typingctx: Any, address: Any, count: Any) -> Any:
    """Start bringing `count` bytes (a multiple of 64) into the cache."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        name = "llvm.prefetch.p0"
        known = builder.module.globals.get(name)
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = known if known is not None else ir.Function(builder.module, kind, name)
        read, keep, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)

        def body(i: Any, state: list[Any]) -> list[Any]:
            at = builder.add(arguments[0], builder.mul(i, _i64(64)))
            builder.call(function, [builder.inttoptr(at, byte), read, keep, data])
            return state

        _counted(builder, builder.udiv(arguments[1], _i64(64)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@in_ir
def load_f32(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], F32), align=4)

    return types.float32(types.int64), codegen


@in_ir
def load_i32(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sext(builder.load(pointer(builder, arguments[0], I32), align=4), I64)

    return types.int64(types.int64), codegen


@in_ir
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], F32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@in_ir
def narrow(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """narrow(source, target, count): float32 to bf16, to the nearest, ties to even; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integers = ir.VectorType(I32, LANES)

        def whole(value: int) -> Any:
            return ir.Constant(integers, [value] * LANES)

        def body(i: Any, state: list[Any]) -> list[Any]:
            bits = builder.bitcast(_load(builder, builder.add(arguments[0], builder.mul(i, _i64(LANES * 4)))), integers)
            odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
            rounded = builder.lshr(builder.add(bits, builder.add(odd, whole(0x7FFF))), whole(16))
            place = pointer(builder, builder.add(arguments[1], builder.mul(i, _i64(LANES * 2))), ir.VectorType(I16, LANES))
            builder.store(builder.trunc(rounded, ir.VectorType(I16, LANES)), place, align=2)
            return state

        _counted(builder, builder.udiv(arguments[2], _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def copy(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """copy(source, target, count): of float32; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, _i64(LANES * 4))
            _store(builder, _load(builder, builder.add(arguments[0], offset)), builder.add(arguments[1], offset))
            return state

        _counted(builder, builder.udiv(arguments[2], _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def add_to(typingctx: Any, values: Any, more: Any, count: Any) -> Any:
    """add_to(values, more, count): values += more; float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, _i64(LANES * 4))
            at = builder.add(arguments[0], offset)
            _store(builder, builder.fadd(_load(builder, at), _load(builder, builder.add(arguments[1], offset))), at)
            return state

        _counted(builder, builder.udiv(arguments[2], _i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def field(typingctx: Any, record: Any, index: Any) -> Any:
    """field(record, index): the int64 at that index of the array at `record`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, builder.add(arguments[0], _bytes(builder, arguments[1], 8)), I64), align=8)

    return types.int64(types.int64, types.int64), codegen


@in_ir
def call(typingctx: Any, function: Any, record: Any, item: Any) -> Any:
    """call(function, record, item): the function void(int64, int64) at that address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(pointer(builder, arguments[0], kind), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
