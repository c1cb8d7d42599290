from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.puts import ReserveStatus
from kvstore.core.events.removals import AnswerDelete, AnswerEvict, DeleteRequested, EvictRequested

PAGE = 4096


def evict(node, **what) -> AnswerEvict:
    return node.ask(EvictRequested(request_id=node.request(), **what), AnswerEvict)


def test_an_operator_evicts_everything_but_what_is_leased(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(8), chain(4)
    node.put(*blocks)
    node.acquire(blocks[0])
    answer = evict(node, everything=True)
    assert (answer.evicted_copies, answer.evicted_bytes, answer.leased_copies_kept) == (3, 3 * PAGE, 1)
    assert node.present(*blocks) == (True, False, False, False)


def test_an_operator_evicts_a_namespace_a_key_space_or_named_blocks(host_node: Callable, chain: Callable, space) -> None:
    other = space._replace(namespace="other")
    mine, theirs = chain(4), chain(2, space=other)
    for what, left in (
        ({"namespace": space.namespace}, (0, 2)),
        ({"key_space": other}, (4, 0)),
        ({"key_space": space, "hashes": (mine[3].hash, mine[3].hash, theirs[0].hash)}, (3, 2)),
        ({}, (4, 2)),
    ):
        node = host_node(8)
        node.put(*mine)
        node.put(*theirs, space=other)
        evict(node, **what)
        assert (sum(node.present(*mine)), sum(node.present(*theirs, space=other))) == left


def test_an_operator_evicts_both_tiers(ssd_node: Callable, chain: Callable) -> None:
    node, blocks = ssd_node(8), chain(3)
    node.put(*blocks)
    node.finish_io()
    answer = evict(node, everything=True)
    assert answer.evicted_copies == 6
    node.finish_io()
    assert [tier.used for tier in node.state.status().tiers] == [0, 0]


def test_suffixes_are_evicted_before_heads(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(6), chain(6)
    node.put(*blocks)
    for n in range(1, 6):
        node.put(chain(1, start=100 * n)[0])
        assert node.present(*blocks) == (True,) * (6 - n) + (False,) * n


def test_a_head_whose_tail_an_abandoned_lease_holds_is_taken_when_nothing_else_is_left(host_node: Callable, chain: Callable) -> None:
    """Order matters, progress matters more: one client's leases on the ends of chains must not stop all puts."""
    node, blocks = host_node(4), chain(4)
    node.put(*blocks)
    node.acquire(blocks[3])
    statuses = node.put(*chain(3, start=100))
    assert ReserveStatus.NO_ROOM not in statuses
    assert node.present(blocks[3]) == (True,)
    assert node.state.status().counters["evicted:room_out_of_order"] > 0


def test_when_everything_is_leased_a_put_is_told_so_and_works_again_after_the_leases(host_node: Callable, chain: Callable) -> None:
    node, blocks, other = host_node(4), chain(4), chain(1, start=100)[0]
    node.put(*blocks)
    lease = node.acquire(*blocks).lease_id
    assert node.put(other) == [ReserveStatus.NO_ROOM]
    assert node.put(other) == [ReserveStatus.NO_ROOM]
    node.release(lease, blocks[3])
    assert node.reserve(other).grants[0].status is ReserveStatus.GRANTED


def test_eviction_frees_within_one_block_of_what_was_asked(host_node: Callable, chain: Callable) -> None:
    node = host_node(8)
    node.put(*chain(8))
    node.put(chain(1, start=100)[0], size=3 * PAGE)
    assert node.state.status().blocks == 8 - 3 + 1


def test_a_delete_of_what_is_not_here_says_so_and_stops_nothing_of_its_batch(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(8), chain(3)
    node.put(blocks[0], blocks[2])
    event = DeleteRequested(request_id=node.request(), key_space=space, hashes=tuple(block.hash for block in blocks))
    assert node.ask(event, AnswerDelete).deleted == (True, False, True)
    assert node.state.status().blocks == 0


def test_every_eviction_is_noted_with_its_reason_and_bytes(host_node: Callable, chain: Callable) -> None:
    node = host_node(1)
    node.put(chain(1)[0], size=100)
    node.reserve(chain(1, start=100)[0])
    (note,) = [i for i in node.said if isinstance(i, Note)]
    assert (note.kind, note.reason, note.payload_bytes) == (NoteKind.EVICTED, "room", 100)
