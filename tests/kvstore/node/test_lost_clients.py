"""A client that goes away in the middle leaves nothing behind: no reservation, no lease, no read, no bytes."""

import asyncio
import sys
import threading
from contextlib import aclosing

import grpc
import pytest
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import ReserveStatus
from kvstore.errors import LarderError
from kvstore.rpc.channel import open_channel
from kvstore.rpc.store_stub import WrittenChunk
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.units import MIB, Bytes, seconds

SOON = seconds(20)


def ended_reads(server):
    [metric] = server._metrics._read_seconds.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_count"))


def test_a_writer_that_goes_away_in_the_middle_of_a_payload_frees_its_room_at_once(serving, chain, eventually):
    async def scenario():
        async with serving() as (server, client):
            refs = chain("a", 3)
            grants = await client.reserve(refs, size=MIB)
            reached = asyncio.Event()

            async def half_a_payload():
                yield store_pb2.WriteChunk(write_token=grants[0].write_token, offset_bytes=0, data=bytes(100_000))
                reached.set()
                await asyncio.Event().wait()

            channel = open_channel(server.address)
            call = store_pb2_grpc.StoreServiceStub(channel).WritePayloads(half_a_payload())
            await reached.wait()
            await eventually(lambda: server.node.incoming.received_bytes(grants[0].write_token))
            call.cancel()
            await channel.close()
            await eventually(lambda: not server.node.incoming.is_open(grants[0].write_token))
            assert (await client.reserve(refs[:1]))[0].status is ReserveStatus.GRANTED
            assert server.node.incoming.is_open(grants[1].write_token), "what it had not begun is left to its time"

    asyncio.run(scenario())


def test_a_refused_stream_frees_what_it_had_begun(serving, chain, eventually):
    async def scenario():
        async with serving() as (server, client):
            [grant] = await client.reserve(chain("a", 1), size=MIB)
            chunks = [WrittenChunk(grant.write_token, Bytes(0), bytes(10)), WrittenChunk(grant.write_token, Bytes(10), bytes(2 * MIB))]
            with pytest.raises(LarderError):
                await client.stub.write_payloads(chunks, timeout=SOON)
            await eventually(lambda: not server.node.incoming.is_open(grant.write_token))

    asyncio.run(scenario())


def test_a_reservation_whose_writer_never_comes_back_is_swept_by_the_timer_alone(serving, chain, eventually):
    async def scenario():
        async with serving(reservation_ttl=seconds(0.2)) as (server, client):
            await client.reserve(chain("a", 5))
            await eventually(lambda: len(server.node.incoming) == 0)

    asyncio.run(scenario())


