"""Readers that are slow, leave early, hold on to what is to be evicted, or have no right to what they ask for."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from kvstore.client import StoreClient
from kvstore.core.events.gets import AnswerRelease, ReleaseRequested
from kvstore.core.extent import Tier
from kvstore.errors import LarderError
from kvstore.ids import LeaseId
from kvstore.node import data_connection
from kvstore.transport import PayloadSlot, PayloadWrite, ReadOutcome, Ticket
from kvstore.units import KIB, MIB, Bytes, Nanos, milliseconds, seconds

TRANSPORTS = ("shm", "ucx", "tcp", "grpc")
TIERS = (Tier.HOST, Tier.SSD, Tier.GPU)
STREAMED = [(kind, tier) for kind in TRANSPORTS for tier in TIERS if (kind, tier) != ("shm", Tier.HOST)]
"""What is mapped is read without the node: a reader's pace is nothing to it, but for the lease, which ends."""


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("tier", TIERS)
def test_what_is_leased_stays_while_other_blocks_push_everything_else_out(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, right: Any, tier_alone: Any
) -> None:
    size = 256 * KIB
    sizes = [size] * 4
    refs = chain(sizes)
    room = {
        Tier.HOST: {"host_capacity": Bytes(3 * MIB)},
        Tier.SSD: {"ssd_capacity": Bytes(5 * MIB), "region_bytes": Bytes(MIB), "staging_capacity": Bytes(3 * MIB)},
        Tier.GPU: {"gpu_capacity": Bytes(3 * MIB), "staging_capacity": Bytes(3 * MIB)},
    }

    async def test() -> None:
        async with serving(kind, **tier_alone[tier] | room[tier]) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                held: list[Any] = []
                async for block in store.client.read(lease, in_place=True):
                    held.append(block)
                    for round_ in range(3):
                        other = [size - 1 - block.index * 8 - round_] * 4
                        await store.put(chain(other), other, when_there_is_room=True)
                assert store.server.status().blocks < 4 + 4 * 3 * 4, "nothing was evicted?"
                for block in held:
                    assert right(block.payload, refs[block.index], size)
                    assert block.still_good()
                again = {block.index: block.payload async for block in store.client.read(lease)}
                assert all(right(again[index], refs[index], size) for index in range(4))

    run(test())


def test_a_block_read_in_place_says_when_its_lease_is_over(run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    sizes = [MIB] * 2
    refs = chain(sizes)

    async def test() -> None:
        async with serving("shm") as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                in_place = [block async for block in store.client.read(lease, in_place=True)]
                copied = [block async for block in store.client.read(lease)]
                assert all(block.payload.readonly for block in in_place)
                assert all(block.still_good() for block in in_place)
            assert not any(block.still_good() for block in in_place)
            assert all(block.still_good() for block in copied), "a copy is its reader's"

    run(test())


class LaterClock:
    """Runs ahead of the node's by what the test says: a process that stood still finds itself there."""

    ahead = Nanos(0)

    def now(self) -> Nanos:
        return Nanos(time.monotonic_ns() + self.ahead)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_mapped_is_not_read_when_the_lease_is_over(
    in_place: bool, run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any, right: Any, tier_alone: Any
) -> None:
    """Nobody asks the node, and the checksums are not compared: the lease alone says whose bytes these are."""
    sizes, others = [MIB] * 2, [MIB - 1] * 2
    refs = chain(sizes)
    config = dataclasses.replace(client_config, transports=("shm",), verify_mapped=False)

    async def test() -> None:
        async with serving("shm", host_capacity=Bytes(2 * MIB), **tier_alone[Tier.HOST]) as store:
            await store.put(refs, sizes)
            clock = LaterClock()
            async with StoreClient(store.views, replicas=1, config=config, clock=clock) as sleeper:
                lease = await sleeper.acquire_prefix(key_space, refs)
                [held] = {copy.held for copy in lease.copies}
                node = store.server.node
                over = ReleaseRequested(request_id=node.next_request_id(), lease_id=held.lease_id, key_space=key_space)
                await node.ask(over, AnswerRelease)
                await store.client.delete(key_space, refs)
                await store.put(chain(others), others)  # where the first ones lay
                assert not any(
                    right(store.server.host.view(copy.arena_offset, MIB), ref, MIB) for copy, ref in zip(lease.copies, refs, strict=True)
                )
                clock.ahead = held.ttl
                assert [block.payload async for block in sleeper.read(lease, in_place=in_place)] == [None] * 2

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_reader_that_leaves_early_leaves_nothing_open(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any, eventually: Any
) -> None:
    sizes = [512 * KIB] * 8
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, **tier_alone[tier]) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                blocks = store.client.read(lease)
                await anext(blocks)
                await blocks.aclose()
            await eventually(lambda: store.server.node.reads == 0 and store.server.status().leases == 0)
            assert await store.read(refs, sizes, tier=tier) == ["ok"] * 8

    run(test())


