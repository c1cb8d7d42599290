"""Vectors of eight float32 as LLVM IR inside numba functions: what the CPU kernels' building blocks are written with.

Written by hand for one reason beside speed: the order of every floating point operation of a row is fixed, here and in what is made of it
(product_ir, row_ir). So a row's bits are the same for every number of rows beside it, on every machine with fused multiply-add. Addresses
are int64 byte addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

LANES = 8
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


def load_vector(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, VECTOR), align=4)


def load_bf16(builder: Any, address: Any) -> Any:
    bits = builder.load(pointer(builder, address, ir.VectorType(I16, LANES)), align=2)
    wide = builder.zext(bits, ir.VectorType(I32, LANES))
    shift = ir.Constant(ir.VectorType(I32, LANES), [16] * LANES)
    return builder.bitcast(builder.shl(wide, shift), VECTOR)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, pointer(builder, address, VECTOR), align=4)


def splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def spread_at(builder: Any, address: Any) -> Any:
    """The float32 there, in all lanes."""
    return splat(builder, builder.load(pointer(builder, address, F32), align=4))


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def call_llvm(builder: Any, name: str, *arguments: Any) -> Any:
    full = f"{name}.v{LANES}f32"  # declare_intrinsic cannot name vector types
    known = builder.module.globals.get(full)
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(arguments))
    return builder.call(known if known is not None else ir.Function(builder.module, kind, full), arguments)


def bytes_of(builder: Any, count: Any, size: int) -> Any:
    return builder.mul(count, ir.Constant(I64, size))


def i64(value: int) -> Any:
    return ir.Constant(I64, value)


def counted(builder: Any, count: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`for i in range(count): state = body(i, state)`; returns the last state."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(i64(0), before)
    carried = []
    for value in state:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        carried.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    next_state = body(index, carried)
    index.add_incoming(builder.add(index, i64(1)), builder.block)
    for phi, value in zip(carried, next_state, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return list(carried)


def across(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One float from the lanes, halves first."""
    for width in (4, 2, 1):
        lanes = [(lane + width) % LANES for lane in range(LANES)]
        turned = builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, LANES), lanes))
        vector = combine(vector, turned)
    return builder.extract_element(vector, i64(0))
