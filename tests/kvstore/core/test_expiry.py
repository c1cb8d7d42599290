from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.events.gets import ReadFinished, ReadOutcome, ReadStatus
from kvstore.core.events.puts import ReserveStatus
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.expiry import MAX_TTL, ExpiryTable
from kvstore.core.index import Entry
from kvstore.core.store_config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.ids import Namespace
from kvstore.units import Nanos, seconds


def test_a_block_whose_time_is_over_is_a_miss_at_once_and_its_room_is_free(host_node: Callable, chain: Callable, space) -> None:
    node, (short, long) = host_node(4), chain(2)
    node.put(short, ttl=seconds(5))
    node.put(long)
    node.now = seconds(5) - 1
    assert node.present(short, long) == (True, True)
    node.now = seconds(5)
    locate = LocateRequested(request_id=node.request(), key_space=space, hashes=(short.hash,))
    assert node.ask(locate, AnswerLocate).places[0].tiers == (), "no tick was needed"
    assert node.acquire(short).lease_id == 0
    assert node.state.status().tiers[0].copies == 1
    assert node.state.status().counters["expired:ttl"] == 1


def test_what_nobody_asks_for_ends_by_the_ticks_alone_so_many_at_a_time(host_node: Callable, chain: Callable) -> None:
    node = host_node(1500)
    node.put(*chain(1400), ttl=seconds(5))
    node.wait(seconds(4))
    assert node.state.status().blocks == 1400
    node.wait(seconds(1))
    left = node.state.status().blocks
    assert 0 < left < 1400, "one tick does not stall the others"
    assert not any(node.present(*chain(1400))), "what waits for its turn is a miss all the same"
    node.wait(seconds(1))
    assert node.state.status().tiers[0].used == 0


def test_a_leased_block_ends_with_its_lease(host_node: Callable, chain: Callable) -> None:
    node, blocks = host_node(2), chain(1)
    node.put(*blocks, ttl=seconds(1))
    lease = node.acquire(*blocks, ttl=seconds(8)).lease_id
    node.wait(seconds(2))
    assert node.present(*blocks) == (False,)
    read = node.read(lease, *blocks)
    assert read.items[0].status is ReadStatus.OK, "the promise of the lease comes first"
    node.send(ReadFinished(operation=read.operation, outcomes=(ReadOutcome.OK,)))
    node.release(lease)
    assert node.put(*blocks, ttl=Nanos(0)), "its return is a new block"
    node.wait(seconds(100))
    assert node.state.status().tiers[0].copies == 1


def test_a_put_that_says_nothing_gets_what_its_namespace_has(host_node: Callable, chain: Callable, space) -> None:
    other = space._replace(namespace=Namespace("other"))
    node = host_node(8, ttls={space.namespace: seconds(3)})
    plain, never, theirs = chain(1), chain(1, start=70), chain(1, space=other)
    node.put(*plain)
    node.put(*never, ttl=Nanos(0))
    node.put(*theirs, space=other)
    node.wait(seconds(3))
    assert (node.present(*plain), node.present(*never), node.present(*theirs, space=other)) == ((False,), (True,), (True,))


def test_a_block_put_again_lives_as_long_as_the_longest_of_its_puts_asked_for(host_node: Callable, chain: Callable) -> None:
    node, (longer, shorter, endless) = host_node(4), chain(3)
    node.put(longer, shorter, endless, ttl=seconds(4))
    assert node.put(longer, ttl=seconds(9)) == [ReserveStatus.EXISTS]
    node.put(shorter, ttl=seconds(1))
    node.put(endless, ttl=Nanos(0))
    node.wait(seconds(3))
    assert node.present(longer, shorter, endless) == (True, True, True)
    node.wait(seconds(3))
    assert node.present(longer, shorter, endless) == (True, False, True)
    node.wait(seconds(3))
    assert node.present(longer, shorter, endless) == (False, False, True)


@pytest.mark.parametrize(("asleep", "found"), [(seconds(30), (True, True)), (seconds(60), (False, True))])
def test_a_restart_keeps_the_end_of_each_block_by_the_time_of_day(
    ssd_node: Callable, chain: Callable, asleep: Nanos, found: tuple[bool, bool]
) -> None:
    node, (short, long) = ssd_node(8), chain(2)
    node.put(short, ttl=seconds(60))
    node.put(long)
    node.finish_io()
    after = node.restart(day_offset=asleep)
    assert after.present(short, long) == found
    after.wait(seconds(31))
    assert after.present(short, long) == (False, True)
    assert after.put(short) != [ReserveStatus.EXISTS]


def test_a_block_that_ends_during_its_demotion_does_not_come_back_as_disk_only(ssd_node: Callable, chain: Callable) -> None:
    node, blocks = ssd_node(4), chain(1)
    node.put(*blocks, ttl=seconds(5))
    node.written()
    node.wait(seconds(5))
    node.copied()
    node.finish_io()
    assert node.present(*blocks) == (False,)
    assert [tier.used for tier in node.state.status().tiers] == [0, 0]


def test_a_listing_for_peers_says_what_is_left(host_node: Callable, chain: Callable) -> None:
    node, (ends, stays) = host_node(4), chain(2)
    node.put(ends, ttl=seconds(10))
    node.put(stays)
    node.wait(seconds(4))
    assert [owned.ttl for _, owned in node.listing()] == [seconds(6), 0]


def test_an_expiry_table_of_blocks_that_come_and_go_stays_small(chain: Callable, space) -> None:
    table = ExpiryTable()
    for block in chain(2000):
        entry = Entry(key_space=space, block=block, length=1, checksum=1, expires_at=seconds(1000))
        entry.listed = True
        table.watch(entry)
        entry.listed = False
        table.forget(entry)
    assert len(table._heap) < 200


@pytest.mark.parametrize("ttl", [0, -1, MAX_TTL + 1])
def test_an_impossible_time_to_live_of_a_namespace_is_refused(ttl: int) -> None:
    with pytest.raises(ConfigError, match="time to live"):
        StoreConfig(ttls={Namespace("a"): Nanos(ttl)})
