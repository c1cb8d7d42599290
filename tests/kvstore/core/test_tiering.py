from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.admission import AdmissionConfig
from kvstore.core.events.gets import ReadFinished, ReadOutcome, ReadStatus
from kvstore.core.events.moves import CopyExtent, CopyOutcome, CopyReason
from kvstore.core.events.puts import CommitStatus, ReserveStatus
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.events.regions import RecoveredRecord, RegionWriteReason, WriteRegion
from kvstore.core.events.removals import DeleteRequested
from kvstore.core.events.stop import AnswerStop, StopRequested
from kvstore.core.extent import Tier
from kvstore.core.manifest import HEADER_BYTES, decode_record_header
from kvstore.core.store_config import SsdConfig
from kvstore.errors import ConfigError
from kvstore.ids import BlockRef
from kvstore.units import Bytes, milliseconds, seconds

PAGE = 4096


def tiers(node, space, *blocks: BlockRef) -> list[tuple[Tier, ...]]:
    hashes = tuple(block.hash for block in blocks)
    answer = node.ask(LocateRequested(request_id=node.request(), key_space=space, hashes=hashes), AnswerLocate)
    return [place.tiers for place in answer.places]


def held(node, kind: type, reason: object) -> list:
    return [i for i in node.held if isinstance(i, kind) and i.reason == reason]