_CLIENT = """
import asyncio, sys
from kvstore.client import ClientConfig, StoreClient
from kvstore.core.view import Member, Role, View
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, LayoutFingerprint, Namespace, NodeId, StripeId
from kvstore.registry.view_source import StaticViews
from kvstore.units import Bytes, seconds

async def main(address, boot_id, namespace, layout, *blocks):
    member = Member(node_id=NodeId("node-a"), boot_id=BootId(bytes.fromhex(boot_id)), role=Role.STORE, address=address)
    refs = [BlockRef(*(kind(bytes.fromhex(part)) for kind, part in zip((BlockHash, BlockHash, StripeId), block.split(":"))), index)
            for index, block in enumerate(blocks)]
    key_space = KeySpace(Namespace(namespace), LayoutFingerprint(bytes.fromhex(layout)))
    config = ClientConfig(transports=("shm",), rpc_timeout=seconds(1), lease_ttl=seconds(3))
    client = StoreClient(StaticViews(View(Epoch(2), (member,))), replicas=1, config=config)
    lease = await client.acquire_prefix(key_space, refs[:2])
    mapped = [block async for block in client.read(lease, in_place=True)]
    assert all(block.payload.readonly for block in mapped)
    await client._nodes.call(member.node_id, lambda stub: stub.reserve(key_space, [(refs[2], Bytes(1000))], timeout=seconds(1)))
    print("HELD", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_process_killed_with_the_arena_mapped_a_lease_and_a_reservation_leaves_nothing_after_their_time(serving, chain, eventually):
    async def scenario():
        async with serving(reservation_ttl=seconds(2)) as (server, client):
            refs = chain("a", 3)
            await client.store(refs[:2])
            blocks = [":".join((ref.hash.hex(), ref.parent.hex(), ref.stripe.hex())) for ref in refs]
            key_space = client.key_space
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-c",
                    _CLIENT,
                    server.address,
                    server.boot_id.hex(),
                    key_space.namespace,
                    key_space.layout.hex(),
                    *blocks,
                ),
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert (await process.stdout.readline()).strip() == b"HELD"
                assert (server.status().leases, server.status().data_connections["local"] > 0) == (1, True)
            finally:
                process.kill()
                await process.wait()
            await eventually(lambda: server.status().leases == 0 and server.status().reservations == 0)
            await eventually(lambda: server.status().data_connections["local"] == 0)
            assert (await client.reserve(refs[2:]))[0].status is ReserveStatus.GRANTED, "the room is there again"

    asyncio.run(scenario())


def test_a_writer_that_falls_silent_is_cut_off(serving, chain):
    async def scenario():
        async with serving(reservation_ttl=seconds(0.2)) as (server, client):
            [grant] = await client.reserve(chain("a", 1))

            async def silence():
                yield store_pb2.WriteChunk(write_token=grant.write_token, offset_bytes=0, data=b"x")
                await asyncio.Event().wait()

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await store_pb2_grpc.StoreServiceStub(client.channel).WritePayloads(silence(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert len(server.node.incoming) == 0

    asyncio.run(scenario())


def test_a_reader_that_goes_away_in_the_middle_gives_its_copies_back(serving, chain, eventually):
    async def scenario():
        async with serving(lease_ttl=seconds(0.3), host_capacity=Bytes(40 * MIB)) as (server, client):
            refs = chain("a", 32)
            await client.store(refs, size=MIB)
            acquired = await client.acquire(refs)
            hashes = [ref.hash for ref in refs]
            async with aclosing(client.stub.read_payloads(acquired.lease_id, client.key_space, hashes, timeout=SOON)) as chunks:
                await anext(chunks)
                assert server.node.reads == 1
            await eventually(lambda: server.node.reads == 0)
            await eventually(lambda: server.status().leases == 0)

    asyncio.run(scenario())


def test_a_reader_that_takes_nothing_is_cut_off_and_never_gets_foreign_bytes(serving, chain, payload, eventually):
    """Its lease ends, its read is cancelled, its extents go to other blocks; what it then takes from its buffers is still its own."""

    async def scenario():
        async with serving(lease_ttl=seconds(0.5), read_deadline=seconds(0.5), host_capacity=Bytes(33 * MIB)) as (server, client):
            refs = chain("a", 32)
            await client.store(refs, size=MIB)
            acquired = await client.acquire(refs)
            slow = grpc.aio.insecure_channel(server.address, options=[("grpc.http2.lookahead_bytes", 0)])
            request = store_pb2.ReadRequest(
                lease_id=acquired.lease_id,
                key_space={"namespace": client.key_space.namespace, "layout_fingerprint": client.key_space.layout},
                hashes=[ref.hash for ref in refs],
            )
            call = store_pb2_grpc.StoreServiceStub(slow).ReadPayloads(request)
            await eventually(lambda: server.node.reads == 1)
            await eventually(lambda: server.node.reads == 0)
            await eventually(lambda: server.status().leases == 0)
            await eventually(lambda: ended_reads(server) == 1)
            await client.store(chain("b", 32), size=MIB)  # all of the arena is rewritten
            received = [bytearray() for _ in refs]
            try:
                while (chunk := await call.read()) is not grpc.aio.EOF:
                    received[chunk.item] += chunk.data
                    assert chunk.status in (int(ReadStatus.OK), int(ReadStatus.NOT_LEASED))
            except grpc.aio.AioRpcError:
                pass  # cut off
            for ref, data in zip(refs, received, strict=True):
                assert payload(ref, MIB).startswith(bytes(data)), "foreign bytes"
            assert len(received[-1]) < MIB, "the reader was not slow enough for this test to mean anything"
            await slow.close()

    asyncio.run(scenario())


def test_a_disk_that_hangs_is_an_io_error_within_the_deadline_and_its_copies_are_not_given_up(serving, chain, push_to_ssd):
    async def scenario():
        faults = Faults()
        released = threading.Event()
        async with serving(ssd=True, read_deadline=seconds(0.3), wrap_ssd=lambda regions: FaultyTier(regions, faults)) as (server, client):
            refs = chain("a", 2)
            await client.store(refs)
            await push_to_ssd(server, client, refs)
            faults.before_read = released.wait
            acquired = await client.acquire(refs)
            assert set(await client.read(acquired.lease_id, refs)) <= {ReadStatus.IO_ERROR, ReadStatus.NOT_LEASED}
            assert server.node.reads == 0
            released.set()
            assert await client.get(refs) == 2

    asyncio.run(scenario())
