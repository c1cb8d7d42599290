"""Real nodes in this process, each transport in front of them, and a proxy that misbehaves on demand.

The contract, and over what it is tested. Transports: S shared memory (what is not in the host tier comes over its Unix socket), U UCX,
T TCP, G gRPC. A dash: there is no such thing, for the reason given.

                                   host     SSD      GPU
    1 byte to 1 MiB and odd sizes  S U T G  S U T G  S U T G
    64 MiB                         S U T G  S U T G  S U T G
    the medium fails, gives less,
      or other bytes               -        S U T G  S U T G   the host tier is mapped memory: it cannot fail, and its bits: next line
    bits flip in the node's memory S U T G  -        -         read back from the medium they are those of the line above
    bits flip on the way out       - U T G  - U T G  - U T G   S: the kernel copies, there is no wire
    bits flip on the way in        - U T G  -        -         S: as before; a put goes through memory, whatever tier it is for
    a flipped header               - U T -  -        -         the same head goes before every tier's bytes; G: gRPC's own affair
    a message too short, too long  - U - -  -        -         only UCX has messages; over a stream such a thing is a cut or a bad header
    a cut in the middle            - U T G  S U T G  - - T G   S: by the node itself, there being no wire; U, T too
    a standstill in the middle     - U T G  -        -         the reader's own clock, which knows no tier; S: nothing could stand still
    slow readers                   - U T G  S U T G  S U T G   S: what is mapped is read at the reader's own pace
    a reader that is too slow      - U T G  S        -         after its time all tiers are given up in the same place
    a wrong ticket, to read        - U T G  S U T G  S U T G   S: as before; G: none is shown, the lease itself is looked at
    a wrong ticket, to write       - U T G  -        -         as bits on the way in; S: in place, see ARCHITECTURE.md, decision 11
    eviction during a read         S U T G  S U T G  S U T G
    a reader that leaves early     S U T G  S U T G  S U T G
    many short transfers           - U T G  -        -         S: sockets of Unix take no ports
    a herd of clients              -        S - T -  -         what is asked of a door is asked for every tier; G: tests/kvstore/node
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import Acknowledge, BlockPut, CircuitConfig, ClientConfig, PutOutcome, StoreClient
from kvstore.core.extent import Tier
from kvstore.core.view import MemberState, View
from kvstore.ids import BlockHash, BlockRef, Epoch, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.node.config import NodeConfig
from kvstore.node.server import NodeServer
from kvstore.registry.view_source import StaticViews
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.transport.ucx_worker import ucx_obstacle
from kvstore.units import MIB, Bytes, milliseconds, seconds

KEY_SPACE = KeySpace(Namespace("kitchen"), LayoutFingerprint(b"L" * 32))
CONFIG = ClientConfig(
    rpc_timeout=seconds(10),
    read_idle_timeout=seconds(10),
    lease_ttl=seconds(40),
    circuit=CircuitConfig(failures_to_open=100, first_probe_after=milliseconds(20), longest_probe_after=milliseconds(50)),
)


def chain_of(sizes: Sequence[int]) -> list[BlockRef]:
    hashes = [hashlib.sha256(f"{index}:{size}".encode()).digest() for index, size in enumerate(sizes)]
    parents = [b"r" * 32, *hashes]
    return [
        BlockRef(BlockHash(digest), BlockHash(parents[index]), StripeId(hashes[index - index % 8]), index)
        for index, digest in enumerate(hashes)
    ]


@lru_cache(32)
def payload_of(ref: BlockRef, size: int) -> bytes:
    """The oracle: what a block of this key must read as."""
    return np.random.Generator(np.random.SFC64(int.from_bytes(ref.hash))).bytes(size)


def is_oracles(payload: memoryview, ref: BlockRef, size: int) -> bool:
    """A memoryview compares itself byte by byte, which takes a thousand times as long."""
    return np.array_equal(np.frombuffer(payload, np.uint8), np.frombuffer(payload_of(ref, size), np.uint8))


TIER_ALONE: dict[Tier, dict[str, Any]] = {
    Tier.HOST: {"ssd_path": None},
    Tier.SSD: {"host_capacity": Bytes(0), "staging_capacity": Bytes(8 * MIB)},
    Tier.GPU: {
        "host_capacity": Bytes(0),
        "staging_capacity": Bytes(8 * MIB),
        "ssd_path": None,
        "gpu_device": "cpu",
        "gpu_capacity": Bytes(8 * MIB),
    },
}
"""Keys of a node that has this tier and no other."""


class Proxy:
    """In front of one port. What it does to the bytes that come back from the node:"""

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut_after: int | None = None
        """Ends the connection after so many bytes of it."""
        self.flip_at: int | None = None
        """Flips a bit of this byte of each connection."""
        self.flip_up_at: int | None = None
        """The same of what goes to the node, once."""
        self.hold_after: int | None = None
        """Passes nothing on after so many bytes, and keeps the connection."""
        self.connections = 0
        """Made so far."""
        self.spared = 0
        """The number of a connection that nothing is done to."""
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def heal(self) -> None:
        self.cut_after = self.flip_at = self.flip_up_at = self.hold_after = None

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return

        async def up() -> None:
            passed = 0
            while data := await reader.read(1 << 18):
                if self.flip_up_at is not None and passed <= self.flip_up_at < passed + len(data):
                    data, self.flip_up_at = _flipped(data, self.flip_up_at - passed), None
                passed += len(data)
                there_writer.write(data)
                await there_writer.drain()

        async def down() -> None:
            passed = 0
            while data := await there_reader.read(1 << 18):
                if number == self.spared:
                    writer.write(data)
                    await writer.drain()
                    continue
                if self.flip_at is not None and passed <= self.flip_at < passed + len(data):
                    data = _flipped(data, self.flip_at - passed)
                limit = min((limit for limit in (self.cut_after, self.hold_after) if limit is not None), default=None)
                if limit is not None and passed + len(data) > limit:
                    writer.write(data[: max(limit - passed, 0)])
                    await writer.drain()
                    if self.cut_after is not None:
                        return
                    await asyncio.Event().wait()
                passed += len(data)
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
            there_writer.close()


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


@dataclass
class Store:
    """One node, a client that reaches it by one transport alone, and the proxy between them where there is a wire."""

    server: NodeServer
    client: StoreClient
    proxy: Proxy | None
    faults: Faults
    views: StaticViews

    async def put(self, refs: Sequence[BlockRef], sizes: Sequence[int], *, when_there_is_room: bool = False) -> None:
        """`when_there_is_room`: as often as it takes, since a disk may be slower than the node waits for it."""
        puts = [BlockPut(ref, payload_of(ref, size)) for ref, size in zip(refs, sizes, strict=True)]
        report = await self.client.put(KEY_SPACE, puts, acknowledge=Acknowledge.ALL)
        while when_there_is_room and "no_room" in report.reasons:
            await asyncio.sleep(0.05)
            report = await self.client.put(KEY_SPACE, puts, acknowledge=Acknowledge.ALL)
        assert set(report.outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTS}, report

    async def read(self, refs: Sequence[BlockRef], sizes: Sequence[int], *, in_place: bool = False, tier: Tier | None = None) -> list[str]:
        """The reason of each block. What was given is as the oracle says. `tier`: where all of them must lie."""
        reasons: dict[int, str] = {}
        async with await self.client.acquire_prefix(KEY_SPACE, refs) as lease:
            assert len(lease) == len(refs)
            assert tier is None or {copy.tier for copy in lease.copies} == {tier}
            async for block in self.client.read(lease, in_place=in_place):
                reasons[block.index] = block.reason
                if block.payload is not None:
                    assert is_oracles(block.payload, refs[block.index], sizes[block.index]), f"foreign bytes in block {block.index}"
                    assert block.still_good()
        return [reasons[index] for index in range(len(refs))]

    @asynccontextmanager
    async def by(self, kind: str, *, client_config: ClientConfig = CONFIG) -> AsyncIterator[Store]:
        """The same node by another client, which has another transport."""
        async with StoreClient(self.views, replicas=1, config=dataclasses.replace(client_config, transports=(kind,))) as client:
            yield dataclasses.replace(self, client=client)

    async def uses(self) -> str:
        """The transport that was in use."""
        [chosen] = self.client._nodes._transport._chosen.values()  # type: ignore[attr-defined]
        return str(chosen.choice.kind)


@asynccontextmanager
async def _serving(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, wire: bool = False, client_config: ClientConfig = CONFIG, **keys: Any
) -> AsyncIterator[Store]:
    kind, _, wires = kind.partition("-")
    monkeypatch.setenv("UCX_TLS", "shm,self,tcp" if wires == "shm" else "tcp,self")
    faults = Faults()
    defaults: dict[str, Any] = {
        "host_capacity": Bytes(32 * MIB),
        "tick_every": milliseconds(20),
        "ssd_path": folder / "ssd",
        "scrub_rate": Bytes(0),  # a fault set for one read must meet the reader's, not a scrub's
    }
    config = NodeConfig(node_id="node-a", **(defaults | keys))
    views = StaticViews(View(Epoch(1)))
    server = NodeServer(
        config, views=views, wrap_ssd=lambda regions: FaultyTier(regions, faults), wrap_gpu=lambda arena: FaultyTier(arena, faults)
    )
    await server.start()
    proxy: Proxy | None = None
    address = server.address
    if wire:
        proxy = Proxy(server.port if kind == "grpc" else server._doors.port)
        await proxy.start()
        if kind != "grpc":
            server._doors.port = proxy.port  # what the node says in its greeting
        else:
            address = f"127.0.0.1:{proxy.port}"
    views.replace(View(Epoch(2), (dataclasses.replace(server.member(), state=MemberState.ACTIVE, address=address),)))
    client = StoreClient(views, replicas=1, config=dataclasses.replace(client_config, transports=(kind,)))
    try:
        yield Store(server, client, proxy, faults, views)
    finally:
        await client.close()
        await server.stop()
        if proxy is not None:
            await proxy.stop()


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`async with serving(kind, wire=..., ...) as store`. "ucx" is UCX over TCP alone, "ucx-shm" over shared memory. Entered again, it
    finds what the last one left on the SSD, and nothing else."""

    def make(kind: str, **keys: Any) -> Any:
        if kind.startswith("ucx") and ucx_obstacle() is not None:
            pytest.skip("ucxx is not installed")
        return _serving(kind, tmp_path, monkeypatch, **keys)

    return make


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    async def bounded(test: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(100):
            await test

    return lambda test: asyncio.run(bounded(test))


@pytest.fixture
def chain() -> Callable[[Sequence[int]], list[BlockRef]]:
    return chain_of


@pytest.fixture
def oracle() -> Callable[[BlockRef, int], bytes]:
    return payload_of


@pytest.fixture
def right() -> Callable[[memoryview, BlockRef, int], bool]:
    """Whether a payload is as the oracle says."""
    return is_oracles


@pytest.fixture
def tier_alone() -> dict[Tier, dict[str, Any]]:
    return TIER_ALONE


@pytest.fixture
def key_space() -> KeySpace:
    return KEY_SPACE


@pytest.fixture
def client_config() -> ClientConfig:
    return CONFIG


@pytest.fixture
def eventually() -> Callable[..., Any]:
    async def wait(condition: Callable[[], Any], *, within_s: float = 20.0) -> Any:
        async with asyncio.timeout(within_s):
            while not (result := condition()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return result

    return wait
