"""Those who know the protocols and mean harm, or have a bug: the node refuses them in its own words and serves the others."""

import asyncio
import contextlib
import random
from collections import Counter

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from kvpb.v1 import admin_pb2, admin_pb2_grpc, peer_pb2, peer_pb2_grpc, store_pb2, store_pb2_grpc

from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus, ReserveItem, ReserveStatus
from kvstore.errors import ConfigError
from kvstore.ids import KeySpace, LeaseId, Namespace
from kvstore.node import data_connection, data_doors
from kvstore.rpc.errors import CODE_OF
from kvstore.transport.control_frames import (
    AcquireBody,
    ReleaseBody,
    ReserveBody,
    pack_commit,
    unpack_acquired,
    unpack_committed,
    unpack_grants,
)
from kvstore.transport.frames import (
    HEADER_BYTES,
    MAX_ITEMS,
    FrameKind,
    Header,
    ReadBody,
    UcxPart,
    WriteItem,
    pack_write_body,
    unpack_tokens,
)
from kvstore.transport.ticket import Ticket
from kvstore.transport.ucx_worker import open_worker, ucx_obstacle
from kvstore.units import MIB, Bytes, milliseconds, seconds

PAYLOAD_BYTES = 20_000
EXPECTED = {grpc.StatusCode.OK, *CODE_OF.values()} - {grpc.StatusCode.INTERNAL}


class Line:
    """A control line, one question at a time."""

    def __init__(self, client):
        self._client = client

    async def begin(self):
        await self._client.send(Header(FrameKind.CONTROL, 0, 0).pack())
        self._client.number = 1
        return self

    async def ask(self, kind, body):
        """The body of the answer; None where there is none."""
        await self._client.send(Header(kind, self._client.number, len(body)).pack() + body)
        self._client.number += 1
        if kind is FrameKind.RELEASE:
            return None
        header = Header.unpack(await self._client.receive(HEADER_BYTES))
        assert (header.kind, header.number) == (FrameKind.ANSWER, self._client.number - 1)
        return await self._client.receive(header.length) if header.length else b""


def test_a_control_line_takes_duplicates_repeats_and_what_is_not_ones_own_for_what_they_are(
    serving, chain, payload, key_space, raw, eventually
):
    async def test():
        async with serving(ssd=True) as (server, client), raw(server) as connect:
            line = await Line(await connect()).begin()
            refs = chain("a", 3)
            items = tuple(ReserveItem(ref, PAYLOAD_BYTES, None) for ref in [*refs, refs[0]])
            grants = unpack_grants(await line.ask(FrameKind.RESERVE, ReserveBody(key_space, items).pack()))
            assert [grant.status for grant in grants] == [ReserveStatus.GRANTED] * 3 + [ReserveStatus.PENDING]
            writer = await connect()
            written = [grants[0], grants[0], grants[1]]  # one extent twice in one request
            tickets = [Ticket.from_bytes(grant.ticket) for grant in written]
            body = pack_write_body(
                [WriteItem(grant.write_token, PAYLOAD_BYTES, ticket.expires_at) for grant, ticket in zip(written, tickets, strict=True)]
            )
            payloads = [b"x" * PAYLOAD_BYTES, payload(refs[0]), payload(refs[1])]
            await writer.send(writer.request(FrameKind.WRITE, body, tickets) + b"".join(payloads))
            header = Header.unpack(await writer.receive(HEADER_BYTES))
            assert (header.kind, header.length) == (FrameKind.WRITTEN, 0)
            first, second = [(grants[at].write_token, payload_checksum(payload(refs[at]))) for at in (0, 1)]
            commit = pack_commit([first, first, second, (grants[2].write_token, 0), (12345, 0)])
            assert unpack_committed(await line.ask(FrameKind.COMMIT, commit)) == [
                CommitStatus.STORED,
                CommitStatus.EXPIRED,
                CommitStatus.STORED,
                CommitStatus.INCOMPLETE,
                CommitStatus.EXPIRED,
            ]
            assert unpack_committed(await line.ask(FrameKind.COMMIT, commit)) == [CommitStatus.EXPIRED] * 5
            await writer.send(writer.request(FrameKind.WRITE, body, tickets) + b"y" * (3 * PAYLOAD_BYTES))  # its tickets are still good
            refused = await writer.receive(Header.unpack(await writer.receive(HEADER_BYTES)).length)
            assert unpack_tokens(refused) == {grants[0].write_token, grants[1].write_token}

            asked = AcquireBody(key_space, None, (refs[0], refs[0], refs[1], refs[0])).pack()
            mine = unpack_acquired(await line.ask(FrameKind.ACQUIRE, asked))
            assert [copy.checksum for copy in mine.copies] == [first[1], first[1], second[1], first[1]]
            theirs = await client.acquire(refs[:2])
            stranger = key_space._replace(namespace="stranger")
            for lease_id in (mine.lease_id, theirs.lease_id, LeaseId(0), LeaseId((1 << 64) - 1)):
                await line.ask(FrameKind.RELEASE, ReleaseBody(lease_id, stranger, ()).pack())
                await line.ask(FrameKind.RELEASE, ReleaseBody(lease_id, stranger, (refs[0].hash,) * 3).pack())
            await line.ask(FrameKind.RELEASE, ReleaseBody(mine.lease_id, key_space, (refs[0].hash, refs[0].hash, refs[2].hash)).pack())
            await line.ask(FrameKind.ACQUIRE, AcquireBody(key_space, None, ()).pack())  # behind what has no answer
            assert await client.read(theirs.lease_id, refs[:2]) == [ReadStatus.OK] * 2
            assert await client.read(mine.lease_id, refs[:2]) == [ReadStatus.NOT_LEASED, ReadStatus.OK]
            for _ in range(2):
                await line.ask(FrameKind.RELEASE, ReleaseBody(mine.lease_id, key_space, ()).pack())
            await client.stub.release(theirs.lease_id, key_space, timeout=seconds(20))
            await eventually(lambda: server.status().leases == 0)
            assert server.status().reservations == 0

    asyncio.run(test())


