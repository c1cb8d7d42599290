"""The compiled kernels, by address."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cfunc, types

from kvstore.codec import compiling_alone
from prefill_node.engine.attention_kernel import attend_item
from prefill_node.engine.linear_kernel import linear_item
from prefill_node.engine.row_kernels import gate_item, heads_item, norm_item
from prefill_node.engine.team_kernels import help_out, run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Addresses for the FUNCTION of a record, and what runs records; a call of these two gives up the GIL until it returns."""

    linear: int
    attend: int
    norm: int
    heads: int
    gate: int
    run_all: Callable[[int, int, int], None]
    help_out: Callable[[int], None]


@cache
def operations() -> Operations:
    """Compile the kernels, or load them from numba's cache: seconds the first time on a machine. Each is compiled once, and called by
    address: in a call that numba links, a caller contains what it calls and is compiled with it again. Of the processes that start at
    once, one compiles and the others wait."""
    with compiling_alone(__file__):
        return Operations(
            linear=_native(linear_item, 2).address,
            attend=_native(attend_item, 2).address,
            norm=_native(norm_item, 2).address,
            heads=_native(heads_item, 2).address,
            gate=_native(gate_item, 2).address,
            run_all=_native(run_all, 3).ctypes,
            help_out=_native(help_out, 1).ctypes,
        )


_kept: list[Any] = []
"""Compiled functions: their code lives as long as they do."""


def _native(function: Callable[..., None], arguments: int) -> Any:
    compiled = cfunc(types.void(*[types.int64] * arguments), cache=True, error_model="numpy")(function)
    _kept.append(compiled)
    return compiled
