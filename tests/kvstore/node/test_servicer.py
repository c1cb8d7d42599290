import asyncio

import grpc
import pytest
from kvpb.v1 import store_pb2

from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus, ReserveStatus
from kvstore.core.extent import Tier
from kvstore.errors import InvalidRequest, LeaseExpired
from kvstore.ids import KeySpace, LayoutFingerprint, LeaseId, Namespace, WriteToken
from kvstore.rpc.convert import MAX_BATCH_ITEMS, MAX_CHUNK_BYTES, block_ref_to_proto, key_space_to_proto
from kvstore.rpc.store_stub import WrittenChunk
from kvstore.units import MIB, Bytes, seconds

SOON = seconds(20)


def test_hello_says_who_answers(serving):
    async def scenario():
        async with serving() as (server, client):
            greeting = await client.stub.hello(timeout=SOON)
            assert (greeting.node_id, greeting.boot_id, greeting.epoch) == ("node-a", server.boot_id, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 4096, 20_000, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, 3 * MIB])
def test_what_is_put_is_read_back_byte_for_byte(serving, chain, size):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 1)
            assert await client.put(refs, size=size) == [CommitStatus.STORED]
            acquired = await client.acquire(refs)
            assert acquired.copies[0].payload_bytes == size
            assert acquired.copies[0].tier is Tier.HOST
            assert await client.read(acquired.lease_id, refs, size=size) == [ReadStatus.OK]

    asyncio.run(scenario())


def test_a_batch_is_answered_item_by_item_in_the_order_asked(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 20)
            await client.store(refs[:5])
            statuses = await client.put(refs)
            assert statuses == [ReserveStatus.EXISTS] * 5 + [CommitStatus.STORED] * 15
            assert await client.get(refs) == 20

    asyncio.run(scenario())


def test_a_prefix_ends_at_the_first_block_that_is_not_there(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 8)
            await client.store(refs[:3] + refs[4:])
            assert await client.stub.probe_prefix(client.key_space, refs, timeout=SOON) == [True] * 3 + [False] + [True] * 4
            acquired = await client.acquire(refs)
            assert [copy is not None for copy in acquired.copies] == [True] * 3 + [False] * 5

    asyncio.run(scenario())


def test_nothing_is_listed_before_its_bytes_are_down_and_checked(serving, chain, payload):
    async def scenario():
        async with serving() as (_, client):
            [ref] = chain("a", 1)
            [grant] = await client.reserve([ref])
            assert await client.stub.probe_prefix(client.key_space, [ref], timeout=SOON) == [False]
            await client.stub.write_payloads([WrittenChunk(grant.write_token, Bytes(0), payload(ref))], timeout=SOON)
            assert await client.stub.probe_prefix(client.key_space, [ref], timeout=SOON) == [False]
            assert await client.stub.commit([(grant.write_token, payload_checksum(payload(ref)))], timeout=SOON) == [CommitStatus.STORED]
            assert await client.stub.probe_prefix(client.key_space, [ref], timeout=SOON) == [True]

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [20_000, 2 * MIB + 1])
def test_bytes_flipped_on_the_wire_are_refused_at_commit_and_never_listed(serving, chain, payload, size):
    async def scenario():
        async with serving() as (_, client):
            [ref] = chain("a", 1)
            [grant] = await client.reserve([ref], size=size)
            flipped = bytearray(payload(ref, size))
            flipped[size // 2] ^= 1
            chunks = [
                WrittenChunk(grant.write_token, Bytes(offset), bytes(flipped[offset : offset + MIB])) for offset in range(0, size, MIB)
            ]
            await client.stub.write_payloads(chunks, timeout=SOON)
            statuses = await client.stub.commit([(grant.write_token, payload_checksum(payload(ref, size)))], timeout=SOON)
            assert statuses == [CommitStatus.BAD_CHECKSUM]
            assert await client.stub.probe_prefix(client.key_space, [ref], timeout=SOON) == [False]
            assert await client.put([ref], size=size) == [CommitStatus.STORED]

    asyncio.run(scenario())


def test_a_commit_without_bytes_is_incomplete(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            [grant] = await client.reserve(chain("a", 1))
            assert await client.stub.commit([(grant.write_token, 1)], timeout=SOON) == [CommitStatus.INCOMPLETE]
            assert await client.put(chain("a", 1)) == [CommitStatus.STORED]

    asyncio.run(scenario())


def test_a_payload_that_ends_with_its_stream_before_its_end_is_given_up(serving, chain, payload):
    async def scenario():
        async with serving() as (_, client):
            [ref] = chain("a", 1)
            [grant] = await client.reserve([ref])
            await client.stub.write_payloads([WrittenChunk(grant.write_token, Bytes(0), payload(ref)[:100])], timeout=SOON)
            assert await client.stub.commit([(grant.write_token, 1)], timeout=SOON) == [CommitStatus.EXPIRED]
            assert await client.put([ref]) == [CommitStatus.STORED]

    asyncio.run(scenario())


def test_chunks_out_of_order_past_the_end_or_without_a_reservation_are_refused_alone(serving, chain, payload):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 3)
            good, gap, long = [grant.write_token for grant in await client.reserve(refs)]
            unknown = WriteToken(12345)
            chunks = [
                WrittenChunk(gap, Bytes(5000), b"x" * 100),
                WrittenChunk(long, Bytes(0), b"x" * 20_001),
                WrittenChunk(unknown, Bytes(0), b"x"),
                WrittenChunk(good, Bytes(0), payload(refs[0])),
            ]
            assert await client.stub.write_payloads(chunks, timeout=SOON) == {gap, long, unknown}
            assert await client.stub.commit([(good, payload_checksum(payload(refs[0])))], timeout=SOON) == [CommitStatus.STORED]

    asyncio.run(scenario())


def test_a_late_commit_with_an_old_token_is_refused(serving, chain, payload):
    async def scenario():
        async with serving(reservation_ttl=seconds(0.1)) as (_, client):
            [ref] = chain("a", 1)
            [old] = await client.reserve([ref])
            async with asyncio.timeout(5):
                while (await client.reserve([ref]))[0].status is ReserveStatus.PENDING:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            refused = await client.stub.write_payloads([WrittenChunk(old.write_token, Bytes(0), payload(ref))], timeout=SOON)
            assert refused == {old.write_token}
            committed = await client.stub.commit([(old.write_token, payload_checksum(payload(ref)))], timeout=SOON)
            assert committed == [CommitStatus.EXPIRED]

    asyncio.run(scenario())


def test_a_token_of_another_boot_of_the_node_means_nothing(serving, chain, payload):
    async def scenario():
        refs = chain("a", 1)
        async with serving() as (_, client):
            [grant] = await client.reserve(refs)
            lease = (await client.acquire(refs)).lease_id
        async with serving() as (_, client):
            await client.reserve(refs)
            assert await client.stub.write_payloads([WrittenChunk(grant.write_token, Bytes(0), b"x")], timeout=SOON) == {grant.write_token}
            assert await client.read(lease or LeaseId(1), refs) == [ReadStatus.NOT_LEASED]

    asyncio.run(scenario())


def test_a_read_without_a_lease_or_after_it_gets_nothing(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 2)
            await client.store(refs)
            assert await client.read(LeaseId(99), refs) == [ReadStatus.NOT_LEASED] * 2
            acquired = await client.acquire(refs[:1])
            assert await client.read(acquired.lease_id, refs) == [ReadStatus.OK, ReadStatus.NOT_LEASED]
            await client.stub.release(acquired.lease_id, client.key_space, timeout=SOON)
            assert await client.read(acquired.lease_id, refs) == [ReadStatus.NOT_LEASED] * 2
            with pytest.raises(LeaseExpired):
                await client.stub.renew(acquired.lease_id, ttl=None, timeout=SOON)

    asyncio.run(scenario())


def test_a_renewed_lease_outlives_its_first_time(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 1)
            await client.store(refs)
            acquired = await client.acquire(refs, ttl=seconds(0.5))
            ttl, _ = await client.stub.renew(acquired.lease_id, ttl=seconds(30), timeout=SOON)
            assert ttl > seconds(20)

    asyncio.run(scenario())


def test_namespaces_and_layouts_do_not_see_one_another(serving, chain, key_space):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 2)
            await client.store(refs)
            for other in (KeySpace(Namespace("pantry"), key_space.layout), KeySpace(key_space.namespace, LayoutFingerprint(bytes(32)))):
                assert await client.get(refs, key_space=other) == 0
                await client.store(refs, key_space=other)
                assert await client.get(refs, key_space=other) == 2
            assert await client.get(refs) == 2

    asyncio.run(scenario())