@pytest.mark.parametrize("size", [4 * MIB + 1, (1 << 31), (1 << 32) - 1])
def test_what_is_too_large_for_a_node_is_said_of_that_block_alone(serving, chain, key_space, raw, size):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 2)
            items = (ReserveItem(refs[0], size, None), ReserveItem(refs[1], PAYLOAD_BYTES, None))
            line = await Line(await connect()).begin()
            grants = unpack_grants(await line.ask(FrameKind.RESERVE, ReserveBody(key_space, items).pack()))
            assert [grant.status for grant in grants] == [ReserveStatus.TOO_LARGE, ReserveStatus.GRANTED]
            by_grpc = await client.stub.reserve(key_space, items, timeout=seconds(20))
            assert [grant.status for grant in by_grpc] == [ReserveStatus.TOO_LARGE, ReserveStatus.PENDING]

    asyncio.run(test())


@pytest.mark.parametrize("size", [0, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_a_length_that_no_payload_can_have_ends_the_line(serving, chain, key_space, raw, refused, size):
    async def test():
        async with serving() as (server, _), raw(server) as connect:
            client = await connect()
            body = ReserveBody(key_space, (ReserveItem(chain("a", 1)[0], size, None),)).pack()
            await client.send(Header(FrameKind.CONTROL, 0, 0).pack() + Header(FrameKind.RESERVE, 1, len(body)).pack() + body)
            assert await client.closed()
            assert refused(server) == {"bad_length": 1}
            assert server.status().reservations == 0

    asyncio.run(test())


def test_a_hundred_thousand_hashes_are_refused_before_they_have_come(serving, chain, key_space, raw, refused):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 1)
            await client.store(refs)
            most = await Line(await connect()).begin()
            found = unpack_acquired(await most.ask(FrameKind.ACQUIRE, AcquireBody(key_space, None, tuple(refs * MAX_ITEMS)).pack()))
            assert len(found.copies) == MAX_ITEMS
            assert all(found.copies)
            greedy = await connect()
            body = AcquireBody(key_space, None, tuple(refs * 100_000)).pack()
            await greedy.send(Header(FrameKind.CONTROL, 0, 0).pack() + Header(FrameKind.ACQUIRE, 1, len(body)).pack())
            assert await greedy.closed()
            assert refused(server) == {"bad_length": 1}

    asyncio.run(test())


@pytest.mark.parametrize("kind", [FrameKind.READ, FrameKind.WRITE, FrameKind.FETCH])
def test_a_request_that_never_stands_still_and_never_comes_to_its_end_is_cut_off(serving, raw, refused, monkeypatch, kind):
    if kind is FrameKind.FETCH and ucx_obstacle() is not None:
        pytest.skip("ucxx is not installed")
    monkeypatch.setattr(data_connection, "WHOLE_REQUEST", milliseconds(300))

    async def test():
        async with serving() as (server, _), raw(server) as connect:
            slow = await connect()
            await slow.send(Header(kind, 0, 100_000).pack())
            ended = asyncio.ensure_future(slow.closed())
            while not ended.done():
                try:
                    await slow.send(b"x")
                except ConnectionError:
                    break
                await asyncio.sleep(0.01)
            assert await ended
            assert refused(server) == {"too_slow": 1}

    asyncio.run(test())


def test_bytes_without_a_reservation_are_not_taken_for_ever(serving, chain, raw, key_space, refused, eventually):
    async def test():
        async with serving(reservation_ttl=milliseconds(300)) as (server, client), raw(server) as connect:
            [grant] = await client.reserve(chain("a", 1))
            ticket = Ticket.from_bytes(grant.ticket)
            slow = await connect()
            body = pack_write_body([WriteItem(grant.write_token, PAYLOAD_BYTES, ticket.expires_at)])
            await slow.send(slow.request(FrameKind.WRITE, body, [ticket]))
            ended = asyncio.ensure_future(slow.closed())
            while not ended.done():
                try:
                    await slow.send(b"x")
                except ConnectionError:
                    break
                await asyncio.sleep(0.01)
            assert await ended
            assert refused(server) == {"cut": 1}
            assert server.status().reservations == 0

    asyncio.run(test())


def test_a_crowd_at_one_door_leaves_the_other_open(serving, chain, raw, refused, monkeypatch, eventually):
    monkeypatch.setattr(data_doors, "MOST_CONNECTIONS", 20)

    async def test():
        async with serving() as (server, client), raw(server) as connect:
            for _ in range(20):
                await connect()
            assert server.status().data_connections["tcp"] == 20
            for _ in range(30):
                with pytest.raises((AssertionError, ConnectionError)):
                    await connect()
            assert refused(server) == {"too_many": 30}
            await connect(local=True)
            await client.store(chain("a", 2))
            assert await client.get(chain("a", 2)) == 2
        async with serving() as (server, _), raw(server) as connect:
            await connect()

    asyncio.run(test())


@pytest.mark.skipif(ucx_obstacle() is not None, reason="ucxx is not installed")
def test_a_reader_by_ucx_that_outstays_its_time_gets_nothing_of_what_lies_there_then(serving, chain, payload, key_space, raw):
    """Its messages are given to UCX all at once, and taken back before their memory is another block's."""

    async def test():
        async with serving(host_capacity=Bytes(4 * MIB)) as (server, client), raw(server) as connect:
            refs = chain("a", 3)
            await client.store(refs, size=MIB)
            acquired = await client.acquire(refs)
            ticket = Ticket.from_bytes(acquired.ticket)
            worker = await open_worker(net_devices="lo")
            reader = await connect()
            await reader.send(Header(FrameKind.UCX, 0, 0).pack())
            reader.number = 1
            node_address = await reader.receive(Header.unpack(await reader.receive(HEADER_BYTES)).length)
            body = ReadBody(acquired.lease_id, ticket.expires_at, key_space, tuple(ref.hash for ref in refs)).pack()
            await reader.send(reader.request(FrameKind.FETCH, UcxPart(7, worker.address).pack() + body, [ticket]))
            await reader.receive(HEADER_BYTES + 3)
            way = worker.connect(node_address)
            memory = [memoryview(bytearray(MIB)) for _ in refs]
            await asyncio.wait_for(way.receive(memory[0], 7), 20)
            assert bytes(memory[0]) == payload(refs[0], MIB)
            [read] = server.node._reads.values()
            read.finish()  # as the core has it done when the time of a read is over
            await client.stub.release(acquired.lease_id, key_space, timeout=seconds(20))
            await client.store(chain("b", 3), size=MIB)  # where the others lay
            last = way.receive(memory[2], 9)
            assert await reader.closed()
            await asyncio.wait([last], timeout=0.2)
            assert bytes(memory[2]) in (bytes(MIB), payload(refs[2], MIB)), "foreign bytes"
            worker.close()

    asyncio.run(test())


@pytest.mark.skipif(ucx_obstacle() is not None, reason="ucxx is not installed")
def test_a_request_by_ucx_where_ucx_does_not_start_ends_its_connection_alone(serving, chain, key_space, raw, refused, monkeypatch):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 1)
            await client.store(refs)
            acquired = await client.acquire(refs)
            ticket = Ticket.from_bytes(acquired.ticket)
            monkeypatch.setenv("UCX_TLS", "carrier-pigeon")
            reader = await connect()
            body = ReadBody(acquired.lease_id, ticket.expires_at, key_space, (refs[0].hash,)).pack()
            await reader.send(reader.request(FrameKind.FETCH, UcxPart(7, b"a" * 40).pack() + body, [ticket]))
            assert await reader.closed()
            assert refused(server) == {"no_ucx": 1}
            assert await client.get(refs) == 1

    asyncio.run(test())


