from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.moves import CopyExtent, CopyReason
from kvstore.core.events.regions import RecoveredRegion, RegionWriteReason, WriteRegion
from kvstore.core.events.removals import AnswerDelete, DeleteRequested
from kvstore.core.extent import Tier
from kvstore.core.manifest import HEADER_BYTES
from kvstore.ids import BlockRef
from kvstore.units import seconds

PAGE = 4096


def delete(node, space, *blocks: BlockRef) -> None:
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=tuple(block.hash for block in blocks)))


def held(node, kind: type, reason: object) -> list:
    return [i for i in node.held if isinstance(i, kind) and i.reason == reason]


def test_a_key_removed_during_its_demotion_does_not_come_back_as_disk_only(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_node(4), chain(1)
    node.put(block)
    node.written()
    (copy,) = held(node, CopyExtent, CopyReason.DEMOTE)
    delete(node, space, block)
    assert node.present(block) == (False,)
    assert not [i for i in node.said if isinstance(i, AnswerDelete)], "the slow write may still leave a record behind"
    node.copied()
    assert node.present(block) == (False,)
    (erase,) = held(node, WriteRegion, RegionWriteReason.ERASE)
    assert erase.offset == copy.target.offset - HEADER_BYTES
    node.finish_io()
    assert node.only(node.said, AnswerDelete).deleted == (True,)
    assert node.state.status().tiers[0].used == 0
    assert node.state.status().tiers[1].used == 0


def test_a_delete_is_answered_when_its_record_is_erased_and_says_so_when_it_could_not_be(
    ssd_node: Callable, chain: Callable, space
) -> None:
    for ok in (True, False):
        node, (block,) = ssd_node(4), chain(1)
        node.put(block)
        node.finish_io()
        delete(node, space, block)
        assert not [i for i in node.said if isinstance(i, AnswerDelete)]
        assert node.only(node.written(ok=ok), AnswerDelete).deleted == (ok,)


def test_a_second_delete_waits_for_the_erasure_that_the_first_began(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_node(4), chain(1)
    node.put(block)
    node.finish_io()
    delete(node, space, block)
    node.reserve(block)
    delete(node, space, block)
    assert not [i for i in node.said if isinstance(i, AnswerDelete)]
    assert len([i for i in node.written() if isinstance(i, AnswerDelete)]) == 2


def test_a_delete_erases_older_records_of_the_block_too(ssd_node: Callable, chain: Callable, space) -> None:
    """An evicted record is still on the medium. Deleting the block put anew must not leave it for the next restart."""
    node, (block, other) = ssd_node(4, region_pages=64), chain(2)
    node.put(other, block)
    node.finish_io()
    node.state._stock.evict(node.state._stock.index.get(space, block.hash), Tier.SSD, "room")
    node.state._stock.evict(node.state._stock.index.get(space, block.hash), Tier.HOST, "room")
    node.put(block)
    node.finish_io()
    delete(node, space, block)
    assert len(held(node, WriteRegion, RegionWriteReason.ERASE)) == 2


def test_a_region_that_a_restart_cannot_read_is_voided_before_it_is_used(ssd_node: Callable, chain: Callable, space) -> None:
    """Else what is deleted meanwhile would be back when the next restart can read it."""
    unreadable = RecoveredRegion(region=2, sequence=0, nonce=b"", sealed=False, records=(), unreadable=True)
    node = ssd_node(8)
    node = type(node)(node.state._stock.config, recovered=(unreadable,))
    regions = node.state._stock.regions
    assert regions.free_regions == 3
    (void,) = held(node, WriteRegion, RegionWriteReason.DROP)
    assert (void.region, void.offset, void.data) == (2, 0, bytes(PAGE))
    node.written(ok=False)
    assert regions.free_regions == 3
    node.wait(seconds(10))
    assert held(node, WriteRegion, RegionWriteReason.DROP), "tried again"
    (block,) = chain(1)
    node.put(block)
    delete(node, space, block)
    assert not [i for i in node.said if isinstance(i, AnswerDelete)], "its record may lie there"
    while regions.unread:
        node.written()
    assert node.only(node.said, AnswerDelete).deleted == (True,)
