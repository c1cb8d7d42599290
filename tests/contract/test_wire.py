"""What the wire may do to the bytes: a cut, a flipped bit, a standstill. A miss or another try, never wrong bytes, and never for ever."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.events.puts import CommitStatus
from kvstore.core.extent import Tier
from kvstore.transport.ucx_worker import UcxEndpoint
from kvstore.units import MIB, milliseconds

WIRES = ("tcp", "grpc")
TIERS = (Tier.HOST, Tier.SSD, Tier.GPU)
CUTS = [(kind, Tier.HOST, after) for kind in WIRES for after in (0, 10, 64, 100_000, 700_000)]
CUTS += [(kind, tier, 700_000) for kind in WIRES for tier in (Tier.SSD, Tier.GPU)]
CUTS += [("ucx", Tier.HOST, after) for after in (0, 10, 64, 96)]
"""Of UCX the stream beside it: in the greeting, behind it, behind the head of a group."""


@pytest.mark.parametrize(("kind", "tier", "after"), CUTS)
def test_a_cut_in_the_middle_is_a_miss_and_the_next_read_is_whole(
    kind: str, tier: Tier, after: int, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any, eventually: Any
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, wire=True, **tier_alone[tier]) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                store.proxy.cut_after = after
                if kind != "grpc":
                    await store.client._nodes._transport.close()  # a new connection, so that its bytes are counted from 0
                blocks = [block async for block in store.client.read(lease)]
            assert len(blocks) == 4
            assert any(block.payload is None for block in blocks)
            await eventually(lambda: store.server.node.reads == 0)
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
@pytest.mark.parametrize("tier", TIERS)
def test_a_bit_that_flips_on_the_wire_is_found_by_the_reader(
    kind: str, tier: Tier, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, wire=True, **tier_alone[tier]) as store:
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


@pytest.mark.parametrize("kind", ["tcp", "ucx"])
def test_a_bit_that_flips_in_a_header_ends_the_connection(kind: str, run: Any, serving: Any, chain: Any, key_space: Any) -> None:
    """gRPC has headers of its own; that it gives its stream up was seen when a bit flips in a payload's."""
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, wire=True) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                await store.client._nodes._transport.close()
                if kind == "tcp":
                    store.proxy.flip_at = 64 + 32 + 300_000 + 20  # greeting, one whole payload, then a length
                else:
                    store.proxy.flip_at = 64 + 32 + len((await store.server._doors._ucx.worker()).address) + 20  # that of a group
                reasons = {block.index: block.reason async for block in store.client.read(lease)}
            whole = "ok" if kind == "tcp" else "unreachable"
            assert reasons == {0: whole, 1: "unreachable", 2: "unreachable", 3: "unreachable"}
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


@pytest.mark.parametrize("kind", WIRES)
def test_a_bit_that_flips_on_the_way_to_the_node_is_found_at_the_commit_and_the_put_tried_again(
    kind: str, run: Any, serving: Any, chain: Any
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, wire=True) as store:
            await store.put(chain([10]), [10])
            if kind == "tcp":
                await store.client._nodes._transport.close()
            store.proxy.flip_up_at = 450_000
            await store.put(refs, sizes)
            assert store.proxy.flip_up_at is None, "it was flipped"
            assert store.server._metrics._committed[CommitStatus.BAD_CHECKSUM]._value.get() == 1
            assert await store.read(refs, sizes) == ["ok"] * 4

    run(test())


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]) -> list[int]:
    """The next message that UCX sends is another. UCX has a wire of its own, which no proxy stands in; the lengths of what was changed."""
    changed: list[int] = []
    send = UcxEndpoint.send

    def sends(endpoint: UcxEndpoint, payload: Any, tag: int) -> asyncio.Future[None]:
        if not changed:
            changed.append(len(payload))
            payload = memoryview(spoil(bytes(payload)))
        return send(endpoint, payload, tag)

    monkeypatch.setattr(UcxEndpoint, "send", sends)
    return changed


def flipped(message: bytes) -> bytes:
    return message[:1000] + bytes([message[1000] ^ 4]) + message[1001:]


