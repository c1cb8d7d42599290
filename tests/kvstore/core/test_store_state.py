from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.events.puts import CommitStatus
from kvstore.core.events.questions import AnswerLocate, BlockPlace, LocateRequested, PlacedCopy
from kvstore.core.events.tick import Tick
from kvstore.core.extent import Tier
from kvstore.ids import AS_SEALED
from kvstore.units import Nanos

PAGE = 4096


def test_the_same_events_give_the_same_instructions(ssd_node: Callable, chain: Callable) -> None:
    runs = []
    for _ in range(2):
        node, said = ssd_node(6), []
        for start in range(0, 400, 40):
            node.put(*chain(2, start=start))
            said.append(list(node.said))
            node.acquire(*chain(1, start=start))
            node.finish_io()
            said.append(list(node.said))
        runs.append(said)
    assert runs[0] == runs[1]


def test_time_never_goes_back(host_node: Callable) -> None:
    node = host_node(2)
    node.wait(Nanos(5))
    with pytest.raises(AssertionError):
        node.state.handle(Tick(), Nanos(4))


def test_an_operator_sees_where_each_block_is_and_how_often_it_is_leased(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(4), chain(2)
    node.put(blocks[0])
    node.finish_io()
    node.acquire(blocks[0])
    event = LocateRequested(request_id=node.request(), key_space=space, hashes=tuple(block.hash for block in blocks))
    assert node.ask(event, AnswerLocate).places == (
        BlockPlace((PlacedCopy(Tier.HOST, PAGE, AS_SEALED), PlacedCopy(Tier.SSD, PAGE, AS_SEALED)), 1),
        BlockPlace((), 0),
    )


def test_status_counts_what_is_there_and_what_happened(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(4), chain(4)
    assert node.put(*blocks[:2]) == [CommitStatus.STORED] * 2
    node.reserve(blocks[2])
    node.acquire(*blocks)
    status = node.state.status()
    assert (status.blocks, status.leases, status.reservations, status.operations) == (2, 1, 1, 0)
    assert status.counters == {"stored:put": 2}
    (host,) = status.tiers
    assert (host.tier, host.capacity, host.used, host.copies) == (Tier.HOST, 4 * PAGE, 3 * PAGE, 3)


def test_an_empty_payload_and_empty_batches_are_handled_like_any_other(host_node: Callable, chain: Callable) -> None:
    node, (block,) = host_node(2), chain(1)
    assert node.reserve().grants == ()
    assert node.acquire().lease_id == 0
    assert node.present() == ()
    assert node.put(block, size=0) == [CommitStatus.STORED]
    assert node.acquire(block).blocks[0].payload_bytes == 0