def test_deleted_blocks_are_gone_and_the_others_stay(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            refs = chain("a", 4)
            await client.store(refs)
            assert await client.stub.delete(client.key_space, [refs[3], *chain("b", 1)], timeout=SOON) == [True, False]
            assert await client.get(refs) == 3

    asyncio.run(scenario())


def test_more_than_the_host_tier_holds_evicts_the_oldest_and_keeps_working(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            for number in range(30):
                await client.store(chain(f"c{number}", 16))  # 30 * 16 * 20 KB through 4 MiB
            assert await client.get(chain("c29", 16)) == 16
            assert await client.get(chain("c0", 16)) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_change", "words"),
    [
        (lambda request: request.items[0].block.__setattr__("hash", b"short"), "block.hash must have 32 bytes"),
        (lambda request: request.key_space.__setattr__("layout_fingerprint", b""), "layout_fingerprint must have 32 bytes"),
        (lambda request: request.key_space.__setattr__("namespace", ""), "namespace"),
        (lambda request: request.items[0].__setattr__("payload_bytes", 0), "payload_bytes must be 1 to"),
        (lambda request: request.items[0].__setattr__("payload_bytes", 1 << 62), "payload_bytes must be 1 to"),
        (lambda request: request.items[0].__setattr__("payload_bytes", (1 << 32) + 5), "payload_bytes must be 1 to"),
        (lambda request: request.items.extend([request.items[0]] * MAX_BATCH_ITEMS), f"at most {MAX_BATCH_ITEMS}"),
    ],
)
def test_an_absurd_reserve_is_refused_before_anything_is_allocated(serving, chain, key_space, request_change, words):
    async def scenario():
        async with serving() as (server, client):
            request = store_pb2.ReserveRequest(
                key_space=key_space_to_proto(key_space),
                items=[store_pb2.ReserveItem(block=block_ref_to_proto(chain("a", 1)[0]), payload_bytes=10)],
            )
            request_change(request)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.stub._stub.Reserve(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in caught.value.details()
            assert len(server.node.incoming) == 0

    asyncio.run(scenario())


def test_a_chunk_above_the_limit_is_refused(serving, chain):
    async def scenario():
        async with serving() as (_, client):
            [grant] = await client.reserve(chain("a", 1), size=2 * MIB)
            with pytest.raises(InvalidRequest, match="at most"):
                await client.stub.write_payloads([WrittenChunk(grant.write_token, Bytes(0), bytes(MAX_CHUNK_BYTES + 1))], timeout=SOON)

    asyncio.run(scenario())
