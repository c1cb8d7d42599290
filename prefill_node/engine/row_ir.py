"""What is done to single rows of float32, as LLVM IR inside numba functions: norms, softmax, gates, rotation, to bf16 and back."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types

from prefill_node.engine.vector_ir import (
    I16,
    I32,
    LANES,
    VECTOR,
    across,
    bytes_of,
    call_llvm,
    constant,
    counted,
    i64,
    in_ir,
    load_bf16,
    load_vector,
    pointer,
    splat,
    store_vector,
)


@in_ir
def largest(typingctx: Any, values: Any, count: Any) -> Any:
    """largest(values, count): of float32; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            value = load_vector(builder, builder.add(arguments[0], builder.mul(i, i64(LANES * 4))))
            return [call_llvm(builder, "llvm.maxnum", state[0], value)]

        (best,) = counted(builder, builder.udiv(arguments[1], i64(LANES)), [constant(-math.inf)], body)
        return across(builder, best, lambda a, b: call_llvm(builder, "llvm.maxnum", a, b))

    return types.float32(types.int64, types.int64), codegen


def _exp(builder: Any, x: Any) -> Any:
    """e**x for x <= 0, within 2 units in the last place; 0 below -87. Source: Cephes expf (Moshier)."""
    kept = builder.fcmp_ordered(">", x, constant(-87.0))
    x = builder.select(kept, x, constant(-87.0))
    n = call_llvm(builder, "llvm.rint", builder.fmul(x, constant(1.4426950408889634)))
    r = call_llvm(builder, "llvm.fma", n, constant(-0.693359375), x)
    r = call_llvm(builder, "llvm.fma", n, constant(2.12194440054690583e-4), r)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = call_llvm(builder, "llvm.fma", y, r, constant(coefficient))
    y = builder.fadd(call_llvm(builder, "llvm.fma", y, builder.fmul(r, r), r), constant(1.0))
    integers = ir.VectorType(I32, LANES)
    power = builder.shl(builder.add(builder.fptosi(n, integers), ir.Constant(integers, [127] * LANES)), ir.Constant(integers, [23] * LANES))
    return builder.select(kept, builder.fmul(y, builder.bitcast(power, VECTOR)), constant(0.0))


