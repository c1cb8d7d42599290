"""A real node on a real port, in this process or in one of its own, and a client that knows what every payload must be."""

import asyncio
import hashlib
import itertools
import socket
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager, contextmanager

import pytest

from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus, ReserveItem, ReserveStatus
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.extent import Tier
from kvstore.core.view import View
from kvstore.ids import BOOT_ID_BYTES, BlockHash, BlockRef, Epoch, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.node.config import NodeConfig
from kvstore.node.server import NodeServer
from kvstore.registry.view_source import StaticViews
from kvstore.rpc.channel import open_channel
from kvstore.rpc.store_stub import StoreStub, WrittenChunk
from kvstore.transport.frames import HEADER_BYTES, FrameKind, Header
from kvstore.transport.ticket import NONCE_BYTES, PROOF_BYTES, proof_of
from kvstore.units import KIB, MIB, Bytes, milliseconds, seconds

KEY_SPACE = KeySpace(Namespace("kitchen"), LayoutFingerprint(hashlib.sha256(b"layout").digest()))
TIMEOUT = seconds(20)
PAYLOAD_BYTES = 20_000


def _chain(name, count):
    hashes = [hashlib.sha256(f"{name}:{index}".encode()).digest() for index in range(count)]
    root = hashlib.sha256(f"{name}:root".encode()).digest()
    return [BlockRef(BlockHash(hashes[i]), BlockHash(hashes[i - 1] if i else root), StripeId(hashes[i - i % 8]), i) for i in range(count)]


def _payload(ref, size=PAYLOAD_BYTES, key_space=KEY_SPACE):
    """The oracle: what a block of this key must read as."""
    return hashlib.shake_256(key_space.namespace.encode() + key_space.layout + ref.hash).digest(size)


class OracleClient:
    """Puts what the oracle says, and checks whatever it reads against the oracle."""

    def __init__(self, address):
        self.key_space = KEY_SPACE
        self.channel = open_channel(address)
        self.stub = StoreStub(self.channel)

    async def close(self):
        await self.channel.close()

    async def reserve(self, refs, *, size=PAYLOAD_BYTES, key_space=KEY_SPACE, ttl=None):
        return await self.stub.reserve(key_space, [ReserveItem(ref, size, ttl) for ref in refs], timeout=TIMEOUT)

    async def put(self, refs, *, size=PAYLOAD_BYTES, key_space=KEY_SPACE, ttl=None):
        """The commit status of each block, EXISTS and other refusals as their reserve status."""
        grants = await self.reserve(refs, size=size, key_space=key_space, ttl=ttl)
        granted = [(ref, grant.write_token) for ref, grant in zip(refs, grants, strict=True) if grant.status is ReserveStatus.GRANTED]
        payloads = [_payload(ref, size, key_space) for ref, _ in granted]
        chunks = (
            WrittenChunk(token, Bytes(offset), payload[offset : offset + MIB])
            for (_, token), payload in zip(granted, payloads, strict=True)
            for offset in range(0, size, MIB)
        )
        await self.stub.write_payloads(chunks, timeout=TIMEOUT)
        commits = [(token, payload_checksum(payload)) for (_, token), payload in zip(granted, payloads, strict=True)]
        statuses = iter(await self.stub.commit(commits, timeout=TIMEOUT) if commits else ())
        return [next(statuses) if grant.status is ReserveStatus.GRANTED else grant.status for grant in grants]

    async def store(self, refs, **kwargs):
        assert set(await self.put(refs, **kwargs)) <= {CommitStatus.STORED, ReserveStatus.EXISTS}

    async def acquire(self, refs, *, key_space=KEY_SPACE, ttl=None):
        return await self.stub.acquire_prefix(key_space, refs, ttl=ttl, timeout=TIMEOUT)

    async def read(self, lease_id, refs, *, size=PAYLOAD_BYTES, key_space=KEY_SPACE):
        """The status of each block. A block that is OK has been compared with the oracle."""
        statuses = [None] * len(refs)
        received = [bytearray() for _ in refs]
        chunks = self.stub.read_payloads(lease_id, key_space, [ref.hash for ref in refs], timeout=TIMEOUT)
        async with aclosing(chunks):
            async for chunk in chunks:
                assert statuses[chunk.item] is None, "a chunk after the last one"
                assert chunk.offset == len(received[chunk.item]) or chunk.status is not ReadStatus.OK
                received[chunk.item] += chunk.data
                if chunk.last:
                    statuses[chunk.item] = chunk.status
        for ref, status, data in zip(refs, statuses, received, strict=True):
            if status is ReadStatus.OK:
                assert bytes(data) == _payload(ref, size, key_space), f"foreign bytes for block {ref.index}"
        return statuses

    async def get(self, refs, **kwargs):
        """Acquire, read, release: how many leading blocks came, each as the oracle says."""
        size = kwargs.pop("size", PAYLOAD_BYTES)
        acquired = await self.acquire(refs, **kwargs)
        found = [ref for ref, copy in zip(refs, acquired.copies, strict=True) if copy is not None]
        statuses = await self.read(acquired.lease_id, found, size=size, **kwargs) if found else []
        await self.stub.release(acquired.lease_id, kwargs.get("key_space", KEY_SPACE), timeout=TIMEOUT)
        return statuses.count(ReadStatus.OK)


