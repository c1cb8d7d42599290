from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.events.puts import ReserveStatus
from kvstore.core.events.removals import AnswerDelete, AnswerEvict, DeleteRequested, EvictRequested
from kvstore.core.events.wishes import AnswerPin, AnswerUnpin, PinKind, PinRequested, PinStatus, UnpinRequested
from kvstore.core.extent import Tier
from kvstore.core.index import Entry
from kvstore.core.pins import MAX_PIN_TTL, Pin, PinTable
from kvstore.units import Nanos, seconds

PAGE = 4096
SOFT, HARD = PinKind.SOFT, PinKind.HARD


def pin(node, space, *blocks, kind: PinKind, ttl: Nanos = seconds(1000)) -> list[PinStatus]:
    hashes = tuple(block.hash for block in blocks)
    return list(node.ask(PinRequested(request_id=node.request(), key_space=space, hashes=hashes, kind=kind, ttl=ttl), AnswerPin).statuses)


def unpin(node, space, *blocks) -> tuple[bool, ...]:
    hashes = tuple(block.hash for block in blocks)
    return node.ask(UnpinRequested(request_id=node.request(), key_space=space, hashes=hashes), AnswerUnpin).unpinned


def test_a_hard_pin_outlasts_any_pressure_and_an_operator_who_evicts_everything(host_node: Callable, chain: Callable, space) -> None:
    node, kept = host_node(8), chain(4)
    node.put(*kept)
    assert pin(node, space, *kept, kind=HARD) == [PinStatus.PINNED] * 4
    node.put(*chain(30, start=100))
    answer = node.ask(EvictRequested(request_id=node.request(), everything=True), AnswerEvict)
    assert node.present(*kept) == (True,) * 4
    assert answer.leased_copies_kept == 4


def test_a_hard_pin_does_not_outlast_a_delete_of_the_block_or_its_own_time(host_node: Callable, chain: Callable, space) -> None:
    node, (deleted, other) = host_node(4), chain(2)
    node.put(deleted, other)
    pin(node, space, deleted, other, kind=HARD, ttl=seconds(5))
    gone = DeleteRequested(request_id=node.request(), key_space=space, hashes=(deleted.hash,))
    assert node.ask(gone, AnswerDelete).deleted == (True,)
    assert node.state._stock.pins.hard_bytes == PAGE
    node.wait(seconds(5))
    assert node.state._stock.pins.hard_bytes == 0
    node.put(*chain(4, start=100))
    assert node.present(other) == (False,)


def test_hard_pins_have_a_share_of_the_tier_and_no_more(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(8), chain(8)
    node.put(*blocks)
    assert pin(node, space, *blocks[:6], kind=HARD) == [PinStatus.PINNED] * 4 + [PinStatus.NO_SHARE] * 2
    assert pin(node, space, blocks[0], kind=HARD) == [PinStatus.PINNED], "one that is pinned takes no more"
    assert pin(node, space, blocks[5], chain(1, start=900)[0], kind=SOFT) == [PinStatus.PINNED, PinStatus.ABSENT]
    assert unpin(node, space, blocks[0], blocks[7]) == (True, False)
    assert pin(node, space, blocks[4], kind=HARD) == [PinStatus.PINNED]
    assert node.put(*chain(4, start=100))[-1] is not ReserveStatus.NO_ROOM, "puts go on"


def test_a_soft_pin_is_broken_when_nothing_else_can_go_and_not_before(host_node: Callable, chain: Callable, space) -> None:
    node, soft = host_node(8), chain(4)
    node.put(*soft)
    assert pin(node, space, *soft, kind=SOFT) == [PinStatus.PINNED] * 4
    for start in (100, 200, 300):
        node.put(*chain(4, start=start))
    assert node.present(*soft) == (True,) * 4
    assert all(node.acquire(*chain(4, start=300)).blocks)
    assert node.put(chain(1, start=900)[0]) != [ReserveStatus.NO_ROOM]
    assert node.present(*soft) == (True, True, True, False), "suffixes first"
    assert node.state.status().counters["evicted:room_of_soft_pin"] == 1


def test_a_pinned_block_stays_on_the_ssd_and_may_leave_the_host_tier(ssd_node: Callable, chain: Callable, space) -> None:
    node, kept = ssd_node(4, regions=4, region_pages=16), chain(3)
    node.put(*kept)
    node.finish_io()
    assert pin(node, space, *kept, kind=HARD) == [PinStatus.PINNED] * 3
    for start in range(100, 4000, 40):
        node.put(chain(1, start=start)[0])
        node.finish_io()
    assert node.present(*kept) == (True,) * 3
    assert {tuple(owned.tiers) for _, owned in node.listing() if owned.block in kept} == {(Tier.SSD,)}


def test_pins_come_back_after_a_restart_for_blocks_that_are_found_again(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(8), chain(3)
    node.put(*blocks)
    node.finish_io()
    pin(node, space, *blocks[:2], kind=HARD, ttl=seconds(50))
    pin(node, space, blocks[2], kind=SOFT, ttl=seconds(5))
    saved = node.state.pins()
    after = node.restart(day_offset=seconds(10))
    after.state.restore_pins(saved, after.now)
    assert {(pinned.hash, pinned.kind) for pinned in after.state.pins()} == {(block.hash, HARD) for block in blocks[:2]}
    after.wait(seconds(40))
    assert not after.state.pins()


def test_no_pin_is_longer_than_a_year(host_node: Callable, chain: Callable, space) -> None:
    node, blocks = host_node(4), chain(1)
    node.put(*blocks)
    pin(node, space, *blocks, kind=SOFT, ttl=Nanos(10 * MAX_PIN_TTL))
    assert node.state.pins()[0].expires_at == MAX_PIN_TTL


@pytest.mark.parametrize("renewals", [1, 500])
def test_a_pin_that_is_renewed_ends_at_its_last_end_and_leaves_nothing_behind(chain: Callable, space, renewals: int) -> None:
    table, entry = PinTable(), Entry(key_space=space, block=chain(1)[0], length=7, checksum=1)
    for number in range(renewals + 1):
        table.pin(entry, Pin(HARD if number % 2 else SOFT, Nanos(100 + number)))
    assert len(table._expiries) < 70
    assert table.expire(Nanos(99 + renewals), at_most=1000) == []
    assert table.expire(Nanos(100 + renewals), at_most=1000) == [entry]
    assert (len(table), table.hard_bytes) == (0, 0)
