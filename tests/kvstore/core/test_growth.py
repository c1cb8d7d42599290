"""A store that has seen a thousand times what it holds remembers no more of it than a store that has seen little."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest

from kvstore.core.events.removals import DeleteRequested
from kvstore.ids import Namespace
from kvstore.units import seconds

_NOT_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType)


def size_of(state: object) -> int:
    """How many objects the garbage collector knows of are reached from it, and how many items they have."""
    seen: dict[int, object] = {}
    found, size = [state], 0
    while found:
        each = found.pop()
        if id(each) in seen or isinstance(each, _NOT_STATE):
            continue
        seen[id(each)] = each
        referents = gc.get_referents(each)
        size += 1 + len(referents)
        found += [one for one in referents if gc.is_tracked(one)]
    return size


@pytest.mark.parametrize("ends", ["evicted", "deleted", "expired", "never committed"])
def test_blocks_that_came_and_went_leave_nothing_however_many_and_whose_they_were(
    ssd_node: Callable, chain: Callable, space, ends: str
) -> None:
    node = ssd_node(16)

    def live_through(number: int) -> None:
        mine = space._replace(namespace=Namespace(f"tenant-{number}"))
        blocks = chain(12, start=100 * number, space=mine)
        if ends == "never committed":
            node.reserve(*blocks, space=mine)
            node.wait(seconds(31))
            return
        node.put(*blocks, space=mine, ttl=seconds(40) if ends == "expired" else None)
        node.finish_io()
        node.acquire(*blocks, space=mine)
        if ends == "deleted":
            node.send(DeleteRequested(request_id=node.request(), key_space=mine, hashes=tuple(block.hash for block in blocks)))
        node.wait(seconds(21))
        node.finish_io()

    sizes = []
    for number in range(60):
        live_through(number)
        if number % 5 == 4:
            node.said = []
            node.state.heat.take()
            sizes.append(size_of(node.state))
    assert max(sizes[8:]) <= 1.1 * max(sizes[3:6]), sizes
