from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerRenew,
    CancelRead,
    ReadFinished,
    ReadOutcome,
    ReadStatus,
    RenewRequested,
)
from kvstore.core.events.puts import ReserveStatus
from kvstore.core.events.questions import AnswerDescribe, DescribeRequested
from kvstore.core.events.removals import DeleteRequested, EvictRequested
from kvstore.core.events.verification import AnswerVerify, CopyVerdict, VerifyExtents, VerifyOutcome, VerifyRequested
from kvstore.core.extent import Tier
from kvstore.ids import LeaseId
from kvstore.units import Nanos, seconds

PAGE = 4096


def evict_all(node) -> None:
    node.send(EvictRequested(request_id=node.request(), everything=True))


def test_an_acquire_leases_the_leading_run_of_each_stripe(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(64), chain(24)
    node.put(*blocks[:3], *blocks[4:8], *blocks[9:16], *blocks[16:20])
    answer = node.acquire(*blocks)
    expected = [True] * 3 + [False] * 5 + [False] * 8 + [True] * 4 + [False] * 4
    assert [found is not None for found in answer.blocks] == expected
    answer = node.acquire(*blocks[9:16])
    assert all(found is not None for found in answer.blocks), "a run may start where the reader's own blocks end"


def test_a_leased_block_survives_any_eviction_and_every_other_put(host_node: Callable, chain: Callable) -> None:
    """Lookup, then forced eviction and pressure, then the read: what was promised is there."""
    node, blocks = host_node(4), chain(4)
    node.put(*blocks)
    lease = node.acquire(*blocks[:2]).lease_id
    evict_all(node)
    node.put(*chain(6, start=70))
    assert node.present(*blocks) == (True, True, False, False)
    assert all(item.status is ReadStatus.OK for item in node.read(lease, *blocks[:2]).items)


def test_ten_thousand_lookups_that_are_never_read_pin_nothing_after_their_lease(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(8), chain(8)
    node.put(*blocks)
    for _ in range(10_000):
        node.acquire(*blocks[:2])
    assert node.put(*chain(8, start=70))[-1] is not ReserveStatus.NO_ROOM
    node.wait(seconds(10))
    status = node.state.status()
    assert status.leases == 0
    assert all(entry.leases == 0 for entry in node.state._stock.index)
    evict_all(node)
    assert node.state.status().tiers[0].used == 0


def test_a_probe_pins_nothing_and_counts_as_no_use(host_node: Callable, chain: Callable) -> None:
    node, old, new = host_node(2), chain(1)[0], chain(1, start=70)[0]
    node.put(old, new)
    for _ in range(50):
        assert node.present(old) == (True,)
    node.put(chain(1, start=90)[0])
    assert node.present(old, new) == (False, True)


def test_a_double_release_and_a_release_of_what_was_never_leased_are_harmless(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(8), chain(4)
    node.put(*blocks)
    one, two = node.acquire(*blocks).lease_id, node.acquire(*blocks).lease_id
    for _ in range(3):
        node.release(one)
        node.release(one, *blocks)
        node.release(LeaseId(77))
    assert [entry.leases for entry in node.state._stock.index] == [1, 1, 1, 1]
    node.release(two, blocks[3])
    node.release(two, blocks[3])
    assert [entry.leases for entry in node.state._stock.index] == [1, 1, 1, 0]
    assert node.read(two, *blocks[2:]).items[1].status is ReadStatus.NOT_LEASED


def test_a_slow_read_that_outlives_its_lease_never_gets_foreign_bytes(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(2), chain(2)
    node.put(*blocks)
    lease = node.acquire(*blocks).lease_id
    read = node.read(lease, *blocks)
    extents = {item.extent.offset for item in read.items}
    node.wait(seconds(10))
    assert node.read(lease, blocks[0]).items[0].status is ReadStatus.NOT_LEASED
    evict_all(node)
    assert node.put(chain(1, start=70)[0]) == [ReserveStatus.NO_ROOM], "the extents are still being read"
    node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.OK, ReadOutcome.OK)))
    fresh = node.reserve(chain(1, start=70)[0]).grants[0].extent
    assert fresh.offset in extents
    assert fresh.generation > max(item.extent.generation for item in read.items)


def test_a_read_has_a_bound_and_is_cancelled_once(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(2), chain(1)
    node.put(*blocks)
    read = node.read(node.acquire(*blocks).lease_id, *blocks)
    assert not [i for i in node.wait(seconds(4.9)) if isinstance(i, CancelRead)]
    assert node.only(node.wait(seconds(0.1)), CancelRead).operation == read.operation
    assert not [i for i in node.wait(seconds(1)) if isinstance(i, CancelRead)]
    node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.UNREAD,)))
    assert node.state.status().operations == 0