class SlowReader:
    """Of the blocks of a lease, over and over in one read; takes them one by one when told to."""

    def __init__(self, store: Any, lease: Any, key_space: Any, refs: Any, *, rounds: int, right: Any) -> None:
        held = lease.copies[0].held
        self._memory = [np.empty(copy.payload_bytes, np.uint8).data for copy in lease.copies]
        self._refs, self._right = refs, right
        slots = [PayloadSlot(ref.hash, into) for ref, into in zip(refs, self._memory, strict=True)] * rounds
        self.payloads = store.client._nodes.read(held.node_id, held.lease_id, held.ticket, key_space, slots)
        self.most = len(slots)

    async def take(self) -> bool:
        """False: there is nothing more. What there is is as the oracle says."""
        try:
            payload = await anext(self.payloads)
        except (LarderError, StopAsyncIteration):
            return False
        which = payload.item % len(self._refs)
        if payload.outcome is ReadOutcome.OK:
            assert self._right(self._memory[which], self._refs[which], len(self._memory[which])), "foreign bytes"
        return payload.outcome is ReadOutcome.OK


@pytest.mark.parametrize(("kind", "tier"), STREAMED)
def test_slow_readers_make_nobody_wait_and_the_node_reads_little_ahead_for_them(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any, right: Any, tier_alone: Any
) -> None:
    """What is read ahead and not yet sent is all the memory that a reader takes of the node; the host tier's lies in the arena."""
    sizes = [MIB] * 4
    refs = chain(sizes)
    patient = dataclasses.replace(client_config, read_timeout=seconds(90), read_idle_timeout=seconds(90))

    async def test() -> None:
        async with serving(kind, client_config=patient, read_deadline=seconds(90), **tier_alone[tier]) as store:
            await store.put(refs, sizes)
            reads: list[int] = []
            store.faults.before_read = lambda: reads.append(1)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                slow = [SlowReader(store, lease, key_space, refs, rounds=10, right=right) for _ in range(2)]
                async with aclosing(slow[0].payloads), aclosing(slow[1].payloads):
                    for reader in slow:
                        assert await reader.take()
                    for _ in range(3):
                        assert await store.read(refs, sizes) == ["ok"] * 4
                    assert store.server.node.reads == 2, "the slow ones are still at it"
                    ahead = len(reads)
                    assert ahead <= 2 * 30, "of 2 * 40, and those of the quick one"
                    assert all([await slow[0].take() for _ in range(slow[0].most - 1)])
            assert len(reads) > ahead or tier is Tier.HOST

    run(test())


@pytest.mark.parametrize(("kind", "tier"), [("shm", Tier.SSD), ("ucx", Tier.HOST), ("tcp", Tier.HOST), ("grpc", Tier.HOST)])
def test_a_reader_that_is_too_slow_is_cut_off_and_gets_nothing_of_what_lies_there_then(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, right: Any, eventually: Any, tier_alone: Any
) -> None:
    sizes = [MIB] * 4
    refs = chain(sizes)
    keys = tier_alone[tier] | ({"host_capacity": Bytes(5 * MIB)} if tier is Tier.HOST else {})

    async def test() -> None:
        async with serving(kind, read_deadline=milliseconds(300), **keys) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                slow = SlowReader(store, lease, key_space, refs, rounds=10, right=right)
                assert await slow.take()
                await eventually(lambda: store.server.node.reads == 0)
            other = [MIB - 8] * 4
            async with store.by("grpc") as quick:
                await quick.put(chain(other), other)  # into the room of the first ones, where these lay in memory
            async with aclosing(slow.payloads):
                taken = 1
                while await slow.take():
                    taken += 1
                assert taken < slow.most

    run(test())