def test_copies_are_written_to_the_ssd_behind_the_put_parents_first(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(16), chain(5)
    assert node.put(*blocks) == [CommitStatus.STORED] * 5, "no put waits for the disk"
    assert [write.reason for write in held(node, WriteRegion, RegionWriteReason.OPEN)] == [RegionWriteReason.OPEN]
    node.finish_io()
    assert tiers(node, space, *blocks) == [(Tier.HOST, Tier.SSD)] * 5
    placed = [node.state._stock.index.get(space, block.hash).ssd.offset for block in blocks]
    assert placed == sorted(placed)


def test_nothing_is_demoted_below_the_watermark(ssd_node: Callable, chain: Callable) -> None:
    node = ssd_node(10, demote_above=0.5)
    blocks = chain(6)
    node.put(*blocks[:5])
    assert not node.held
    node.put(blocks[5])
    assert node.held


def test_the_queue_of_moves_is_bounded(ssd_node: Callable, chain: Callable) -> None:
    node = ssd_node(32, region_pages=128)
    node.put(*chain(20))
    node.written()
    assert len(held(node, CopyExtent, CopyReason.DEMOTE)) == 8


def test_room_comes_first_from_copies_that_are_on_the_ssd_too(ssd_node: Callable, chain: Callable, space) -> None:
    node, old, new = ssd_node(4, demote_above=0.99), chain(2), chain(2, start=70)
    node.put(*old)
    node.put(*new)
    node.acquire(*old)  # the older ones are the more recently used ones
    node.wait(seconds(20))
    # Full: demotion starts; only the first two get through.
    node.written()
    node.copied()
    node.copied()
    on_ssd = [block for block in old + new if Tier.SSD in tiers(node, space, block)[0]]
    assert on_ssd == list(old)
    node.put(*chain(2, start=90))
    assert tiers(node, space, *old, *new) == [(Tier.SSD,)] * 2 + [(Tier.HOST,)] * 2, "no block lost its last copy"


def test_a_record_says_all_that_a_restart_needs(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_node(4), chain(1)
    node.put(block)
    node.written()
    (copy,) = held(node, CopyExtent, CopyReason.DEMOTE)
    assert len(copy.header) == HEADER_BYTES
    nonce = node.state._stock.regions[copy.target.region].header.nonce
    header = decode_record_header(copy.header, nonce=nonce)
    assert header is not None
    assert header.record == RecoveredRecord(space, block, copy.target.offset, PAGE, copy.checksum, copy.target.generation)


def test_published_on_the_ssd_only_when_the_write_has_ended_well(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_node(4), chain(1)
    node.put(block)
    node.written()
    assert tiers(node, space, block) == [(Tier.HOST,)]
    node.copied(CopyOutcome.TARGET_FAILED)
    assert tiers(node, space, block) == [(Tier.HOST,)]
    assert "copy_failed:target_failed" in node.state.status().counters


def test_after_a_failed_write_the_disk_is_left_alone_and_then_tried_again(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block, other) = ssd_node(4), chain(2)
    node.put(block)
    node.written()
    node.copied(CopyOutcome.TARGET_FAILED)
    assert node.put(other) == [CommitStatus.STORED], "puts go on in the host tier"
    assert not node.held
    node.wait(seconds(10))
    node.finish_io()
    assert tiers(node, space, block, other) == [(Tier.HOST, Tier.SSD)] * 2


def test_a_stop_does_not_wait_for_the_pause_after_a_failed_write(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_node(4), chain(1)
    node.put(block)
    node.written()
    node.copied(CopyOutcome.TARGET_FAILED)
    node.send(StopRequested(request_id=node.request()))
    node.copied(CopyOutcome.TARGET_FAILED)
    assert not held(node, CopyExtent, CopyReason.DEMOTE), "a second failure is followed by a pause, a short one"
    node.wait(milliseconds(300))
    node.finish_io()
    assert tiers(node, space, block) == [(Tier.HOST, Tier.SSD)]


def test_a_host_copy_found_rotten_by_its_demotion_is_quarantined(ssd_node: Callable, chain: Callable) -> None:
    node, (block,) = ssd_node(4), chain(1)
    node.put(block)
    node.written()
    node.copied(CopyOutcome.SOURCE_CORRUPT)
    assert node.present(block) == (False,)
    assert node.state.status().counters["quarantined:checksum"] == 1


def test_a_freshly_demoted_block_is_not_the_next_victim_of_the_ssd(ssd_node: Callable, chain: Callable) -> None:
    """All others have been used since they came there, and it not yet."""
    node, before = ssd_node(4, regions=4, region_pages=16), None
    for start in range(0, 2000, 40):
        (block,) = chain(1, start=start)
        node.put(block)
        node.finish_io()
        if before is not None:
            assert node.present(before, block) == (True, True)
            node.release(node.acquire(before).lease_id)
        entry = next(entry for entry in node.state._stock.index if entry.hash == block.hash)
        assert entry.readable_ssd
        before = block
    assert node.state.status().counters["evicted:room"] > 20


def test_a_small_ssd_under_churn_keeps_prefixes_usable(ssd_node: Callable, chain: Callable, space) -> None:
    """Of the bytes stored, those whose whole prefix is stored too: all of them."""
    node = ssd_node(8, regions=4, region_pages=16)
    chains = [chain(8, start=1000 * n) for n in range(6)]
    for turn in range(60):
        blocks = chains[turn % len(chains)]
        lease = node.acquire(*blocks)
        hit = sum(found is not None for found in lease.blocks)
        if lease.lease_id:
            node.release(lease.lease_id)
        node.put(*blocks[hit:])
        node.finish_io()
    present = [node.present(*blocks) for blocks in chains]
    stored = sum(map(sum, present))
    usable = sum(next((at for at, here in enumerate(row) if not here), len(row)) for row in present)
    assert stored > 8
    assert usable == stored


def test_regions_are_reclaimed_for_as_long_as_puts_come(ssd_node: Callable, chain: Callable) -> None:
    node = ssd_node(4, regions=4, region_pages=16)
    for start in range(0, 40_000, 40):
        assert node.put(chain(1, start=start)[0]) == [CommitStatus.STORED]
        node.finish_io()
    status = node.state.status()
    assert status.counters["demoted:done"] > 900
    assert status.tiers[1].used > 0.4 * status.tiers[1].capacity
    assert not any(counter.startswith("region_failed") for counter in status.counters)


def test_a_read_under_way_keeps_its_region_from_being_reused(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(2, regions=3, region_pages=16), chain(1)
    node.put(*blocks)
    node.finish_io()
    node.put(*chain(2, start=70))
    node.finish_io()
    assert tiers(node, space, *blocks) == [(Tier.SSD,)]
    lease = node.acquire(*blocks)
    read = node.read(lease.lease_id, *blocks)
    extent = read.items[0].extent
    assert extent.tier is Tier.SSD
    node.release(lease.lease_id)
    for start in range(100, 4000, 40):
        node.put(chain(1, start=start)[0])
        node.finish_io()
        written = [i for i in node.said if isinstance(i, WriteRegion | CopyExtent)]
        assert not written
    region = node.state._stock.regions[extent.region]
    assert region.unfreed > 0
    node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.OK,)))


def test_a_hit_on_the_ssd_is_promoted_once_it_has_proved_itself(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(2, admission=AdmissionConfig(promote_after_uses=2)), chain(1)
    node.put(*blocks)
    node.finish_io()
    node.put(*chain(2, start=70))
    node.finish_io()
    for uses in (1, 2):
        lease = node.acquire(*blocks).lease_id
        read = node.read(lease, *blocks)
        promotions = held(node, CopyExtent, CopyReason.PROMOTE)
        assert len(promotions) == (uses == 2)
        node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.OK,)))
        node.release(lease)
    node.finish_io()
    assert tiers(node, space, *blocks) == [(Tier.HOST, Tier.SSD)]


