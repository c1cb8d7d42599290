from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.admission import AdmissionConfig
from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.moves import CopyExtent, CopyOutcome, CopyReason
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.events.removals import DeleteRequested, EvictRequested
from kvstore.core.events.stop import StopRequested
from kvstore.core.extent import ALIGNMENT, Tier
from kvstore.core.store_config import GpuConfig
from kvstore.errors import ConfigError
from kvstore.units import Bytes


@pytest.fixture
def gpu_node(host_node: Callable) -> Callable[..., Any]:
    """gpu_node(host pages, gpu pages): promotes what is leased once."""

    def make(pages: int, gpu_pages: int) -> Any:
        gpu = GpuConfig(capacity=Bytes(gpu_pages * ALIGNMENT))
        return host_node(pages, gpu=gpu, admission=AdmissionConfig(promote_after_uses=1))

    return make


def use(node, *blocks) -> None:
    node.release(node.acquire(*blocks).lease_id)
    node.finish_io()


def tiers(node, space, *blocks) -> list[tuple[Tier, ...]]:
    hashes = tuple(block.hash for block in blocks)
    places = node.ask(LocateRequested(request_id=node.request(), key_space=space, hashes=hashes), AnswerLocate).places
    return [place.tiers for place in places]


def used(node) -> dict[Tier, int]:
    return {tier.tier: tier.used // ALIGNMENT for tier in node.state.status().tiers}


def test_a_block_that_is_used_often_enough_gets_a_copy_on_the_gpu(host_node: Callable, chain: Callable, space) -> None:
    node = host_node(8, gpu=GpuConfig(capacity=Bytes(4 * ALIGNMENT)), admission=AdmissionConfig(promote_after_uses=2))
    blocks = chain(2)
    node.put(*blocks)
    use(node, *blocks)
    assert tiers(node, space, *blocks) == [(Tier.HOST,)] * 2
    use(node, *blocks)
    assert tiers(node, space, *blocks) == [(Tier.GPU, Tier.HOST)] * 2
    assert used(node) == {Tier.GPU: 2, Tier.HOST: 2}


def test_a_read_is_served_from_the_host_copy_while_there_is_one_and_then_from_the_gpu(gpu_node: Callable, chain: Callable, space) -> None:
    node, hot = gpu_node(2, 1), chain(1)[0]
    node.put(hot)
    use(node, hot)
    acquired = node.acquire(hot)
    assert acquired.blocks[0].tier is Tier.HOST
    assert node.read(acquired.lease_id, hot).items[0].extent.tier is Tier.HOST
    node = gpu_node(2, 1)
    node.put(hot)
    use(node, hot)
    node.put(*chain(2, start=70))
    assert tiers(node, space, hot) == [(Tier.GPU,)], "a host copy that the device has too goes first"
    acquired = node.acquire(hot)
    assert (acquired.blocks[0].tier, acquired.blocks[0].extent) == (Tier.GPU, None)
    item = node.read(acquired.lease_id, hot).items[0]
    assert (item.status, item.extent.tier) == (ReadStatus.OK, Tier.GPU)


def test_a_gpu_copy_with_a_twin_goes_first_and_costs_nothing(gpu_node: Callable, chain: Callable, space) -> None:
    node, first, second = gpu_node(8, 1), chain(1)[0], chain(1, start=70)[0]
    node.put(first, second)
    use(node, first)
    use(node, second)
    assert tiers(node, space, first, second) == [(Tier.HOST,), (Tier.GPU, Tier.HOST)]


def test_the_last_copy_goes_back_to_the_host_tier_before_the_device_forgets_it(gpu_node: Callable, chain: Callable, space) -> None:
    node, alone, next_one = gpu_node(2, 1), chain(1)[0], chain(1, start=70)[0]
    node.put(alone)
    use(node, alone)
    fillers = chain(2, start=200)
    node.put(*fillers)
    assert tiers(node, space, alone) == [(Tier.GPU,)]
    node.put(next_one)  # at the cost of a filler
    node.send(EvictRequested(request_id=node.request(), key_space=space, hashes=tuple(block.hash for block in fillers)))
    node.release(node.acquire(next_one).lease_id)
    [demotion] = [held for held in node.held if isinstance(held, CopyExtent)]
    assert (demotion.reason, demotion.source.tier, demotion.target.tier) == (CopyReason.DEMOTE, Tier.GPU, Tier.HOST)
    node.finish_io()
    assert tiers(node, space, alone, next_one) == [(Tier.HOST,), (Tier.GPU, Tier.HOST)]


def test_the_last_copy_is_forgotten_when_the_host_tier_cannot_take_it(gpu_node: Callable, chain: Callable, space) -> None:
    node, alone = gpu_node(2, 1), chain(1)[0]
    node.put(alone)
    use(node, alone)
    others = chain(2, start=200)
    node.put(*others)
    assert tiers(node, space, alone) == [(Tier.GPU,)]
    use(node, others[0])
    assert tiers(node, space, alone, others[0]) == [(), (Tier.GPU, Tier.HOST)]


@pytest.mark.parametrize("outcome", [CopyOutcome.TARGET_FAILED, CopyOutcome.SOURCE_CORRUPT])
def test_a_promotion_that_fails_leaves_no_room_taken(gpu_node: Callable, chain: Callable, space, outcome: CopyOutcome) -> None:
    node, block = gpu_node(4, 4), chain(1)[0]
    node.put(block)
    node.release(node.acquire(block).lease_id)
    node.copied(outcome)
    kept = outcome is CopyOutcome.TARGET_FAILED
    assert tiers(node, space, block) == [(Tier.HOST,) if kept else ()]
    assert used(node) == {Tier.GPU: 0, Tier.HOST: int(kept)}


def test_a_block_deleted_during_its_promotion_does_not_come_back(gpu_node: Callable, chain: Callable, space) -> None:
    node, block = gpu_node(4, 4), chain(1)[0]
    node.put(block)
    node.release(node.acquire(block).lease_id)
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    node.finish_io()
    assert node.present(block) == (False,)
    assert used(node) == {Tier.GPU: 0, Tier.HOST: 0}


def test_a_copy_on_the_gpu_does_not_keep_a_block_from_the_ssd(ssd_node: Callable, chain: Callable, space) -> None:
    gpu = GpuConfig(capacity=Bytes(4 * ALIGNMENT))
    node = ssd_node(8, demote_above=1.0, gpu=gpu, admission=AdmissionConfig(promote_after_uses=1))
    block = chain(1)[0]
    node.put(block)
    use(node, block)
    assert tiers(node, space, block) == [(Tier.GPU, Tier.HOST)]
    node.send(StopRequested(request_id=node.request()))
    node.finish_io()
    assert tiers(node, space, block) == [(Tier.GPU, Tier.HOST, Tier.SSD)]


def test_a_gpu_tier_without_room_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu: capacity"):
        GpuConfig(capacity=Bytes(100))