@in_ir
def exp_and_sum(typingctx: Any, values: Any, count: Any, shift: Any) -> Any:
    """exp_and_sum(values, count, shift) -> the sum of values = exp(values - shift) (in place); count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, count_, shift_ = arguments
        shift_ = splat(builder, shift_)

        def body(i: Any, state: list[Any]) -> list[Any]:
            at = builder.add(values_, builder.mul(i, i64(LANES * 4)))
            result = _exp(builder, builder.fsub(load_vector(builder, at), shift_))
            store_vector(builder, result, at)
            return [builder.fadd(state[0], result)]

        (total,) = counted(builder, builder.udiv(count_, i64(LANES)), [constant(0.0)], body)
        return across(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), codegen


@in_ir
def gate(typingctx: Any, gates: Any, ups: Any, out: Any, count: Any) -> Any:
    """gate(gates, ups, out, count): out = gates * sigmoid(gates) * ups; float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, i64(LANES * 4))
            x = load_vector(builder, builder.add(arguments[0], offset))
            small = _exp(builder, builder.fneg(call_llvm(builder, "llvm.fabs", x)))
            top = builder.select(builder.fcmp_ordered("<", x, constant(0.0)), small, constant(1.0))
            sigmoid = builder.fdiv(top, builder.fadd(small, constant(1.0)))
            product = builder.fmul(builder.fmul(x, sigmoid), load_vector(builder, builder.add(arguments[1], offset)))
            store_vector(builder, product, builder.add(arguments[2], offset))
            return state

        counted(builder, builder.udiv(arguments[3], i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@in_ir
def sum_of_squares(typingctx: Any, values: Any, count: Any) -> Any:
    """sum_of_squares(values, count): float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            x = load_vector(builder, builder.add(arguments[0], builder.mul(i, i64(LANES * 4))))
            return [call_llvm(builder, "llvm.fma", x, x, state[0])]

        (total,) = counted(builder, builder.udiv(arguments[1], i64(LANES)), [constant(0.0)], body)
        return across(builder, total, builder.fadd)

    return types.float32(types.int64, types.int64), codegen


@in_ir
def scale_by(typingctx: Any, values: Any, weights: Any, out: Any, count: Any, factor: Any) -> Any:
    """scale_by(values, weights, out, count, factor): out = weights * (values * factor); float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        factor_ = splat(builder, arguments[4])

        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, i64(LANES * 4))
            scaled = builder.fmul(load_vector(builder, builder.add(arguments[0], offset)), factor_)
            store_vector(
                builder, builder.fmul(load_vector(builder, builder.add(arguments[1], offset)), scaled), builder.add(arguments[2], offset)
            )
            return state

        counted(builder, builder.udiv(arguments[3], i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), codegen


@in_ir
def rotate(typingctx: Any, values: Any, cos: Any, sin: Any, half: Any) -> Any:
    """rotate(values, cos, sin, half): in place, the pairs (values[i], values[i + half]) turned by the angles whose cosines and sines
    are cos[i] and sin[i]; float32, half a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values_, cos_, sin_, half_ = arguments
        second = builder.add(values_, bytes_of(builder, half_, 4))

        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, i64(LANES * 4))
            a_at, b_at = builder.add(values_, offset), builder.add(second, offset)
            a, b = load_vector(builder, a_at), load_vector(builder, b_at)
            c, s = load_vector(builder, builder.add(cos_, offset)), load_vector(builder, builder.add(sin_, offset))
            store_vector(builder, builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), a_at)
            store_vector(builder, builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), b_at)
            return state

        counted(builder, builder.udiv(half_, i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@in_ir
def widen(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """widen(source, target, count): bf16 to float32; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, target_, count_ = arguments

        def body(i: Any, state: list[Any]) -> list[Any]:
            value = load_bf16(builder, builder.add(source_, builder.mul(i, i64(LANES * 2))))
            store_vector(builder, value, builder.add(target_, builder.mul(i, i64(LANES * 4))))
            return state

        counted(builder, builder.udiv(count_, i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def narrow(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """narrow(source, target, count): float32 to bf16, to the nearest, ties to even; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integers = ir.VectorType(I32, LANES)

        def whole(value: int) -> Any:
            return ir.Constant(integers, [value] * LANES)

        def body(i: Any, state: list[Any]) -> list[Any]:
            bits = builder.bitcast(load_vector(builder, builder.add(arguments[0], builder.mul(i, i64(LANES * 4)))), integers)
            odd = builder.and_(builder.lshr(bits, whole(16)), whole(1))
            rounded = builder.lshr(builder.add(bits, builder.add(odd, whole(0x7FFF))), whole(16))
            place = pointer(builder, builder.add(arguments[1], builder.mul(i, i64(LANES * 2))), ir.VectorType(I16, LANES))
            builder.store(builder.trunc(rounded, ir.VectorType(I16, LANES)), place, align=2)
            return state

        counted(builder, builder.udiv(arguments[2], i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def copy(typingctx: Any, source: Any, target: Any, count: Any) -> Any:
    """copy(source, target, count): of float32; count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, i64(LANES * 4))
            store_vector(builder, load_vector(builder, builder.add(arguments[0], offset)), builder.add(arguments[1], offset))
            return state

        counted(builder, builder.udiv(arguments[2], i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@in_ir
def add_to(typingctx: Any, values: Any, more: Any, count: Any) -> Any:
    """add_to(values, more, count): values += more; float32, count a multiple of 8."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def body(i: Any, state: list[Any]) -> list[Any]:
            offset = builder.mul(i, i64(LANES * 4))
            at = builder.add(arguments[0], offset)
            store_vector(builder, builder.fadd(load_vector(builder, at), load_vector(builder, builder.add(arguments[1], offset))), at)
            return state

        counted(builder, builder.udiv(arguments[2], i64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
