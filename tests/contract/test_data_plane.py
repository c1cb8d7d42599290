"""One contract for every transport: the right bytes or a reason, from every tier, at every size, whatever the wire does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kvstore.client.read
from kvstore.client import BlockPut, PayloadMaker, PutOutcome, StoreClient
from kvstore.client.prefix_lease import HeldState
from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.puts import CommitStatus
from kvstore.core.extent import Tier
from kvstore.errors import CodecFailure
from kvstore.node.config import ShmAccess
from kvstore.transport import PayloadWrite, Ticket, stream_pool
from kvstore.transport.stream_transport import StreamTransport
from kvstore.transport.ucx_worker import ucx_obstacle
from kvstore.units import KIB, MIB, Bytes, Nanos, seconds

TRANSPORTS = ("shm", "ucx", "tcp", "grpc")
TIERS = (Tier.HOST, Tier.SSD, Tier.GPU)
SIZES = (1, 7, 4095, 4096, 4097, 64 * KIB, 368 * KIB, MIB, MIB + 1)


@pytest.mark.parametrize("kind", [*TRANSPORTS, "ucx-shm"])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_every_size_comes_back_as_it_was_put(kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    refs = chain(SIZES)

    async def test() -> None:
        async with serving(kind) as store:
            await store.put(refs, SIZES)
            assert await store.uses() == kind.partition("-")[0]
            if tier is Tier.HOST:
                assert await store.read(refs, SIZES) == ["ok"] * len(SIZES)
                assert await store.read(refs, SIZES, in_place=True) == ["ok"] * len(SIZES)
        if tier is Tier.SSD:
            async with serving(kind) as store:  # a stop saves everything on the SSD; a start begins with an empty host tier
                assert await store.read(refs, SIZES, tier=Tier.SSD) == ["ok"] * len(SIZES)
                assert await store.uses() == kind.partition("-")[0]

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.SSD])
def test_without_a_host_tier_every_size_comes_back_from_the_tier_that_there_is(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any
) -> None:
    refs = chain(SIZES)

    async def test() -> None:
        async with serving(kind, **tier_alone[tier]) as store:
            await store.put(refs, SIZES)
            assert await store.uses() == kind
            assert await store.read(refs, SIZES, in_place=True, tier=tier) == ["ok"] * len(SIZES)

    run(test())


@pytest.mark.parametrize("tier", TIERS)
def test_a_payload_of_64_mib_passes_by_every_transport(
    tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any, client_config: Any, eventually: Any
) -> None:
    """One node for all of them: only what is asked of it differs."""
    sizes = [64 * MIB]
    refs = chain(sizes)
    room = Bytes(72 * MIB)
    minute = seconds(60)
    patient = dataclasses.replace(
        client_config, rpc_timeout=minute, read_idle_timeout=minute, write_timeout=minute, put_timeout=minute, lease_ttl=Nanos(3 * minute)
    )
    keys = {
        Tier.HOST: {"host_capacity": room},
        Tier.SSD: {"staging_capacity": room, "region_bytes": room, "ssd_capacity": Bytes(4 * room)},
        Tier.GPU: {"staging_capacity": room, "gpu_capacity": room},
    }

    async def test() -> None:
        async with serving("grpc", **tier_alone[tier] | keys[tier]) as store:
            for kind in TRANSPORTS:
                if kind == "ucx" and ucx_obstacle() is not None:
                    continue
                async with store.by(kind, client_config=patient) as other:
                    await other.put(refs, sizes)
                    assert await other.uses() == kind
                    assert await other.read(refs, sizes, in_place=True, tier=tier) == ["ok"]
                    await eventually(lambda: store.server.status().leases == 0)
                    await other.client.delete(key_space, refs)
                    await eventually(lambda: not any(tier.used_bytes for tier in store.server.status().tiers))

    run(test())


FAULTS = ("short_reads", "failing_reads", "flipped_reads")


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("tier", [Tier.SSD, Tier.GPU])
def test_a_medium_that_lies_is_a_miss_and_never_wrong_bytes(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, tier_alone: Any
) -> None:
    """The host tier is memory that is mapped: what can be wrong there is in test_wire.py."""
    sizes = [50_000 + number for number in range(9)]
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, **tier_alone[tier]) as store:
            await store.put(refs, sizes)
            if tier is Tier.GPU:
                await lies(store)
        if tier is Tier.SSD:
            async with serving(kind) as store:  # under a host tier, that a start begins without
                await lies(store)

    async def lies(store: Any) -> None:
        for number, fault in enumerate(FAULTS):
            three = slice(number * 3, number * 3 + 3)
            setattr(store.faults, fault, 1)
            reasons = await store.read(refs[three], sizes[three])
            assert sorted(reason == "ok" for reason in reasons) == [False, True, True], (fault, reasons)
            assert getattr(store.faults, fault) == 0

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_block_that_no_node_could_take_fails_alone(kind: str, run: Any, serving: Any, chain: Any, oracle: Any, key_space: Any) -> None:
    sizes = [1000, 3 * MIB, 0, 2000]
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, host_capacity=Bytes(2 * MIB), ssd_path=None) as store:
            puts = [BlockPut(ref, oracle(ref, size)) for ref, size in zip(refs, sizes, strict=True)]
            report = await store.client.put(key_space, puts)
            assert report.outcomes == (PutOutcome.STORED, PutOutcome.FAILED, PutOutcome.FAILED, PutOutcome.STORED)
            assert report.reasons == {"too_large": 1, "empty": 1}

    run(test())


def test_a_lease_is_renewed_and_given_back_also_when_its_control_line_is_gone(
    run: Any, serving: Any, chain: Any, key_space: Any, eventually: Any
) -> None:
    async def test() -> None:
        async with serving("shm") as store:
            refs = chain([1000] * 3)
            await store.put(refs, [1000] * 3)
            lease = await store.client.acquire_prefix(key_space, refs, ttl=seconds(3))
            (held,) = {copy.held for copy in lease.copies}
            stub = store.client._nodes.stub_now(held.node_id)
            stub.close()
            first_end = held.expires_at
            await eventually(lambda: held.expires_at > first_end)
            assert held.state is HeldState.HELD
            await lease.release()
            await eventually(lambda: store.server.status().leases == 0)
            assert "lease_expired:time" not in store.server.status().counters, "it was given back, and did not just run out"

    run(test())


def _only_over_connections_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a read that took a task")

    monkeypatch.setattr(StreamTransport, "read", refused)


def test_a_read_over_a_connection_at_hand_that_is_cut_or_left_costs_that_read_alone(
    run: Any, serving: Any, chain: Any, key_space: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving("tcp", wire=True) as store:
            await store.put(refs, sizes)
            assert await store.read(refs, sizes) == ["ok"] * 4
            with monkeypatch.context() as patch:
                _only_over_connections_at_hand(patch)
                assert await store.read(refs, sizes) == ["ok"] * 4
                async with await store.client.acquire_prefix(key_space, refs) as lease:
                    blocks = store.client.read(lease)
                    assert (await anext(blocks)).payload is not None
                    await blocks.aclose()
            await eventually(lambda: store.server.node.reads == 0)
            assert await store.read(refs, sizes) == ["ok"] * 4
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                with monkeypatch.context() as patch:
                    _only_over_connections_at_hand(patch)
                    store.proxy.cut_after = 0
                    assert [block.reason async for block in store.client.read(lease)] == ["unreachable"] * 4
                store.proxy.heal()
            assert await store.read(refs, sizes) == ["ok"] * 4

    run(test())


@pytest.mark.parametrize("at_hand", [False, True])
def test_a_bug_behind_a_payload_reaches_its_reader(
    at_hand: bool, run: Any, serving: Any, chain: Any, key_space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trips(payload: memoryview) -> int:
        raise ZeroDivisionError

    async def test() -> None:
        async with serving("tcp") as store:
            refs = chain([1000] * 2)
            await store.put(refs, [1000] * 2)
            assert await store.read(refs, [1000] * 2) == ["ok"] * 2
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                with monkeypatch.context() as patch:
                    patch.setattr(kvstore.client.read, "payload_checksum", trips)
                    if at_hand:
                        _only_over_connections_at_hand(patch)
                    else:
                        patch.setattr(StreamTransport, "read_now", lambda *_, **__: None)
                    with pytest.raises((ZeroDivisionError, ExceptionGroup)):
                        async for _ in store.client.read(lease):
                            pass
            assert await store.read(refs, [1000] * 2) == ["ok"] * 2

    run(test())


@pytest.mark.parametrize("access", ["off", "read", "read_write"])
def test_an_operator_decides_on_shared_memory(access: str, run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any) -> None:
    sizes = [MIB] * 3
    refs = chain(sizes)

    async def test() -> None:
        async with serving("grpc", shm=ShmAccess(access), ucx=False) as store:
            async with StoreClient(store.views, replicas=1, config=client_config) as client:
                store.client, other = client, store.client
                await store.put(refs, sizes)
                assert await store.read(refs, sizes) == ["ok"] * 3
                assert await store.uses() == ("tcp" if access == "off" else "shm")
                store.client = other

    run(test())


def test_a_writer_whose_reservation_is_over_writes_nothing(run: Any, serving: Any, chain: Any, key_space: Any, eventually: Any) -> None:
    """Its time is looked at before each payload, so the extent may be another's already."""
    sizes = [MIB]
    refs = chain(sizes)

    async def test() -> None:
        async with serving("shm", reservation_ttl=seconds(1)) as store:
            await store.put(chain([10]), [10])  # chooses the transport
            nodes = store.client._nodes
            [grant] = await nodes.call("node-a", lambda stub: stub.reserve(key_space, [(refs[0], Bytes(MIB))], timeout=seconds(5)))
            late = PayloadWrite(grant.write_token, b"x" * MIB, Ticket.from_bytes(grant.ticket), grant.arena_offset, Nanos(1))
            assert await nodes.write("node-a", [late]) == {grant.write_token}
            assert bytes(store.server.host.view(grant.arena_offset, MIB)) == bytes(MIB), "nothing was touched"
            await eventually(lambda: store.server.status().reservations == 0)
            over = late._replace(end_by=Nanos(1 << 62))
            await nodes.write("node-a", [over])
            items = [(grant.write_token, payload_checksum(over.payload))]
            statuses = await nodes.call("node-a", lambda stub: stub.commit(items, timeout=seconds(5)))
            assert statuses == [CommitStatus.EXPIRED], "the node knows that it is over, whatever the writer thinks"

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_payload_is_made_where_it_will_lie(kind: str, run: Any, serving: Any, chain: Any, oracle: Any, key_space: Any) -> None:
    """Over shared memory that is the node's arena; and nothing is made of a block that the node has."""
    sizes = [7, 368 * KIB, 5 * MIB]
    refs = chain(sizes)
    made: list[int] = []
    in_arena: list[bool] = []

    async def test() -> None:
        async with serving(kind, host_capacity=Bytes(8 * MIB)) as store:

            def maker(ref: Any, size: int) -> PayloadMaker:
                def make(room: memoryview) -> None:
                    room[:] = oracle(ref, size)
                    made.append(size)
                    in_arena.append(bytes(store.server.host.view(0, store.server.host.capacity)).find(oracle(ref, size)[:7]) >= 0)

                return PayloadMaker(size, make)

            puts = [BlockPut(ref, maker(ref, size)) for ref, size in zip(refs, sizes, strict=True)]
            first = await store.client.put(key_space, puts)
            assert (first.outcomes, made) == ((PutOutcome.STORED,) * 3, sizes)
            assert set(in_arena) == {kind == "shm"}
            assert await store.read(refs, sizes) == ["ok"] * 3
            assert (await store.client.put(key_space, puts)).outcomes == (PutOutcome.EXISTS,) * 3
            assert made == sizes

    run(test())