@pytest.mark.parametrize(("kind", "tier"), STREAMED)
def test_without_its_own_ticket_nothing_is_read(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any
) -> None:
    """gRPC has none: there the lease itself is looked at."""
    sizes = [20_000] * 2
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, **tier_alone[tier]) as store:
            await store.put(refs, sizes)
            nodes = store.client._nodes
            async with (
                await store.client.acquire_prefix(key_space, refs[:1]) as one,
                await store.client.acquire_prefix(key_space, refs) as two,
            ):
                mine, other = one.copies[0].held, two.copies[0].held
                bent = Ticket(mine.ticket.expires_at, bytes(32))
                for lease_id, ticket, ref in (
                    (mine.lease_id, bent, refs[0]),
                    (mine.lease_id, other.ticket, refs[0]),
                    (other.lease_id, mine.ticket, refs[1]),
                    (mine.lease_id, mine.ticket, refs[1]),
                    (LeaseId(mine.lease_id + 99), mine.ticket, refs[0]),
                ):
                    into = memoryview(bytearray(20_000))
                    outcomes = []
                    try:
                        async for payload in nodes.read("node-a", lease_id, ticket, key_space, [PayloadSlot(ref.hash, into)]):
                            outcomes.append(payload.outcome)
                    except LarderError:
                        assert kind != "grpc"
                    own_lease = kind == "grpc" and (lease_id, ref) in ((mine.lease_id, refs[0]), (other.lease_id, refs[1]))
                    assert set(outcomes) <= {ReadOutcome.OK if own_lease else ReadOutcome.NOT_LEASED}
                    assert bytes(into) == bytes(20_000) or own_lease
            assert await store.read(refs, sizes) == ["ok"] * 2

    run(test())


@pytest.mark.parametrize("kind", ["ucx", "tcp", "grpc"])
def test_without_its_own_ticket_nothing_is_written(kind: str, run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    """What is written in place over shared memory is told by its reservation alone; what isolation that gives is in ARCHITECTURE.md."""
    sizes = [20_000] * 3
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind) as store:
            await store.put(refs[:1], sizes[:1])
            nodes = store.client._nodes
            reserved = [(ref, Bytes(20_000)) for ref in refs[1:]]
            mine, other = await nodes.call("node-a", lambda stub: stub.reserve(key_space, reserved, timeout=seconds(20)))
            for token, ticket, size in (
                (mine.write_token, Ticket.from_bytes(other.ticket), 20_000),
                (mine.write_token, Ticket(Ticket.from_bytes(mine.ticket).expires_at, bytes(32)), 20_000),
                (mine.write_token, Ticket.from_bytes(mine.ticket), 20_001),
                (mine.write_token + 99, Ticket.from_bytes(mine.ticket), 20_000),
            ):
                if kind == "grpc" and token == mine.write_token and size == 20_000:
                    continue  # none is shown there
                try:
                    assert await nodes.write("node-a", [PayloadWrite(token, b"x" * size, ticket)]) == {token}
                except LarderError:
                    assert kind != "grpc"
            assert store.server.node.incoming.received_bytes(mine.write_token) == 0
            assert bytes(store.server.host.view(mine.arena_offset, 20_000)) == bytes(20_000)
            assert await store.read(refs[:1], sizes[:1]) == ["ok"]

    run(test())


@pytest.mark.parametrize("kind", ["ucx", "tcp", "grpc"])
def test_many_short_transfers_take_few_connections(kind: str, run: Any, serving: Any, chain: Any) -> None:
    """Each of its own would leave its port behind for a minute, and there are 28,000."""
    refs = chain([1000] * 4)

    async def test() -> None:
        async with serving(kind, wire=True, ssd_path=None) as store:
            await store.put(refs, [1000] * 4)
            for _ in range(25):
                await asyncio.gather(*[store.read(refs[:1], [1000]) for _ in range(4)])
            assert store.proxy.connections <= 8, "the control line, those kept for transfers, and one that only looked"

    run(test())


def test_a_connection_that_the_node_closed_while_it_was_idle_is_not_used_again(
    run: Any, serving: Any, chain: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read after a long pause is as good as any."""
    monkeypatch.setattr(data_connection, "NEXT_REQUEST", milliseconds(200))
    refs = chain([1000] * 2)

    async def test() -> None:
        async with serving("tcp", ssd_path=None) as store:
            for _ in range(2):
                await store.put(refs, [1000] * 2)
                assert await store.read(refs, [1000] * 2) == ["ok"] * 2
                await eventually(lambda: store.server.status().data_connections["tcp"] == 0)

    run(test())


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_herd_of_clients_that_connect_at_once_is_served(kind: str, run: Any, serving: Any, chain: Any, tier_alone: Any) -> None:
    """What gRPC does with one is in tests/kvstore/node; UCX is begun over the TCP door."""
    refs = chain([1000] * 2)

    async def test() -> None:
        async with serving(kind, **tier_alone[Tier.SSD]) as store:
            await store.put(refs, [1000] * 2)

            async def come() -> None:
                async with store.by(kind) as one:
                    assert await one.read(refs, [1000] * 2) == ["ok"] * 2
                    assert await one.uses() == kind

            await asyncio.gather(*[come() for _ in range(40)])

    run(test())