def test_a_stale_or_repeated_completion_changes_nothing(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(2), chain(1)
    node.put(*blocks)
    read = node.read(node.acquire(*blocks).lease_id, *blocks)
    finished = ReadFinished(operation=read.operation, outcomes=(ReadOutcome.OK,))
    node.send(finished)
    again = node.read(node.acquire(*blocks).lease_id, *blocks)
    node.send(finished)
    (entry,) = node.state._stock.index
    assert entry.host.holds == 1
    node.send(ReadFinished(operation=again.operation, outcomes=(ReadOutcome.OK,)))
    assert entry.host.holds == 0


def test_a_renewal_lengthens_within_bounds_and_a_lease_that_is_over_is_not_revived(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(2), chain(1)
    node.put(*blocks)
    lease = node.acquire(*blocks, ttl=seconds(5)).lease_id

    def renew(ttl: Nanos | None = None) -> Nanos:
        return node.ask(RenewRequested(request_id=node.request(), lease_id=lease, ttl=ttl), AnswerRenew).ttl

    assert renew(seconds(1)) == seconds(5), "a renewal never shortens"
    assert renew(seconds(500)) == seconds(20)
    for _ in range(4):
        node.wait(seconds(12))
        renew(seconds(20))
    assert renew(seconds(20)) == seconds(60 - 48), "no lease lives longer than its bound"
    node.wait(seconds(12))
    assert renew() == 0


def test_a_copy_that_reads_back_wrong_is_quarantined_and_the_block_is_a_miss(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(4), chain(2)
    node.put(*blocks)
    read = node.read(node.acquire(*blocks).lease_id, *blocks)
    node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.CORRUPT, ReadOutcome.OK)))
    assert node.notes() == ["quarantined:checksum"]
    assert node.present(*blocks) == (False, True)
    assert node.put(blocks[0])[0] is not ReserveStatus.EXISTS


def test_a_readers_complaint_is_checked_before_it_is_believed(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(4), chain(2)
    node.put(*blocks)
    for outcome, present in ((VerifyOutcome.OK, True), (VerifyOutcome.CORRUPT, False)):
        lease = node.acquire(*blocks).lease_id
        node.release(lease, corrupt=(blocks[1], blocks[1]))
        assert len([i for i in node.said if isinstance(i, VerifyExtents)]) == 1, "a flood of complaints costs one check"
        node.verified(outcome)
        assert node.present(*blocks) == (True, present)


def test_a_scrub_verifies_one_copy_and_says_what_it_found(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(4), chain(1)
    node.put(*blocks)

    def verify(tier: Tier) -> VerifyRequested:
        return VerifyRequested(request_id=node.request(), key_space=space, hash=blocks[0].hash, tier=tier)

    assert node.ask(verify(Tier.SSD), AnswerVerify).verdict is CopyVerdict.GONE
    node.send(verify(Tier.HOST))
    node.send(verify(Tier.HOST))
    assert [i.verdict for i in node.verified() if isinstance(i, AnswerVerify)] == [CopyVerdict.GOOD] * 2
    node.send(verify(Tier.HOST))
    assert node.only(node.verified(VerifyOutcome.CORRUPT), AnswerVerify).verdict is CopyVerdict.BAD
    assert node.present(*blocks) == (False,)


def test_a_delete_serves_the_leases_it_finds_and_a_new_put_gets_its_own_extent(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(4), chain(1)
    node.put(*blocks)
    lease = node.acquire(*blocks).lease_id
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(blocks[0].hash,)))
    assert node.present(*blocks) == (False,)
    old = node.read(lease, *blocks).items[0]
    node.put(*blocks)
    new = node.read(node.acquire(*blocks).lease_id, *blocks).items[0]
    assert old.status is new.status is ReadStatus.OK
    assert old.extent.offset != new.extent.offset
    assert node.state.status().tiers[0].used == 2 * PAGE


def test_two_tenants_with_the_same_tokens_do_not_see_each_other(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(4), chain(2)
    node.put(*blocks)
    other = space._replace(namespace="other")
    assert node.present(*blocks, space=other) == (False, False)
    assert node.acquire(*blocks, space=other).lease_id == 0
    lease = node.acquire(*blocks).lease_id
    assert node.read(lease, *blocks, space=other).items[0].status is ReadStatus.NOT_LEASED


def test_a_block_of_another_layout_is_a_miss(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(4), chain(1)
    node.put(*blocks)
    assert node.acquire(*blocks, space=space._replace(layout=b"M" * 32)).lease_id == 0


def test_a_copy_taken_by_a_peer_counts_as_no_use(host_node: Callable, chain: Callable, space) -> None:
    node, (old, newer, newest) = host_node(2), (chain(1, start=start)[0] for start in (1, 100, 200))
    node.put(old)
    node.put(newer)
    request = AcquireRequested(request_id=node.request(), key_space=space, blocks=(old,), counts=False)
    node.release(node.ask(request, AnswerAcquire).lease_id)
    node.put(newest)
    assert node.present(old, newer) == (False, True), "still the one least recently used"


def test_a_description_says_what_a_peer_needs_for_a_copy(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(4), chain(3)
    node.put(*blocks[:2])
    request = DescribeRequested(request_id=node.request(), key_space=space, hashes=tuple(block.hash for block in blocks))
    first, second, absent = node.ask(request, AnswerDescribe).blocks
    assert (first.block, second.block, absent) == (blocks[0], blocks[1], None)
    assert (first.payload_bytes, first.tiers) == (PAGE, (Tier.HOST,))
    assert [node.state.holds(space, block.hash) for block in blocks] == [True, True, False]
