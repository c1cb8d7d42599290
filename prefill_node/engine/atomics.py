"""What the threads of a team say to each other: atomic operations on int64 in shared memory, as LLVM IR inside numba functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from prefill_node.engine.vector_ir import I32, I64, in_ir, pointer


@in_ir
def atomic_load(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(pointer(builder, arguments[0], I64), ordering="acquire", align=8)

    return types.int64(types.int64), codegen


@in_ir
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], pointer(builder, arguments[0], I64), ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@in_ir
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, arguments[0], I64), arguments[1], ordering="acq_rel")

    return types.int64(types.int64, types.int64), codegen


@in_ir
def atomic_swap_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Store `value` if `expected` is there; True when it was."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair = builder.cmpxchg(pointer(builder, arguments[0], I64), arguments[1], arguments[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@in_ir
def yield_core(typingctx: Any) -> Any:
    """sched_yield: let another thread of this core run, if there is one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        known = builder.module.globals.get("sched_yield")
        function = known if known is not None else ir.Function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen
