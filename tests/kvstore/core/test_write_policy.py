from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvstore.core.admission import AdmissionConfig
from kvstore.core.events.moves import CopyExtent, CopyOutcome
from kvstore.core.events.puts import AnswerCommit, CommitStatus, ReserveStatus
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.events.regions import WriteRegion
from kvstore.core.events.removals import DeleteRequested
from kvstore.core.events.stop import AnswerStop, StopRequested
from kvstore.core.extent import Tier
from kvstore.core.policies import PolicyName
from kvstore.core.store_config import WritePolicy
from kvstore.units import milliseconds, seconds

PAGE = 4096
THROUGH, ON_EVICTION = WritePolicy.WRITE_THROUGH, WritePolicy.ON_EVICTION


def tiers(node, space, *blocks) -> list[tuple[Tier, ...]]:
    hashes = tuple(block.hash for block in blocks)
    answer = node.ask(LocateRequested(request_id=node.request(), key_space=space, hashes=hashes), AnswerLocate)
    return [place.tiers for place in answer.places]


def commit(node, *blocks) -> None:
    """Puts, as far as the verification: what follows is the disk's."""
    tokens = [grant.write_token for grant in node.reserve(*blocks).grants]
    node.commit(*tokens)
    node.verified()


def statuses(node) -> list[CommitStatus]:
    return [status for said in node.said if isinstance(said, AnswerCommit) for status in said.statuses]


# --- write_through ----------------------------------------------------------------------------------------------------------------------