@pytest.mark.parametrize("outcome", [CopyOutcome.TARGET_FAILED, CopyOutcome.SOURCE_FAILED, CopyOutcome.SOURCE_CORRUPT])
def test_a_promotion_that_fails_lists_no_copy_in_memory_and_keeps_no_room(
    ssd_node: Callable, chain: Callable, space, outcome: CopyOutcome
) -> None:
    """A failed transfer between tiers that counts as loaded would serve whatever lay in that memory before."""
    node, (block,), others = ssd_node(2, admission=AdmissionConfig(promote_after_uses=1)), chain(1), chain(2, start=70)
    node.put(block)
    node.finish_io()
    node.put(*others)
    node.finish_io()
    node.state._stock.evict(node.state._stock.index.get(space, others[0].hash), Tier.HOST, "room")
    assert tiers(node, space, block) == [(Tier.SSD,)]
    lease = node.acquire(block).lease_id
    read = node.read(lease, block)
    node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.OK,)))
    assert held(node, CopyExtent, CopyReason.PROMOTE)
    used = node.state.status().tiers[0].used
    node.copied(outcome)
    source_is_good = outcome is CopyOutcome.TARGET_FAILED
    assert tiers(node, space, block) == [(Tier.SSD,) if source_is_good else ()]
    assert node.state.status().tiers[0].used == used - PAGE
    (item,) = node.read(lease, block).items
    assert (item.status, item.extent is not None) == ((ReadStatus.OK, True) if source_is_good else (ReadStatus.IO_ERROR, False))


def test_a_block_that_never_proved_itself_is_not_written_to_the_ssd(ssd_node: Callable, chain: Callable, space) -> None:
    node, (once, twice) = ssd_node(8, admission=AdmissionConfig(demote_after_uses=1)), chain(2)
    node.put(once, twice)
    node.acquire(twice)
    node.finish_io()
    assert tiers(node, space, once, twice) == [(Tier.HOST,), (Tier.HOST, Tier.SSD)]


def test_the_same_tokens_of_another_tenant_are_a_miss_in_every_tier(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(2), chain(2)
    node.put(*blocks)
    node.finish_io()
    node.put(*chain(2, start=70))
    node.finish_io()
    assert tiers(node, space, *blocks) == [(Tier.SSD,)] * 2
    for other in (space._replace(namespace="other"), space._replace(layout=b"M" * 32)):
        assert node.present(*blocks, space=other) == (False, False)
        assert node.acquire(*blocks, space=other).lease_id == 0


# --- stop ------------------------------------------------------------------------------------------------------------------------------


def test_a_delete_after_a_restart_voids_also_the_record_that_a_later_one_had_replaced(ssd_node: Callable, chain: Callable, space) -> None:
    """A crash amidst a relocation leaves both; what the delete forgets would be the newest of its block for the next restart."""
    node, (block, other) = ssd_node(8), chain(2)
    node.put(block, other)
    node.finish_io()
    (old,) = [region for region in node.on_ssd() if region.records]
    records = tuple(record._replace(generation=record.generation + 9) for record in old.records if record.block == block)
    new = old._replace(region=old.region + 1, sequence=old.sequence + 1, records=records)
    node = type(node)(node.state._stock.config, boot=2, recovered=(old, new))
    assert node.present(block, other) == (True, True)
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    voided = set()
    while node.held:
        if node.held[0].reason is RegionWriteReason.ERASE:
            voided.add(node.held[0].region)
        node.written()
    assert voided == {old.region, new.region}
    assert node.present(block, other) == (False, True)


def test_a_graceful_stop_demotes_hottest_first_seals_and_then_says_so(ssd_node: Callable, chain: Callable, space) -> None:
    node, cold, hot = ssd_node(16, demote_above=1.0), chain(2), chain(2, start=70)
    node.put(*hot)
    node.put(*cold)
    node.acquire(*hot)
    node.send(StopRequested(request_id=node.request()))
    assert node.reserve(chain(1, start=99)[0]).grants[0].status is ReserveStatus.NO_ROOM
    node.written()
    order = [copy.checksum for copy in held(node, CopyExtent, CopyReason.DEMOTE)]
    assert order == [int.from_bytes(block.hash[:8], "little") for block in (*hot, *cold)]
    while held(node, CopyExtent, CopyReason.DEMOTE):
        node.copied()
    (footer,) = held(node, WriteRegion, RegionWriteReason.SEAL)
    assert footer.offset + len(footer.data) == 16 * PAGE
    assert not [i for i in node.said if isinstance(i, AnswerStop)]
    assert node.only(node.written(), AnswerStop)


def test_a_stop_without_an_ssd_has_nothing_to_do(host_node: Callable, chain: Callable) -> None:
    node = host_node(4)
    node.put(*chain(2))
    assert node.only(node.send(StopRequested(request_id=node.request())), AnswerStop)


def test_bytes_reported_are_the_bytes_of_the_copies(ssd_node: Callable, chain: Callable) -> None:
    node = ssd_node(8)
    node.put(*chain(3))
    node.finish_io()
    host, ssd = node.state.status().tiers
    assert (host.used, host.copies) == (3 * PAGE, 3)
    assert (ssd.used, ssd.copies) == (3 * 2 * PAGE, 3), "each record has a header of a page"
    assert node.state.status().blocks == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity": Bytes(2 * 64 * PAGE), "region_bytes": Bytes(64 * PAGE)},
        {"region_bytes": Bytes(64 * PAGE + 1)},
        {"demote_above": 1.5},
        {"max_moves": 0},
    ],
)
def test_an_impossible_ssd_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="ssd"):
        SsdConfig(**wrong)