@pytest.mark.parametrize("tier", TIERS)
def test_a_bit_that_flips_on_the_way_by_ucx_is_found_by_the_reader(
    tier: Tier, run: Any, serving: Any, chain: Any, tier_alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving("ucx", **tier_alone[tier]) as store:
            await store.put(refs, sizes)
            changed = spoiled(monkeypatch, flipped)
            assert await store.read(refs, sizes, tier=tier) == ["bad_checksum", "ok", "ok", "ok"]
            assert changed == [300_000]
            assert await store.read(refs, sizes) == ["ok"] * 4, "the node's copy was good and stays"

    run(test())


@pytest.mark.parametrize(
    ("spoil", "reason"), [(lambda message: message[1:], "bad_checksum"), (lambda message: message + b"x", "unreachable")]
)
def test_a_message_of_ucx_that_is_too_short_or_too_long_is_no_payload(
    spoil: Any, reason: str, run: Any, serving: Any, chain: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """After one that UCX itself refuses, UCX is not used for a while."""
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving("ucx") as store:
            await store.put(refs, sizes)
            store.client._nodes._transport._kinds |= {"tcp"}
            spoiled(monkeypatch, spoil)
            assert (await store.read(refs, sizes))[0] == reason
            await eventually(store.client.usable_stores)
            assert await store.read(refs, sizes) == ["ok"] * 4

    run(test())


@pytest.mark.parametrize("spoil", [flipped, lambda message: message[1:]])
def test_a_message_of_ucx_to_the_node_that_changes_on_its_way_is_found_at_the_commit(
    spoil: Any, run: Any, serving: Any, chain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving("ucx") as store:
            changed = spoiled(monkeypatch, spoil)
            await store.put(refs, sizes)
            assert changed == [300_000]
            assert store.server._metrics._committed[CommitStatus.BAD_CHECKSUM]._value.get() == 1
            assert await store.read(refs, sizes) == ["ok"] * 4

    run(test())


@pytest.mark.parametrize("kind", ["shm", "ucx", "tcp", "grpc"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_payload_that_was_spoiled_in_the_nodes_memory_is_found_by_whoever_reads_it(
    kind: str, in_place: bool, run: Any, serving: Any, chain: Any, eventually: Any, key_space: Any
) -> None:
    """Shared memory has no wire: this is its flipped bit. The copy is bad for good, so it goes."""
    sizes = [300_000] * 3
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, ssd_path=None) as store:
            await store.put(refs, sizes)
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                offset = lease.copies[1].arena_offset
            store.server.host.view(offset, 300_000)[1000] ^= 4
            reason = "corrupt" if kind == "grpc" else "bad_checksum"  # the node itself looks before it sends by gRPC
            assert await store.read(refs, sizes, in_place=in_place) == ["ok", reason, "ok"]
            await eventually(lambda: store.server.status().blocks == 2)
            await store.put(refs, sizes)
            assert await store.read(refs, sizes, in_place=in_place) == ["ok"] * 3

    run(test())


@pytest.mark.parametrize("kind", ["shm", "ucx", "tcp"])
def test_a_node_that_drops_its_connections_in_the_middle_of_a_read_is_a_miss(
    kind: str, run: Any, serving: Any, chain: Any, key_space: Any, tier_alone: Any, eventually: Any
) -> None:
    """What a cut is where there is no wire: over shared memory the payloads of the SSD come over a socket. It waits for the disk then."""
    sizes = [300_000] * 4
    refs = chain(sizes)

    async def test() -> None:
        async with serving(kind, **tier_alone[Tier.SSD]) as store:
            await store.put(refs, sizes)
            released = threading.Event()
            store.faults.before_read = released.wait
            async with await store.client.acquire_prefix(key_space, refs) as lease:
                reading = asyncio.ensure_future(collect(store.client.read(lease)))
                await eventually(lambda: store.server.node.reads == 1)
                for task in list(store.server._doors._tasks):
                    if task.get_coro().__name__ == "_serve":
                        task.cancel()
                assert {block.reason for block in await reading} == {"unreachable"}
            released.set()
            await eventually(lambda: store.server.node.reads == 0)
            await eventually(store.client.usable_stores)
            assert await store.read(refs, sizes) == ["ok"] * 4

    run(test())


async def collect(blocks: Any) -> list[Any]:
    return [block async for block in blocks]
