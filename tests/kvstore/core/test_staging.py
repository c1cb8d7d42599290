"""A node without a host tier: puts pass through staging and are listed when they are in a tier."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.events.moves import CopyExtent, CopyOutcome, CopyReason
from kvstore.core.events.puts import AnswerCommit, CommitStatus, ReserveStatus
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.events.removals import DeleteRequested
from kvstore.core.extent import Tier
from kvstore.core.store_config import GpuConfig, SsdConfig, StoreConfig, WritePolicy
from kvstore.errors import ConfigError
from kvstore.units import Bytes, seconds

PAGE = 4096


@pytest.fixture
def ssd_alone(ssd_node: Callable) -> Callable:
    return lambda **config: ssd_node(0, staging_capacity=Bytes(4 * PAGE), **config)


@pytest.fixture
def gpu_alone(host_node: Callable) -> Callable:
    """gpu_alone(pages): with a device of so many."""
    return lambda pages: host_node(0, staging_capacity=Bytes(4 * PAGE), gpu=GpuConfig(capacity=Bytes(pages * PAGE)))


def commit(node, *blocks) -> None:
    tokens = [grant.write_token for grant in node.reserve(*blocks).grants]
    node.commit(*tokens)
    node.verified()


def statuses(node) -> list[CommitStatus]:
    return [status for said in node.said if isinstance(said, AnswerCommit) for status in said.statuses]


def tiers(node, space, *blocks) -> list[tuple[Tier, ...]]:
    hashes = tuple(block.hash for block in blocks)
    answer = node.ask(LocateRequested(request_id=node.request(), key_space=space, hashes=hashes), AnswerLocate)
    return [place.tiers for place in answer.places]


def test_a_block_is_listed_and_its_commit_answered_when_it_is_on_the_ssd_and_staging_is_free_again(
    ssd_alone: Callable, chain: Callable, space
) -> None:
    node, blocks = ssd_alone(), chain(4)
    commit(node, *blocks)
    assert node.present(*blocks) == (False,) * 4
    assert node.reserve(blocks[0]).grants[0].status is ReserveStatus.PENDING
    node.finish_io()
    assert statuses(node) == [CommitStatus.DURABLE] * 4
    assert tiers(node, space, *blocks) == [(Tier.SSD,)] * 4
    status = node.state.status()
    assert [usage.tier for usage in status.tiers] == [Tier.SSD]
    assert status.staging is not None
    assert status.staging.used == 0
    assert node.restart().present(*blocks) == (True,) * 4


def test_hits_on_the_ssd_are_not_promoted_to_staging(ssd_alone: Callable, chain: Callable) -> None:
    node, (block,) = ssd_alone(), chain(1)
    commit(node, block)
    node.finish_io()
    for _ in range(4):
        lease = node.acquire(block)
        node.read(lease.lease_id, block)
    assert not node.held


def test_a_put_that_is_deleted_on_its_way_is_not_listed_and_its_record_erased(ssd_alone: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_alone(), chain(1)
    commit(node, block)
    node.written()
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    node.copied()
    assert statuses(node) == [CommitStatus.EXPIRED]
    node.finish_io()
    assert node.present(block) == (False,)
    assert node.restart().present(block) == (False,)


def test_a_commit_that_no_tier_takes_in_time_is_refused_once_and_the_block_may_still_come(ssd_alone: Callable, chain: Callable) -> None:
    node, (block,) = ssd_alone(), chain(1)
    commit(node, block)
    node.written()
    node.wait(seconds(1))
    assert statuses(node) == [CommitStatus.NO_ROOM]
    node.finish_io()
    assert not statuses(node)
    assert node.present(block) == (True,)


def test_a_failed_write_refuses_its_put_and_reservations_while_the_disk_is_left_alone(ssd_alone: Callable, chain: Callable) -> None:
    node, (first, second) = ssd_alone(), chain(2)
    commit(node, first)
    node.written()
    node.copied(CopyOutcome.TARGET_FAILED)
    assert statuses(node) == [CommitStatus.NO_ROOM]
    assert node.reserve(second).grants[0].status is ReserveStatus.NO_ROOM
    node.wait(seconds(11))
    assert node.reserve(second).grants[0].status is ReserveStatus.GRANTED


def test_bytes_that_rot_in_staging_are_refused(ssd_alone: Callable, chain: Callable) -> None:
    node, (block,) = ssd_alone(), chain(1)
    commit(node, block)
    node.written()
    node.copied(CopyOutcome.SOURCE_CORRUPT)
    assert statuses(node) == [CommitStatus.BAD_CHECKSUM]


def test_a_put_is_charged_to_its_namespace_once_while_it_moves(ssd_alone: Callable, chain: Callable, space) -> None:
    node, blocks = ssd_alone(quotas={space.namespace: Bytes(2 * PAGE)}), chain(2)
    commit(node, *blocks)
    node.finish_io()
    assert statuses(node) == [CommitStatus.DURABLE] * 2


def test_a_gpu_alone_evicts_suffixes_first_to_place_a_put(gpu_alone: Callable, chain: Callable, space) -> None:
    node, old, new = gpu_alone(4), chain(4), chain(2, start=100)
    for block in (*old, *new):
        commit(node, block)
        node.copied()
        assert statuses(node) == [CommitStatus.STORED]
    assert tiers(node, space, *old, *new) == [(Tier.GPU,), (Tier.GPU,), (), (), (Tier.GPU,), (Tier.GPU,)]


def test_a_gpu_whose_copies_are_all_leased_refuses_the_put_in_time(gpu_alone: Callable, chain: Callable) -> None:
    node, old, (new,) = gpu_alone(2), chain(2), chain(1, start=100)
    commit(node, *old)
    node.finish_io()
    node.acquire(*old)
    commit(node, new)
    assert not [i for i in node.held if isinstance(i, CopyExtent)]
    node.wait(seconds(1))
    assert statuses(node) == [CommitStatus.NO_ROOM]
    assert node.present(*old) == (True, True)


def test_above_an_ssd_the_device_gets_what_is_leased_often(ssd_alone: Callable, chain: Callable, space) -> None:
    node, (block,) = ssd_alone(gpu=GpuConfig(capacity=Bytes(4 * PAGE))), chain(1)
    commit(node, block)
    node.finish_io()
    while not node.held:
        node.release(node.acquire(block).lease_id)
    (copy,) = node.held
    assert (copy.reason, copy.source.tier, copy.target.tier) == (CopyReason.PROMOTE, Tier.SSD, Tier.GPU)
    node.finish_io()
    assert tiers(node, space, block) == [(Tier.GPU, Tier.SSD)]


def test_what_cannot_be_is_refused_by_the_names_of_its_keys() -> None:
    with pytest.raises(ConfigError, match="host_capacity above 0, gpu_device or ssd_path"):
        StoreConfig(host_capacity=Bytes(0))
    with pytest.raises(ConfigError, match="on_eviction needs a host tier"):
        StoreConfig(host_capacity=Bytes(0), ssd=SsdConfig(write_policy=WritePolicy.ON_EVICTION))