class RawClient:
    """Speaks the framing byte by byte, as well or as badly as a test wants."""

    def __init__(self, sock):
        self.sock = sock
        self.number = 0

    async def greeted(self):
        greeting = await self.receive(HEADER_BYTES + NONCE_BYTES + BOOT_ID_BYTES)
        assert Header.unpack(greeting).kind is FrameKind.GREETING
        self.nonce = greeting[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES]
        return self

    async def send(self, data):
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self, count):
        data = b""
        while len(data) < count:
            got = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, count - len(data)), 10)
            assert got, f"closed after {len(data)} of {count} bytes"
            data += got
        return data

    async def closed(self):
        """Reads to the end; whether the node closed the connection, rather than answering."""
        try:
            return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, 1 << 16), 10) == b""
        except ConnectionResetError:
            return True

    def request(self, kind, body, tickets, *, length=None, number=None, nonce=None):
        number = self.number if number is None else number
        self.number = number + 1
        header = Header(kind, number, len(body) + PROOF_BYTES if length is None else length).pack()
        return header + body + proof_of(tickets, nonce=nonce or self.nonce, message=header + body)


@pytest.fixture
def chain():
    return _chain


@pytest.fixture
def payload():
    return _payload


@pytest.fixture
def key_space():
    return KEY_SPACE


@pytest.fixture
def connect():
    return OracleClient


@pytest.fixture
def node_config(tmp_path):
    def make(**keys):
        defaults = {
            "node_id": "node-a",
            "host_capacity": Bytes(4 * MIB),
            "region_bytes": Bytes(256 * KIB),
            "ssd_capacity": Bytes(8 * MIB),
            "tick_every": milliseconds(20),
            "scrub_rate": Bytes(0),
        }
        if keys.pop("ssd", False):
            defaults["ssd_path"] = tmp_path / "ssd"
        return NodeConfig(**(defaults | keys))

    return make


@pytest.fixture
def serving(node_config):
    """`async with serving(ssd=True, ...) as (server, client)`: a node in this process."""

    @asynccontextmanager
    async def serve(*, views=None, wrap_ssd=lambda regions: regions, **keys):
        server = NodeServer(node_config(**keys), views=views or StaticViews(View(Epoch(1))), wrap_ssd=wrap_ssd)
        await server.start()
        client = OracleClient(server.address)
        try:
            yield server, client
        finally:
            await client.close()
            await server.stop()

    return serve


@pytest.fixture
def node_process(tmp_path):
    """`with node_process(redis, ...) as (popen, address)`: one `python -m kvstore.node` with an SSD tier that has said READY."""

    @contextmanager
    def start(redis, **keys):
        flags = {
            "node_id": "node-p",
            "redis_url": redis.url,
            "host_capacity": "4MiB",
            "region_bytes": "256KiB",
            "ssd_capacity": "8MiB",
            "ssd_path": str(tmp_path / "ssd"),
        }
        command = [sys.executable, "-m", "kvstore.node", *(f"--{key}={value}" for key, value in (flags | keys).items())]
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            ready = popen.stdout.readline().split()
            assert ready[:1] == ["READY"]
            yield popen, ready[3].removeprefix("rpc=")
        finally:
            popen.kill()
            popen.wait(timeout=20)
            popen.stdout.close()

    return start


@pytest.fixture
def raw():
    """`async with raw(server) as connect`: `await connect()` gives a greeted connection to the TCP door."""

    @asynccontextmanager
    async def clients(server):
        socks = []

        async def connect(*, local=False):
            sock = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
            sock.setblocking(False)
            socks.append(sock)
            hello = server._hello()
            await asyncio.get_running_loop().sock_connect(sock, "\0" + hello.local_door if local else ("127.0.0.1", hello.data_port))
            return await RawClient(sock).greeted()

        try:
            yield connect
        finally:
            for sock in socks:
                sock.close()

    return clients


@pytest.fixture
def refused():
    """How many connections a node has refused, by reason."""

    def count(server):
        return {
            sample.labels["reason"]: sample.value
            for metric in server._metrics.data_refused.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.value
        }

    return count


@pytest.fixture
def eventually():
    """Waits for a condition that another task brings about; the bound is for a broken test, not a pause."""

    async def wait(condition, *, within_s=10.0):
        async with asyncio.timeout(within_s):
            while not (result := condition()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return result

    return wait


@pytest.fixture
def tiers_of():
    """Asks the node itself in which tiers each block is."""

    async def ask(server, refs, *, key_space=KEY_SPACE):
        request = LocateRequested(request_id=server.node.next_request_id(), key_space=key_space, hashes=tuple(ref.hash for ref in refs))
        return [place.tiers for place in (await server.node.ask(request, AnswerLocate)).places]

    return ask


@pytest.fixture
def push_to_ssd(tiers_of, chain_filler):
    """Puts other blocks until these have left the host tier for the SSD."""

    async def push(server, client, refs):
        async with asyncio.timeout(20):
            fillers = chain_filler()
            while set(tiers := await tiers_of(server, refs)) != {(Tier.SSD,)}:
                assert all(tiers), f"lost on the way to the SSD: {tiers}"
                [host, _] = server.status().tiers
                demoting = host.used_bytes > server.config.demote_above * host.capacity_bytes
                if demoting and not all(Tier.SSD in found for found in tiers):
                    await asyncio.sleep(0.005)  # more now would push them out of the host tier before they are on the SSD
                else:
                    await client.put(next(fillers))

    return push


@pytest.fixture
def chain_filler():
    def fillers():
        for number in itertools.count():
            yield _chain(f"filler-{number}", 8)

    return fillers