def test_write_through_answers_a_commit_when_the_last_of_its_blocks_is_on_the_ssd(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(8, write_policy=THROUGH, demote_above=0.9), chain(2)
    commit(node, *blocks)
    node.written()
    node.copied()
    assert node.present(*blocks) == (True, True), "readable from the verification on"
    assert not statuses(node)
    node.copied()
    assert statuses(node) == [CommitStatus.DURABLE] * 2
    assert tiers(node, space, *blocks) == [(Tier.HOST, Tier.SSD)] * 2
    assert node.restart().present(*blocks) == (True, True)


def test_write_through_calls_what_the_disk_did_not_take_stored_and_not_durable(ssd_node: Callable, chain: Callable) -> None:
    node, (failing, late) = ssd_node(8, write_policy=THROUGH), chain(2)
    commit(node, failing)
    node.written()
    node.copied(CopyOutcome.TARGET_FAILED)
    assert statuses(node) == [CommitStatus.STORED]
    commit(node, late)
    assert statuses(node) == [CommitStatus.STORED], "the disk is left alone for a while: no commit waits for that"


def test_a_write_through_waits_for_a_hung_disk_so_long_and_no_longer(ssd_node: Callable, chain: Callable) -> None:
    node, blocks = ssd_node(8, write_policy=THROUGH), chain(2)
    commit(node, *blocks)
    node.wait(milliseconds(900))
    assert not statuses(node)
    node.wait(milliseconds(100))
    assert statuses(node) == [CommitStatus.STORED] * 2
    node.finish_io()
    assert not statuses(node), "once and not twice"


def test_a_delete_ends_the_wait_of_the_commit(ssd_node: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_node(8, write_policy=THROUGH), chain(1)
    commit(node, block)
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    assert statuses(node) == [CommitStatus.STORED]


def test_what_fits_no_region_is_not_waited_for(ssd_node: Callable, chain: Callable) -> None:
    node = ssd_node(64, write_policy=THROUGH)
    assert node.put(chain(1)[0], size=15 * PAGE) == [CommitStatus.STORED]


# --- on_eviction ------------------------------------------------------------------------------------------------------------------------


def test_on_eviction_writes_nothing_while_there_is_room_and_the_coldest_when_it_gets_short(
    ssd_node: Callable, chain: Callable, space
) -> None:
    node, old, used = ssd_node(32, write_policy=ON_EVICTION), chain(4), chain(4, start=70)
    node.put(*used, *old)
    node.release(node.acquire(*used).lease_id)
    node.put(*chain(22, start=200))
    node.wait(seconds(1))
    assert not node.held, "30 of 32 pages: a sixteenth is free"
    node.put(*chain(2, start=500))
    node.finish_io()
    assert tiers(node, space, *old) == [(Tier.HOST,)] * 2 + [(Tier.HOST, Tier.SSD)] * 2
    assert tiers(node, space, *used) == [(Tier.HOST,)] * 4, "what is hot is not written"


def test_on_eviction_loses_no_block_to_puts_that_the_disk_can_follow(ssd_node: Callable, chain: Callable, space) -> None:
    node = ssd_node(16, regions=8, region_pages=64, write_policy=ON_EVICTION)
    blocks = chain(60)
    for block in blocks:
        assert node.put(block) == [CommitStatus.STORED]
        node.finish_io()
    assert all(node.present(*blocks))
    assert "evicted:room" not in node.state.status().counters
    assert "evicted:room_out_of_order" not in node.state.status().counters


def test_on_eviction_a_deleted_block_was_never_written(ssd_node: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_node(16, write_policy=ON_EVICTION), chain(15)
    for block in blocks:
        node.put(block)
        node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    assert not node.held


def test_on_eviction_demotes_no_more_at_a_time_than_elsewhere(ssd_node: Callable, chain: Callable) -> None:
    node = ssd_node(64, regions=4, region_pages=256, write_policy=ON_EVICTION)
    node.put(*chain(40))
    node.put(chain(1, start=500)[0], size=16 * PAGE)
    node.put(*chain(8, start=900))
    node.written()
    assert len([i for i in node.held if isinstance(i, CopyExtent)]) == 8


def test_on_eviction_two_blocks_that_are_the_coldest_of_both_tiers_do_not_push_each_other_off_the_ssd_for_ever(
    ssd_node: Callable, chain: Callable
) -> None:
    """Found by a simulated cluster: each was written as the coldest of the host tier and then went as the coldest of the SSD."""
    rng, blocks = Random(12), []
    admission = AdmissionConfig(promote_after_uses=1)
    node = ssd_node(24, write_policy=ON_EVICTION, min_dead_share=0.1, policy=PolicyName.ADAPTIVE, admission=admission)
    for number in range(45):
        for _ in range(3 if number > 12 else 0):
            node.release(node.acquire(*rng.choice(blocks)).lease_id)
        blocks.append(chain(1, start=1000 * number))
        node.put(*blocks[-1], size=rng.choice((1, 2, 3)) * PAGE)
        node.finish_io()


# --- a graceful stop --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_stop_saves_what_is_in_the_host_tier_alone_and_says_how_much(ssd_node: Callable, chain: Callable, policy: WritePolicy) -> None:
    node, blocks = ssd_node(32, write_policy=policy, demote_above=1.0), chain(5)
    commit(node, *blocks)
    node.send(StopRequested(request_id=node.request(), within=seconds(8)))
    node.finish_io()
    answer = node.only(node.said, AnswerStop)
    assert answer.report == (5, 5 * PAGE, 0, 0)
    assert node.restart().present(*blocks) == (True,) * 5


def test_a_stop_whose_time_is_over_leaves_whole_prefixes_of_the_hottest_chains_and_says_what_it_left(
    ssd_node: Callable, chain: Callable
) -> None:
    node = ssd_node(64, regions=4, region_pages=256, demote_above=1.0)
    cold, hot = chain(12), chain(30, start=500)
    node.put(*hot)
    node.put(*cold)
    node.release(node.acquire(hot[20]).lease_id)
    node.send(StopRequested(request_id=node.request(), within=seconds(8)))
    node.written()
    for _ in range(10):
        node.copied()
    node.wait(seconds(7))
    assert len([i for i in node.held if isinstance(i, CopyExtent)]) == 32, "nothing new is begun when an eighth of the time is left"
    node.finish_io()
    answer = node.only(node.said, AnswerStop)
    assert (answer.report.kept_blocks, answer.report.left_blocks) == (42, 0)
    assert not [i for i in node.held if isinstance(i, WriteRegion)]


def test_a_stop_with_no_time_left_begins_nothing_and_answers(ssd_node: Callable, chain: Callable) -> None:
    node, blocks = ssd_node(64, regions=4, region_pages=256, demote_above=1.0), chain(40)
    node.put(*blocks)
    hot = node.acquire(*blocks[:3])
    node.release(hot.lease_id)
    node.send(StopRequested(request_id=node.request(), within=seconds(8)))
    node.wait(seconds(7))
    node.written()
    node.finish_io()
    report = node.only(node.said, AnswerStop).report
    assert (report.kept_blocks, report.left_blocks) == (0, 40)
    assert node.reserve(chain(1, start=900)[0]).grants[0].status is ReserveStatus.NO_ROOM
