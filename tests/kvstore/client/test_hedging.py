"""A second request for an answer that is late: when, how often, and that a slow node costs its readers nothing."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing

from kvstore.client import Acknowledge, BlockPut, HedgeConfig
from kvstore.client.hedging import Asked, Hedges
from kvstore.core.placement import place
from kvstore.ids import NodeId
from kvstore.units import Nanos, milliseconds, seconds

NODE = NodeId("s0")
EAGER = HedgeConfig(most_share=1.0, least_answers=5)


def test_an_answer_is_late_after_the_configured_share_of_the_nodes_own_answers() -> None:
    hedges = Hedges(HedgeConfig(percentile=0.9, least_answers=100))
    for number in range(1, 100):
        hedges.answered(NODE, Asked.ACQUIRE, milliseconds(number * 10))
        assert hedges.late_after(NODE, Asked.ACQUIRE) is None
    hedges.answered(NODE, Asked.ACQUIRE, milliseconds(1000))
    assert hedges.late_after(NODE, Asked.ACQUIRE) == milliseconds(910)
    assert hedges.late_after(NODE, Asked.READ) is None
    assert hedges.late_after(NodeId("s1"), Asked.ACQUIRE) is None
    hedges.forget(NODE)
    assert hedges.late_after(NODE, Asked.ACQUIRE) is None


def test_nothing_is_late_before_the_least_wait() -> None:
    hedges = Hedges(HedgeConfig(least_answers=1, least_wait=milliseconds(7)))
    hedges.answered(NODE, Asked.READ, Nanos(1000))
    assert hedges.late_after(NODE, Asked.READ) == milliseconds(7)


def test_second_requests_stay_a_bounded_share_of_the_first_ones() -> None:
    hedges = Hedges(HedgeConfig(most_share=0.05))
    sent = 0
    for _ in range(2000):
        hedges.late_after(NODE, Asked.READ)
        sent += hedges.take()
    assert 95 <= sent <= 100
    off = Hedges(HedgeConfig(most_share=0.0))
    assert off.late_after(NODE, Asked.READ) is None
    assert not off.take()


async def learn(cluster, key_space, chain, payload) -> None:
    """Stores the chain, and reads it until the client knows how fast its nodes are."""
    report = await cluster.client.put(key_space, [BlockPut(ref, payload(ref)) for ref in chain], acknowledge=Acknowledge.ALL)
    assert not report.reasons
    for _ in range(EAGER.least_answers + 1):
        await read(cluster, key_space, chain, payload)


async def read(cluster, key_space, chain, payload) -> set[NodeId]:
    """All of it, compared; who gave it."""
    async with await cluster.client.acquire_prefix(key_space, chain) as lease:
        assert len(lease) == len(chain)
        async with aclosing(cluster.client.read(lease)) as blocks:
            found = [block async for block in blocks]
    assert sorted(block.index for block in found) == list(range(len(chain)))
    assert all(block.payload == payload(chain[block.index]) for block in found)
    return {block.node_id for block in found}


def patient(client_config):
    """A frozen node would cost a minute: whoever gets by without it did not wait for it."""
    minute = seconds(60)
    return dataclasses.replace(
        client_config, rpc_timeout=minute, read_idle_timeout=minute, read_timeout=minute, lease_ttl=seconds(180), hedge=EAGER
    )


def test_a_node_that_answers_late_is_not_waited_for_and_its_lease_is_given_back(
    run, running_cluster, chain_of, payload, key_space, client_config
) -> None:
    async def test() -> None:
        async with running_cluster(config=patient(client_config), lease_ttl_ms=180_000) as cluster:
            chain = chain_of(8)
            await learn(cluster, key_space, chain, payload)
            first, second = place(chain[0].stripe, cluster.views.view, replicas=2)
            cluster[first].fault.frozen = True
            assert await read(cluster, key_space, chain, payload) == {second}
            cluster[first].thaw()
            await cluster[first].all_released()
            await cluster[second].all_released()
            assert cluster.client.held_leases == 0

    run(test())


def test_a_stream_that_stands_still_is_overtaken_by_the_next_replica(
    run, running_cluster, chain_of, payload, key_space, client_config
) -> None:
    async def test() -> None:
        async with running_cluster(config=patient(client_config), lease_ttl_ms=180_000) as cluster:
            chain = chain_of(8)
            await learn(cluster, key_space, chain, payload)
            first, second = place(chain[0].stripe, cluster.views.view, replicas=2)
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                cluster[first].fault.frozen = True
                async with aclosing(cluster.client.read(lease)) as blocks:
                    found = [block async for block in blocks]
                assert sorted(block.index for block in found) == list(range(8))
                assert {block.node_id for block in found} == {second}
                assert all(block.payload == payload(chain[block.index]) for block in found)
                cluster[first].thaw()

    run(test())
