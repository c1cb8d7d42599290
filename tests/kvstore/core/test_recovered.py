from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import ReserveStatus
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.events.regions import RecoveredRegion, RegionsRecovered
from kvstore.core.extent import Tier
from kvstore.ids import BlockRef


def tiers(node, space, *blocks: BlockRef) -> list[tuple[Tier, ...]]:
    hashes = tuple(block.hash for block in blocks)
    answer = node.ask(LocateRequested(request_id=node.request(), key_space=space, hashes=hashes), AnswerLocate)
    return [place.tiers for place in answer.places]


def records_of(node) -> tuple[RecoveredRegion, ...]:
    found = []
    for region in node.state._stock.regions:
        if region.header is not None:
            records = tuple(node.state._stock.regions.footer_records(region))
            found.append(RecoveredRegion(region.number, region.header.sequence, region.header.nonce, True, records))
    return tuple(found)


def test_a_restart_lists_what_is_on_the_ssd_and_its_records_do_not_collide_with_new_ones(
    ssd_node: Callable, chain: Callable, space
) -> None:
    before, blocks = ssd_node(8), chain(6)
    before.put(*blocks)
    before.finish_io()
    after = ssd_node(8, boot=2)
    after = type(after)(after.state._stock.config, boot=2)
    # A driver hands in an empty disk by itself; this one gets the records.
    fresh = type(after.state)(after.state._stock.config, boot_id=b"2" * 16)
    after.state, after.held = fresh, []
    after.send(RegionsRecovered(regions=records_of(before)))
    assert after.present(*blocks) == (True,) * 6
    assert tiers(after, space, *blocks) == [(Tier.SSD,)] * 6
    assert all(item.status is ReadStatus.OK for item in after.read(after.acquire(*blocks).lease_id, *blocks).items)
    assert after.put(blocks[0]) == [ReserveStatus.EXISTS]
    highest = max(record.generation for region in records_of(before) for record in region.records)
    after.put(*chain(1, start=70))
    after.finish_io()
    assert after.state._stock.index.get(space, chain(1, start=70)[0].hash).ssd.generation > highest