def test_a_lease_or_reservation_longer_than_its_messages_can_say_is_a_config_error(node_config):
    for key in ("lease_ttl", "reservation_ttl"):
        with pytest.raises(ConfigError, match="at most a day"):
            node_config(**{key: seconds(86_401)})


NUMBERS = (0, 1, 255, 4096, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SERVICES = (
    (store_pb2, "StoreService", store_pb2_grpc.StoreServiceStub),
    (admin_pb2, "AdminService", admin_pb2_grpc.AdminServiceStub),
    (peer_pb2, "PeerService", peer_pb2_grpc.PeerServiceStub),
)


class StrangeRequests:
    """Fields left out, absurd numbers, unknown enum values, hashes of other lengths, in messages that are well formed otherwise."""

    def __init__(self, seed, hashes, key_space):
        self._rng = random.Random(seed)
        self._hashes = hashes
        self._key_space = key_space

    def of(self, descriptor):
        return self._fill(message_factory.GetMessageClass(descriptor)())

    def _fill(self, message):
        rng = self._rng
        for field in message.DESCRIPTOR.fields:
            if rng.random() < 0.05:
                continue
            several = field.is_repeated
            for _ in range(rng.choice((0, 1, 2, 5)) if several else 1):
                if field.message_type is not None:
                    self._fill(getattr(message, field.name).add() if several else getattr(message, field.name))
                elif several:
                    getattr(message, field.name).append(self._value(field))
                else:
                    setattr(message, field.name, self._value(field))
        return message

    def _value(self, field):
        rng = self._rng
        known = {"namespace": self._key_space.namespace, "layout_fingerprint": self._key_space.layout}
        if field.name in known and rng.random() < 0.95:
            return known[field.name]
        match field.type:
            case FieldDescriptor.TYPE_BYTES if field.name != "data":
                return rng.choice(self._hashes) if rng.random() < 0.97 else rng.choice((b"", b"x" * 31, b"x" * 33, bytes(100_000)))
            case FieldDescriptor.TYPE_BYTES:
                return bytes(rng.choice((0, 1, 100, PAYLOAD_BYTES)))
            case FieldDescriptor.TYPE_STRING:
                return rng.choice(("", "node-a", "\0", "x" * 255, "\u00fc" * 200))
            case FieldDescriptor.TYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.TYPE_ENUM:
                return rng.choice((0, 1, 3, 99, -1, (1 << 31) - 1))
            case FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_FIXED32:
                return rng.choice([number for number in NUMBERS if number < 1 << 32])
        return rng.choice((*NUMBERS, PAYLOAD_BYTES, PAYLOAD_BYTES))


def test_whatever_a_call_says_it_is_answered_or_refused_in_our_own_words(serving, chain, key_space, seed):
    """A status that is not in our table would be a bug that got as far as gRPC."""

    async def test():
        async with serving(ssd=True) as (_, client):
            refs = chain("a", 4)
            await client.store(refs)
            strange = StrangeRequests(seed, [ref.hash for ref in refs], key_space)
            seen = Counter()
            for module, name, stub in SERVICES:
                calls = stub(client.channel)
                for method in module.DESCRIPTOR.services_by_name[name].methods:
                    for _ in range(25):
                        requests = [strange.of(method.input_type) for _ in range(3 if method.client_streaming else 1)]
                        call = getattr(calls, method.name)(iter(requests) if method.client_streaming else requests[0], timeout=20)
                        with contextlib.suppress(grpc.aio.AioRpcError):  # its code is looked at below
                            if method.name == "Events":  # has no end
                                await call.read()
                                call.cancel()
                                continue
                            if method.server_streaming:
                                async for _answer in call:
                                    pass
                            else:
                                await call
                        code = await call.code()
                        assert code in EXPECTED, (method.name, requests, code, await call.details())
                        seen[code is grpc.StatusCode.OK] += 1
            assert min(seen.values()) > 100, seen
            await client.store(refs, key_space=KeySpace(Namespace("another"), key_space.layout))  # strange quotas are on the first

    asyncio.run(test())
