"""One contract for every transport: the right bytes or a reason, from every tier, at every size, whatever the wire does."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

import kvstore.client.read
from kvstore.client import BlockPut, PayloadMaker, PutOutcome, StoreClient
from kvstore.client.prefix_lease import HeldState
from kvstore.codec.checksum import payload_checksum
from kvstore.core.events import CommitStatus
from kvstore.core.extent import Tier
from kvstore.errors import CodecFailure
from kvstore.node.config import ShmAccess
from kvstore.transport import PayloadWrite, Ticket
from kvstore.transport.stream_transport import StreamTransport
from kvstore.units import KIB, MIB, Bytes, Nanos, milliseconds, seconds

TRANSPORTS = ("shm", "ucx", "tcp", "grpc")
WIRES = ("tcp", "grpc")
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
                assert {copy.tier for copy in (await store.client.acquire_prefix(key_space, refs)).copies} == {Tier.SSD}
                assert await store.read(refs, SIZES) == ["ok"] * len(SIZES)
                assert await store.uses() == kind.partition("-")[0]

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.SSD])
def test_without_a_host_tier_every_size_comes_back_from_the_tier_that_there_is(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any
) -> None:
    refs = chain(SIZES)
    keys = {"ssd_path": None, "gpu_device": "cpu", "gpu_capacity": Bytes(8 * MIB)} if tier is Tier.GPU else {}

    async def test() -> None:
        async with serving(kind, host_capacity=Bytes(0), staging_capacity=Bytes(8 * MIB), **keys) as store:
            await store.put(refs, SIZES)
            assert await store.uses() == kind
            assert {copy.tier for copy in (await store.client.acquire_prefix(key_space, refs)).copies} == {tier}
            assert await store.read(refs, SIZES, in_place=True) == ["ok"] * len(SIZES)

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_payload_of_64_mib_passes(kind: str, run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    sizes = [64 * MIB]
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, host_capacity=Bytes(80 * MIB), ssd_path=None) as store:
            await store.put(refs, sizes)
            assert await store.read(refs, sizes) == ["ok"]

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("fault", ["short_reads", "failing_reads", "flipped_reads"])
def test_a_disk_that_lies_is_a_miss_and_never_wrong_bytes(
    kind: str, fault: str, run: Any, serving: Any, chain: Any, key_space: Any
) -> None:
    sizes = [50_000] * 3
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind) as store:
            await store.put(refs, sizes)
        async with serving(kind) as store:
            setattr(store.faults, fault, 1)
            reasons = await store.read(refs, sizes)
            assert sorted(reason == "ok" for reason in reasons) == [False, True, True], reasons

    run(test())


CUTS = [(kind, after) for kind in WIRES for after in (0, 10, 64, 100_000, 700_000)]
CUTS += [("ucx", after) for after in (0, 10, 64, 96)]  # the stream beside UCX: in the greeting, behind it, behind the head of a group


@pytest.mark.parametrize(("kind", "after"), CUTS)
def test_a_cut_in_the_middle_is_a_miss_and_the_next_read_is_whole(
    kind: str, after: int, run: Any, serving: Any, chain: Any, key_space: Any, eventually: Any
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, wire=True) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                store.proxy.cut_after = after
                if kind != "grpc":
                    await store.client._nodes._transport.close()  # a new connection, so that its bytes are counted from 0
                blocks = [block async for block in store.client.read(lease)]
            assert len(blocks) == 4
            assert any(block.payload is None for block in blocks)
            store.proxy.heal()
            await eventually(store.client.usable_stores)
            reasons: list[str] = []
            while reasons != ["ok"] * 4:  # a channel of gRPC takes its time to connect again
                try:
                    reasons = await store.read(refs, sizes)
                except AssertionError:
                    await asyncio.sleep(0.05)

    run(test())


@pytest.mark.parametrize("kind", WIRES)
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD, Tier.GPU])
def test_a_bit_that_flips_on_the_wire_is_found_by_the_reader(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)
    alone = {"host_capacity": Bytes(0), "staging_capacity": Bytes(8 * MIB)}
    keys: dict[Tier, dict[str, Any]] = {
        Tier.HOST: {},
        Tier.SSD: alone,
        Tier.GPU: alone | {"ssd_path": None, "gpu_device": "cpu", "gpu_capacity": Bytes(8 * MIB)},
    }

    async def test() -> None:
        async with serving(kind, wire=True, **keys[tier]) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                assert {copy.tier for copy in lease.copies} == {tier}
                if kind == "tcp":
                    await store.client._nodes._transport.close()  # a new connection, so that its bytes are counted from 0
                store.proxy.flip_at = 450_000
                reasons = [block.reason async for block in store.client.read(lease)]
            assert reasons.count("ok") == 3
            assert "bad_checksum" in reasons
            store.proxy.heal()
            assert await store.read(refs, sizes) == ["ok"] * 4, "the node's copy was good and stays"

    run(test())


def test_a_large_read_goes_over_several_connections_and_a_cut_one_costs_only_its_own_blocks(
    run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any
) -> None:
    sizes = [MIB] * 12
    refs = chain(sizes)
    config = dataclasses.replace(client_config, read_streams=3)

    async def test() -> None:
        async with serving("tcp", wire=True, client_config=config) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                await store.client._nodes._transport.close()
                before = store.proxy.connections
                blocks = [block async for block in store.client.read(lease)]
                assert [block.reason for block in blocks] == ["ok"] * 12
                assert store.proxy.connections - before >= 3
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                await store.client._nodes._transport.close()
                store.proxy.cut_after, store.proxy.spared = 2 * MIB, store.proxy.connections + 1
                blocks = [block async for block in store.client.read(lease)]
            ok = {block.index for block in blocks if block.payload is not None}
            assert len(blocks) == 12
            assert len(ok) == 4 + 1 + 1, "one whole stream, and of each that was cut what had come"

    run(test())


def test_a_bit_that_flips_in_a_header_ends_the_connection(run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving("tcp", wire=True) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                await store.client._nodes._transport.close()
                store.proxy.flip_at = 64 + 32 + 300_000 + 20  # greeting, one whole payload, then a length
                reasons = {block.index: block.reason async for block in store.client.read(lease)}
            assert reasons == {0: "ok", 1: "unreachable", 2: "unreachable", 3: "unreachable"}
            store.proxy.heal()
            assert await store.read(refs, sizes) == ["ok"] * 4

    run(test())


@pytest.mark.parametrize("kind", ["ucx", *WIRES])
def test_a_node_that_stands_still_is_given_up_in_time(
    kind: str, run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)
    impatient = dataclasses.replace(client_config, read_idle_timeout=milliseconds(300))

    async def test() -> None:
        async with serving(kind, wire=True, client_config=impatient) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                if kind != "grpc":
                    await store.client._nodes._transport.close()
                store.proxy.hold_after = 400_000
                if kind == "ucx":  # greeting, UCX with its address, the head of a group
                    store.proxy.hold_after = 64 + 32 + len((await store.server._doors._ucx.worker()).address) + 32
                started = asyncio.get_running_loop().time()
                blocks = [block async for block in store.client.read(lease)]
                assert asyncio.get_running_loop().time() - started < 8
            assert {block.reason for block in blocks if block.payload is None} == {"timeout"}
            assert any(block.payload is None for block in blocks)

    run(test())


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_what_is_leased_stays_while_other_blocks_push_everything_else_out(
    kind: str, run: Any, serving: Any, chain: Any, key_space: Any, oracle: Any
) -> None:
    sizes = [MIB] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, host_capacity=Bytes(12 * MIB), ssd_path=None) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                held: list[Any] = []
                async for block in store.client.read(lease, in_place=True):
                    held.append(block)
                    for round_ in range(3):
                        other = [MIB - 1 - block.index * 8 - round_] * 4
                        await store.put(chain(other), other)
                for block in held:
                    assert block.payload == oracle(refs[block.index], MIB)
                    assert block.still_good()

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


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_reader_that_leaves_early_leaves_nothing_open(
    kind: str, run: Any, serving: Any, chain: Any, key_space: Any, eventually: Any
) -> None:
    sizes = [MIB] * 8
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                blocks = store.client.read(lease)
                await anext(blocks)
                await blocks.aclose()
            await eventually(lambda: store.server.node.reads == 0 and store.server.status().leases == 0)
            assert await store.read(refs, sizes) == ["ok"] * 8

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
        async with serving(kind) as store:

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