def test_a_block_whose_payload_cannot_be_made_fails_alone(run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    sizes = [1000] * 2
    refs = chain(sizes)

    def broken(room: memoryview) -> None:
        raise CodecFailure("not finite", reason="not_finite")

    async def test() -> None:
        async with serving("shm") as store:
            puts = [BlockPut(refs[0], PayloadMaker(1000, broken)), BlockPut(refs[1], b"x" * 1000)]
            report = await store.client.put(key_space, puts)
            assert report.outcomes == (PutOutcome.FAILED, PutOutcome.STORED)
            assert report.reasons["not_finite"] == 1

    run(test())


@pytest.mark.parametrize("kind", ["shm", "ucx", "tcp"])
def test_a_connection_whose_request_numbers_run_out_is_replaced_and_nobody_notices(
    kind: str, run: Any, serving: Any, chain: Any, tier_alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_pool, "MOST_REQUESTS", 3)
    opened: list[stream_pool.Connection] = []
    dial = stream_pool.StreamPool.dial

    async def dials(pool: stream_pool.StreamPool, *, timeout: Nanos) -> stream_pool.Connection:
        opened.append(await dial(pool, timeout=timeout))
        return opened[-1]

    monkeypatch.setattr(stream_pool.StreamPool, "dial", dials)

    async def test() -> None:
        async with serving(kind, **tier_alone[Tier.SSD]) as store:
            for size in range(1000, 1005):
                refs = chain([size] * 3)
                await store.put(refs, [size] * 3)
                assert await store.read(refs, [size] * 3) == ["ok"] * 3
                assert await store.uses() == kind
                assert all(connection.number < 8 for connection in opened), "one was used for more than what had to go yet"
            assert len(opened) > 5

    run(test())
