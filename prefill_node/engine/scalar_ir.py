"""Single values at addresses, and calls of functions at addresses, as LLVM IR inside numba functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from prefill_node.engine.vector_ir import F32, I32, I64, bytes_of, counted, i64, in_ir, pointer


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
def field(typingctx: Any, record: Any, index: Any) -> Any:
    """field(record, index): the int64 at that index of the array at `record`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, builder.add(arguments[0], bytes_of(builder, arguments[1], 8)), I64), align=8)

    return types.int64(types.int64, types.int64), codegen


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
            at = builder.add(arguments[0], builder.mul(i, i64(64)))
            builder.call(function, [builder.inttoptr(at, byte), read, keep, data])
            return state

        counted(builder, builder.udiv(arguments[1], i64(64)), [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@in_ir
def call(typingctx: Any, function: Any, record: Any, item: Any) -> Any:
    """call(function, record, item): the function void(int64, int64) at that address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64])
        builder.call(pointer(builder, arguments[0], kind), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
