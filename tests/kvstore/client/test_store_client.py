"""The client against reference stores over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from kvstore.client import Acknowledge, BlockPut, PutOutcome, StoreClient
from kvstore.core.placement import place
from kvstore.core.view import MemberState, View
from kvstore.ids import Epoch
from kvstore.registry import StaticViews
from kvstore.units import milliseconds


async def read_all(client: StoreClient, lease: Any, indices: Any = None) -> dict[int, bytes | None]:
    blocks: dict[int, bytes | None] = {}
    async for block in client.read(lease, indices=indices):
        assert block.index not in blocks, "each block comes exactly once"
        blocks[block.index] = None if block.payload is None else bytes(block.payload)
    return blocks


def puts_of(chain: Any, payload: Callable[..., bytes], size: int = 3000) -> list[BlockPut]:
    return [BlockPut(ref, payload(ref, size)) for ref in chain]


def owners_of(cluster: Any, ref: Any, replicas: int = 2) -> tuple[Any, ...]:
    return tuple(cluster[node_id] for node_id in place(ref.stripe, cluster.views.view, replicas=replicas))


def test_what_was_put_is_read_back_from_every_stripe(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(50)
            report = await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            assert set(report.outcomes) == {PutOutcome.STORED}
            assert not report.reasons
            assert sum(len(store.copies) for store in cluster.stores) == 100
            assert await cluster.client.probe_prefix(key_space, chain) == 50
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                assert len(lease) == 50
                assert lease.payload_bytes == 50 * 3000
                assert await read_all(cluster.client, lease) == {ref.index: payload(ref) for ref in chain}
                assert set(await read_all(cluster.client, lease, indices=[7, 3])) == {3, 7}
            for store in cluster.stores:
                await store.all_released()

    run(test())


def test_blocks_that_are_there_are_not_sent_again(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(8)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            writes = cluster.calls("WritePayloads")
            report = await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            assert set(report.outcomes) == {PutOutcome.EXISTS}
            assert cluster.calls("WritePayloads") == writes

    run(test())


def test_the_same_block_twice_in_one_put_is_sent_once(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            (ref,) = chain_of(1)
            report = await cluster.client.put(key_space, puts_of([ref, ref], payload), acknowledge=Acknowledge.ALL)
            assert report.outcomes == (PutOutcome.STORED, PutOutcome.STORED)

    run(test())


def test_the_lease_covers_exactly_the_run_up_to_the_first_hole(run, running_cluster, chain_of, payload, key_space, until) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            for store in cluster.stores:
                store.copies.pop(chain[19].hash, None)
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                assert len(lease) == 19
                wanted = sorted(ref.hash for ref in chain[:19])
                await until(lambda: sorted(block for store in cluster.stores for block in store.leased) == wanted)

    run(test())


def test_a_miss_at_the_first_replica_falls_over_to_the_second(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            cluster.stores[0].copies.clear()  # came back empty
            assert await cluster.client.probe_prefix(key_space, chain) == 40
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                assert len(lease) == 40
                assert await read_all(cluster.client, lease) == {ref.index: payload(ref) for ref in chain}

    run(test())


def test_an_empty_chain_and_an_unknown_one_give_an_empty_lease(run, running_cluster, chain_of, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            for chain in ((), chain_of(9)):
                async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                    assert not lease
                    assert await read_all(cluster.client, lease) == {}
                assert await cluster.client.probe_prefix(key_space, chain) == 0

    run(test())


@pytest.mark.parametrize("fault", ["kill", "freeze", "stand_still", "corrupt", "short"])
def test_reads_do_not_notice_a_node_that_fails_between_acquire_and_read(
    run, running_cluster, chain_of, payload, key_space, until, impatient_config, fault: str
) -> None:
    async def test() -> None:
        async with running_cluster(config=impatient_config) as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            victim = owners_of(cluster, chain[0])[0]
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                assert len(lease) == 40
                match fault:
                    case "kill":
                        await victim.kill()
                    case "freeze":
                        victim.fault.frozen = True
                    case "stand_still":
                        victim.fault.reads_break_after = 3
                    case "corrupt":
                        victim.fault.corrupt_reads = True
                    case "short":
                        victim.fault.short_reads = True
                assert await read_all(cluster.client, lease) == {ref.index: payload(ref) for ref in chain}
            if fault == "corrupt":
                await until(lambda: chain[0].hash in victim.counts.corrupt_reported)
            victim.fault.frozen = False

    run(test())


def test_a_corrupt_copy_of_every_replica_is_a_miss_and_never_wrong_bytes(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(8)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                for store in cluster.stores:
                    store.fault.corrupt_reads = True
                blocks = [block async for block in cluster.client.read(lease)]
                assert [block.payload for block in blocks] == [None] * 8
                assert {block.reason for block in blocks} == {"bad_checksum"}

    run(test())


def test_a_frozen_node_costs_one_timeout_and_then_nothing(
    run, running_cluster, chain_of, payload, key_space, until, impatient_config
) -> None:
    async def test() -> None:
        async with running_cluster(config=impatient_config) as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            victim = owners_of(cluster, chain[0])[0]
            victim.fault.frozen = True
            asked_of_it = []
            for _ in range(5):
                async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                    assert await read_all(cluster.client, lease) == {ref.index: payload(ref) for ref in chain}
                asked_of_it.append((victim.counts.calls["AcquirePrefix"], victim.counts.calls.get("ReadPayloads", 0)))
            assert asked_of_it == [(1, 0)] * 5
            # It thaws: a probe behind the scenes finds out, and it is asked again.
            victim.fault.frozen = False
            await until(lambda: victim.node_id in cluster.client.usable_stores())
            asked = victim.counts.calls["AcquirePrefix"]
            await (await cluster.client.acquire_prefix(key_space, chain)).release()
            assert victim.counts.calls["AcquirePrefix"] > asked

    run(test())


def test_with_all_stores_down_everything_is_a_miss_with_a_reason(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(20)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            lease = await cluster.client.acquire_prefix(key_space, chain)
            for store in cluster.stores:
                await store.kill()
            assert await read_all(cluster.client, lease) == dict.fromkeys(range(20))
            await lease.release()
            assert await cluster.client.probe_prefix(key_space, chain) == 0
            assert not await cluster.client.acquire_prefix(key_space, chain)
            report = await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ONE)
            assert set(report.outcomes) == {PutOutcome.FAILED}
            assert report.reasons.total() == 40
            assert set(report.reasons) <= {"unreachable", "circuit_open"}
            assert await cluster.client.delete(key_space, chain) == 0

    run(test())


def test_a_view_without_stores_is_no_error(run, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with StoreClient(StaticViews(View(Epoch(0)))) as client:
            chain = chain_of(3)
            assert await client.probe_prefix(key_space, chain) == 0
            assert not await client.acquire_prefix(key_space, chain)
            report = await client.put(key_space, puts_of(chain, payload))
            assert report.outcomes == (PutOutcome.FAILED,) * 3
            assert report.reasons == {"no_replica": 6}

    run(test())


def test_fewer_replicas_than_asked_is_called_degraded(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=1) as cluster:
            chain = chain_of(3)
            for acknowledge in Acknowledge:
                report = await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=acknowledge)
                assert report.outcomes == (PutOutcome.DEGRADED,) * 3
                assert report.reasons == {"no_replica": 3}

    run(test())


def test_a_full_replica_degrades_and_two_full_ones_fail_the_put(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=2) as cluster:
            first, second = chain_of(2)
            cluster.stores[0].fault.no_room = True
            report = await cluster.client.put(key_space, puts_of([first], payload))
            assert (report.outcomes, report.reasons) == ((PutOutcome.DEGRADED,), {"no_room": 1})
            cluster.stores[1].fault.no_room = True
            report = await cluster.client.put(key_space, puts_of([second], payload))
            assert (report.outcomes, report.reasons) == ((PutOutcome.FAILED,), {"no_room": 2})
            # The hole left by a refused item is filled by the next writer.
            cluster.stores[0].fault.no_room = cluster.stores[1].fault.no_room = False
            report = await cluster.client.put(key_space, puts_of([first, second], payload), acknowledge=Acknowledge.ALL)
            assert report.outcomes == (PutOutcome.STORED, PutOutcome.STORED)

    run(test())


def test_put_returns_at_one_and_the_rest_follows_behind_the_answer(run, running_cluster, chain_of, payload, key_space, until) -> None:
    async def test() -> None:
        async with running_cluster(stores=2) as cluster:
            chain = chain_of(4)
            await cluster.client.probe_prefix(key_space, chain)  # introduces the nodes
            slow = cluster.stores[1]
            slow.fault.frozen = True
            buffer = bytearray(payload(chain[0]))
            report = await cluster.client.put(key_space, [BlockPut(chain[0], memoryview(buffer))], acknowledge=Acknowledge.ONE)
            assert report.outcomes == (PutOutcome.STORED,)
            assert not slow.copies
            buffer[:] = bytes(len(buffer))  # the caller reuses its memory
            slow.thaw()
            await until(lambda: chain[0].hash in slow.copies)
            assert slow.copies[chain[0].hash] == payload(chain[0])

    run(test())


def test_close_waits_for_what_goes_on_behind_the_answers(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=2) as cluster:
            chain = chain_of(4)
            slow = cluster.stores[1]
            slow.fault.delay_s = 0.1
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ONE)
            await cluster.client.close()
            assert len(slow.copies) == 4

    run(test())


def test_a_block_another_writer_is_at_work_on_is_waited_for(run, running_cluster, chain_of, payload, key_space, until) -> None:
    async def test() -> None:
        async with running_cluster(stores=1, replicas=1) as cluster:
            (ref,) = chain_of(1)
            (store,) = cluster.stores
            store.reserved[999] = (ref.hash, bytearray())
            put = asyncio.create_task(cluster.client.put(key_space, puts_of([ref], payload)))
            await until(lambda: store.counts.calls.get("Reserve", 0) >= 2)
            del store.reserved[999]
            store.copies[ref.hash] = payload(ref)
            assert (await put).outcomes == (PutOutcome.EXISTS,)

    run(test())


def test_a_writer_that_never_finishes_costs_a_bounded_wait(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=1, replicas=1) as cluster:
            (ref,) = chain_of(1)
            cluster.stores[0].reserved[999] = (ref.hash, bytearray())
            report = await cluster.client.put(key_space, puts_of([ref], payload))
            assert (report.outcomes, report.reasons) == ((PutOutcome.FAILED,), {"pending": 1})

    run(test())


def test_a_lease_is_renewed_until_released(run, running_cluster, chain_of, payload, key_space, until) -> None:
    async def test() -> None:
        async with running_cluster(lease_ttl_ms=300) as cluster:
            chain = chain_of(8)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            lease = await cluster.client.acquire_prefix(key_space, chain)
            await until(lambda: cluster.calls("Renew") >= 4)
            await lease.release()
            await lease.release()
            for store in cluster.stores:
                await store.all_released()
            renewed = cluster.calls("Renew")
            await asyncio.sleep(0.4)
            assert cluster.calls("Renew") <= renewed + 1

    run(test())


def test_a_lease_nobody_releases_is_not_renewed_for_ever(run, running_cluster, chain_of, payload, key_space, until, client_config) -> None:
    async def test() -> None:
        config = dataclasses.replace(client_config, lease_longest_hold=milliseconds(200))
        async with running_cluster(config=config, lease_ttl_ms=60) as cluster:
            chain = chain_of(8)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            lease = await cluster.client.acquire_prefix(key_space, chain)
            assert cluster.client.held_leases == 1
            await until(lambda: cluster.client.held_leases == 0)
            # Whoever comes back to it all the same gets the blocks, under a new lease.
            assert await read_all(cluster.client, lease) == {ref.index: payload(ref) for ref in chain}
            await lease.release()

    run(test())


def test_a_lease_the_node_forgot_is_taken_anew_while_reading(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(16)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                for store in cluster.stores:
                    store.leases.clear()
                assert await read_all(cluster.client, lease) == {ref.index: payload(ref) for ref in chain}
            for store in cluster.stores:
                await store.all_released()

    run(test())


def test_leaving_a_read_early_stops_the_transfers(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                async with aclosing(cluster.client.read(lease)) as blocks:
                    async for _ in blocks:
                        break
            for store in cluster.stores:
                await store.all_released()

    run(test())


def test_a_cancelled_acquire_gives_back_what_it_got(run, running_cluster, chain_of, payload, key_space, until) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            slow = owners_of(cluster, chain[0])[0]
            slow.fault.delay_s = 0.2
            acquire = asyncio.create_task(cluster.client.acquire_prefix(key_space, chain))
            others = [store for store in cluster.stores if store is not slow]
            await until(lambda: any(store.leases for store in others))
            acquire.cancel()
            await asyncio.gather(acquire, return_exceptions=True)
            for store in others:
                await store.all_released()

    run(test())


def test_a_restarted_node_on_another_port_is_found_through_the_view(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=1, replicas=1) as cluster:
            chain = chain_of(4)
            (store,) = cluster.stores
            await cluster.client.put(key_space, puts_of(chain, payload))
            await store.kill()
            assert await cluster.client.probe_prefix(key_space, chain) == 0
            store.address = ""
            await store.restart(empty=False)
            cluster.show()
            assert await cluster.client.probe_prefix(key_space, chain) == 4

    run(test())


def test_another_node_at_a_reused_address_is_not_taken_for_the_old_one(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=1, replicas=1) as cluster:
            (store,) = cluster.stores
            real, store.node_id = store.node_id, "stranger"
            report = await cluster.client.put(key_space, puts_of(chain_of(1), payload))
            assert (report.outcomes, report.reasons) == ((PutOutcome.FAILED,), {"unreachable": 1})
            assert not store.copies
            store.node_id = real

    run(test())


def test_a_draining_node_is_still_read_and_no_longer_written(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=3, replicas=1) as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload))
            leaver = owners_of(cluster, chain[0], replicas=1)[0]
            cluster.show(**{leaver.node_id: MemberState.DRAINING})
            assert await cluster.client.probe_prefix(key_space, chain) == 40
            held = len(leaver.copies)
            report = await cluster.client.put(key_space, puts_of(chain_of(40, seed="b"), payload))
            assert set(report.outcomes) == {PutOutcome.STORED}
            assert len(leaver.copies) == held

    run(test())


def test_the_owners_before_a_join_are_still_asked(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster(stores=3, replicas=1) as cluster:
            newcomer = cluster.stores.pop()
            cluster.show()
            chain = chain_of(80)
            await cluster.client.put(key_space, puts_of(chain, payload))
            cluster.stores.append(newcomer)
            cluster.show()
            assert any(newcomer in owners_of(cluster, ref, replicas=1) for ref in chain)
            assert await cluster.client.probe_prefix(key_space, chain) == 80

    run(test())


def test_delete_forgets_the_blocks_everywhere(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(10)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            assert await cluster.client.delete(key_space, chain[4:]) == 6
            assert await cluster.client.delete(key_space, chain[4:]) == 0
            assert await cluster.client.probe_prefix(key_space, chain) == 4

    run(test())


def test_payloads_larger_than_a_chunk_and_than_a_batch_come_through(run, running_cluster, chain_of, payload, key_space) -> None:
    async def test() -> None:
        async with running_cluster() as cluster:
            chain = chain_of(3)
            size = (1 << 20) * 2 + 17
            puts = puts_of(chain, payload, size)
            assert set((await cluster.client.put(key_space, puts)).outcomes) == {PutOutcome.STORED}
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                assert await read_all(cluster.client, lease) == {ref.index: payload(ref, size) for ref in chain}

    run(test())


def test_a_read_never_asks_for_more_than_its_consumer_leaves_room_for(
    run, running_cluster, chain_of, payload, key_space, client_config
) -> None:
    async def test() -> None:
        config = dataclasses.replace(client_config, batch_bytes=6000, read_ahead_bytes=6000)
        async with running_cluster(config=config) as cluster:
            chain = chain_of(40)
            await cluster.client.put(key_space, puts_of(chain, payload), acknowledge=Acknowledge.ALL)
            async with await cluster.client.acquire_prefix(key_space, chain) as lease:
                blocks = {}
                async for block in cluster.client.read(lease):
                    blocks[block.index] = bytes(block.payload)
                    await asyncio.sleep(0.002)
                    assert sum(store.counts.blocks_asked for store in cluster.stores) <= len(blocks) + 2
                assert blocks == {ref.index: payload(ref) for ref in chain}

    run(test())
