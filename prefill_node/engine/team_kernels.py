"""How the threads of a team share the items of one operation after the other. numba caches it by this file's time stamp: when atomics.py
or an _ir.py under it changes, touch this one too.

An array of int64, `control`, holds the present operation. Its items are claimed by counting `LEFT` down, so a thread that comes
late or stops for a while holds up nothing but the item that it claimed.
"""

from __future__ import annotations

from prefill_node.engine.atomics import atomic_add, atomic_load, atomic_store, atomic_swap_if, yield_core
from prefill_node.engine.record import FUNCTION, ITEMS, RECORD
from prefill_node.engine.scalar_ir import call, field

LEFT, DONE, EXIT, OPERATION = 0, 64, 128, 136
"""Bytes into `control`, those that different threads write in cache lines of their own."""
CONTROL_LENGTH = 24
SPINS = 2_000
"""Looks at the others' work before the core is offered to whoever wants it: some microseconds, as an offer that is taken up may cost a
slice of milliseconds, whatever the priority of the taker."""


def run_all(control: int, first: int, count: int) -> None:
    """Do `count` operations, whose records start at `first`, in their order, with whoever helps."""
    for index in range(count):
        op = first + index * RECORD * 8
        items = field(op, ITEMS)
        if items == 1:  # not worth telling anybody
            call(field(op, FUNCTION), op, 0)
            continue
        atomic_store(control + OPERATION, op)
        atomic_store(control + DONE, 0)
        atomic_store(control + LEFT, items)
        mine = 0
        left = atomic_load(control + LEFT)
        while left > 0:
            if atomic_swap_if(control + LEFT, left, left - 1):
                call(field(op, FUNCTION), op, items - left)
                mine += 1
            left = atomic_load(control + LEFT)
        spins = 0
        while atomic_load(control + DONE) + mine < items:
            spins += 1
            if spins > SPINS:
                yield_core()


def help_out(control: int) -> None:
    """Work beside `run_all` until EXIT is set."""
    spins = 0
    while atomic_load(control + EXIT) == 0:
        left = atomic_load(control + LEFT)
        if left > 0 and atomic_swap_if(control + LEFT, left, left - 1):
            # The operation cannot change while this item is unfinished.
            op = atomic_load(control + OPERATION)
            call(field(op, FUNCTION), op, field(op, ITEMS) - left)
            atomic_add(control + DONE, 1)
            spins = 0
        else:
            spins += 1
            if spins > SPINS:
                yield_core()
