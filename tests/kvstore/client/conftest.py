"""A small store over real sockets: honest in-memory semantics, and knobs for what nodes do wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.client import ClientConfig, StoreClient
from kvstore.client.config import CircuitConfig
from kvstore.codec.checksum import payload_checksum
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, LayoutFingerprint, Namespace, NodeId, StripeId
from kvstore.registry import StaticViews
from kvstore.rpc.server import bind, make_server
from kvstore.units import MIB, milliseconds, seconds

KEY_SPACE = KeySpace(Namespace("acme"), LayoutFingerprint(b"L" * 32))
BLOCKS_PER_STRIPE = 8


def make_chain(blocks: int, *, seed: str = "a") -> tuple[BlockRef, ...]:
    hashes = [BlockHash(hashlib.sha256(f"{seed}/{index}".encode()).digest()) for index in range(-1, blocks)]
    return tuple(
        BlockRef(
            hash=hashes[index + 1],
            parent=hashes[index],
            stripe=StripeId(hashes[index // BLOCKS_PER_STRIPE * BLOCKS_PER_STRIPE + 1]),
            index=index,
        )
        for index in range(blocks)
    )


def payload_of(ref: BlockRef, size: int = 3000) -> bytes:
    """The oracle: what was put under a hash follows from the hash."""
    return (ref.hash * (size // 32 + 1))[:size]


@dataclass
class Fault:
    """What a node does wrong while set."""

    frozen: bool = False
    """Takes every call and answers none."""
    reads_break_after: int | None = None
    """A read stream stands still after that many payloads."""
    corrupt_reads: bool = False
    short_reads: bool = False
    no_room: bool = False
    delay_s: float = 0.0


@dataclass
class Counts:
    calls: dict[str, int] = field(default_factory=dict)
    corrupt_reported: list[bytes] = field(default_factory=list)
    blocks_asked: int = 0
    """Of all reads."""


class ReferenceStore(store_pb2_grpc.StoreServiceServicer):
    """One node. `copies` is the medium; everything else follows the protocol's comments."""

    def __init__(self, node_id: str, *, lease_ttl_ms: int = 10_000) -> None:
        self.node_id = NodeId(node_id)
        self.boot_id = BootId(os.urandom(16))
        self.copies: dict[bytes, bytes] = {}
        self.leases: dict[int, set[bytes]] = {}
        self.reserved: dict[int, tuple[bytes, bytearray]] = {}
        self.fault = Fault()
        self.counts = Counts()
        self.lease_ttl_ms = lease_ttl_ms
        self.address = ""
        self.released = asyncio.Condition()
        self._numbers = itertools.count(1)
        self._server: Any = None
        self._thawed = asyncio.Event()
        self.chunk_bytes = MIB

    @property
    def member(self) -> Member:
        return Member(node_id=self.node_id, boot_id=self.boot_id, role=Role.STORE, address=self.address, zone=self.node_id)

    async def start(self) -> None:
        self._server = make_server()
        store_pb2_grpc.add_StoreServiceServicer_to_server(self, self._server)
        port = bind(self._server, host="127.0.0.1", port=int(self.address.rpartition(":")[2] or 0))
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def kill(self) -> None:
        """Like kill -9: connections are reset, nothing is said."""
        await self._server.stop(grace=None)

    async def restart(self, *, empty: bool) -> None:
        self.boot_id = BootId(os.urandom(16))
        self.leases.clear()
        self.reserved.clear()
        if empty:
            self.copies.clear()
        self.fault = Fault()
        await self.start()

    @property
    def leased(self) -> list[bytes]:
        return [block for blocks in self.leases.values() for block in blocks]

    def thaw(self) -> None:
        """Answer what was asked meanwhile, late."""
        self.fault.frozen = False
        self._thawed.set()

    async def all_released(self) -> None:
        async with self.released, asyncio.timeout(5):
            await self.released.wait_for(lambda: not self.leases)

    async def _enter(self, name: str) -> None:
        self.counts.calls[name] = self.counts.calls.get(name, 0) + 1
        if self.fault.frozen:
            await self._thawed.wait()
        if self.fault.delay_s:
            await asyncio.sleep(self.fault.delay_s)

    async def Hello(self, request: Any, context: Any) -> Any:
        await self._enter("Hello")
        return store_pb2.HelloResponse(node_id=self.node_id, boot_id=self.boot_id, epoch=1, state="active")

    async def Reserve(self, request: Any, context: Any) -> Any:
        await self._enter("Reserve")
        grants = []
        for item in request.items:
            if item.block.hash in self.copies:
                grants.append(store_pb2.ReserveGrant(status=store_pb2.RESERVE_STATUS_EXISTS))
            elif self.fault.no_room:
                grants.append(store_pb2.ReserveGrant(status=store_pb2.RESERVE_STATUS_NO_ROOM))
            elif any(block == item.block.hash for block, _ in self.reserved.values()):
                grants.append(store_pb2.ReserveGrant(status=store_pb2.RESERVE_STATUS_PENDING))
            else:
                token = next(self._numbers)
                self.reserved[token] = (item.block.hash, bytearray(item.payload_bytes))
                grants.append(store_pb2.ReserveGrant(status=store_pb2.RESERVE_STATUS_GRANTED, write_token=token))
        return store_pb2.ReserveResponse(grants=grants)

    async def WritePayloads(self, request_iterator: Any, context: Any) -> Any:
        await self._enter("WritePayloads")
        refused = set()
        async for chunk in request_iterator:
            if chunk.write_token not in self.reserved:
                refused.add(chunk.write_token)
                continue
            self.reserved[chunk.write_token][1][chunk.offset_bytes : chunk.offset_bytes + len(chunk.data)] = chunk.data
        return store_pb2.WriteResponse(refused_write_tokens=refused)

    async def Commit(self, request: Any, context: Any) -> Any:
        await self._enter("Commit")
        statuses = []
        for item in request.items:
            block, payload = self.reserved.pop(item.write_token, (b"", bytearray()))
            if not block:
                statuses.append(store_pb2.COMMIT_STATUS_EXPIRED)
            elif payload_checksum(payload) != item.checksum_xxh3:
                statuses.append(store_pb2.COMMIT_STATUS_BAD_CHECKSUM)
            else:
                self.copies[block] = bytes(payload)
                statuses.append(store_pb2.COMMIT_STATUS_STORED)
        return store_pb2.CommitResponse(statuses=statuses)

    async def ProbePrefix(self, request: Any, context: Any) -> Any:
        await self._enter("ProbePrefix")
        return store_pb2.ProbePrefixResponse(present=[block.hash in self.copies for block in request.blocks])

    async def AcquirePrefix(self, request: Any, context: Any) -> Any:
        await self._enter("AcquirePrefix")
        blocks = []
        for block in request.blocks:
            payload = self.copies.get(block.hash)
            if payload is None:
                blocks.append(store_pb2.AcquiredBlock())
            else:
                blocks.append(
                    store_pb2.AcquiredBlock(
                        found=True, payload_bytes=len(payload), checksum_xxh3=payload_checksum(payload), tier=store_pb2.TIER_HOST
                    )
                )
        found = {block.hash for block in request.blocks if block.hash in self.copies}
        if not found:
            return store_pb2.AcquirePrefixResponse(blocks=blocks)
        lease_id = next(self._numbers)
        self.leases[lease_id] = found
        return store_pb2.AcquirePrefixResponse(lease_id=lease_id, lease_ttl_ms=self.lease_ttl_ms, blocks=blocks)

    async def ReadPayloads(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.counts.blocks_asked += len(request.hashes)
        await self._enter("ReadPayloads")
        for item, block in enumerate(request.hashes):
            if self.fault.reads_break_after is not None and item >= self.fault.reads_break_after:
                await asyncio.Event().wait()
            if block not in self.leases.get(request.lease_id, ()):
                yield store_pb2.ReadChunk(item=item, status=store_pb2.READ_STATUS_NOT_LEASED, last=True)
                continue
            payload = self.copies[block]
            if self.fault.corrupt_reads:
                payload = bytes([payload[0] ^ 1]) + payload[1:]
            if self.fault.short_reads:
                payload = payload[:-1]
            for start in range(0, len(payload), self.chunk_bytes):
                end = min(start + self.chunk_bytes, len(payload))
                yield store_pb2.ReadChunk(
                    item=item, status=store_pb2.READ_STATUS_OK, offset_bytes=start, data=payload[start:end], last=end == len(payload)
                )

    async def Renew(self, request: Any, context: Any) -> Any:
        await self._enter("Renew")
        if request.lease_id not in self.leases:
            await context.abort(grpc.StatusCode.ABORTED, "the lease is gone")
        return store_pb2.RenewResponse(lease_ttl_ms=self.lease_ttl_ms)

    async def Release(self, request: Any, context: Any) -> Any:
        await self._enter("Release")
        self.counts.corrupt_reported += request.corrupt_hashes
        blocks = self.leases.get(request.lease_id, set())
        blocks -= set(request.hashes or list(blocks))
        if not blocks:
            self.leases.pop(request.lease_id, None)
        async with self.released:
            self.released.notify_all()
        return store_pb2.ReleaseResponse()

    async def Delete(self, request: Any, context: Any) -> Any:
        await self._enter("Delete")
        return store_pb2.DeleteResponse(deleted=[self.copies.pop(block.hash, None) is not None for block in request.blocks])


class Cluster:
    """Reference stores, the view that names them, and a client that knows only the view."""

    def __init__(self, stores: Sequence[ReferenceStore], client: StoreClient, views: StaticViews) -> None:
        self.stores = list(stores)
        self.client = client
        self.views = views

    def __getitem__(self, node_id: NodeId) -> ReferenceStore:
        return next(store for store in self.stores if store.node_id == node_id)

    def show(self, **states: MemberState) -> None:
        """A new view with the stores as they are now; `states` of some of them by node id."""
        self.views.replace(_view_of(self.stores, Epoch(self.views.view.epoch + 1), states))

    def calls(self, name: str) -> int:
        return sum(store.counts.calls.get(name, 0) for store in self.stores)


def _view_of(stores: Sequence[ReferenceStore], epoch: Epoch, states: dict[str, MemberState]) -> View:
    return View(epoch, tuple(dataclasses.replace(store.member, state=states.get(store.node_id, MemberState.ACTIVE)) for store in stores))


CONFIG = ClientConfig(
    rpc_timeout=seconds(3),
    read_idle_timeout=seconds(3),
    write_timeout=seconds(5),
    pending_wait=milliseconds(10),
    close_timeout=seconds(2),
    circuit=CircuitConfig(first_probe_after=milliseconds(50), longest_probe_after=milliseconds(400)),
)


@asynccontextmanager
async def _running_cluster(
    stores: int = 3, *, replicas: int = 2, config: ClientConfig = CONFIG, lease_ttl_ms: int = 10_000
) -> AsyncIterator[Cluster]:
    nodes = [ReferenceStore(f"s{number}", lease_ttl_ms=lease_ttl_ms) for number in range(stores)]
    for node in nodes:
        await node.start()
    views = StaticViews(_view_of(nodes, Epoch(1), {}))
    client = StoreClient(views, replicas=replicas, config=config)
    try:
        yield Cluster(nodes, client, views)
    finally:
        await client.close()
        for node in nodes:
            await node.kill()


RunningCluster = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture
def running_cluster() -> RunningCluster:
    return _running_cluster


@pytest.fixture
def chain_of() -> Callable[..., tuple[BlockRef, ...]]:
    return make_chain


@pytest.fixture
def payload() -> Callable[..., bytes]:
    return payload_of


@pytest.fixture
def key_space() -> KeySpace:
    return KEY_SPACE


@pytest.fixture
def impatient_config() -> ClientConfig:
    """For tests that wait for a timeout to pass."""
    return dataclasses.replace(CONFIG, rpc_timeout=milliseconds(600), read_idle_timeout=milliseconds(600))


@pytest.fixture
def client_config() -> ClientConfig:
    return CONFIG


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a test's coroutine; no task may be left over when it ends."""

    def run_in_loop(test: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            before = asyncio.all_tasks()
            async with asyncio.timeout(90):
                result = await test
            await asyncio.sleep(0)
            left = [task for task in asyncio.all_tasks() - before if not task.done()]
            assert not left, left
            return result

        return asyncio.run(bounded())

    return run_in_loop


Waiter = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def until() -> Waiter:
    """Wait for something that has no event of its own; looks every 5 ms, gives up after 5 s."""

    async def wait(happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not happened():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    return wait
