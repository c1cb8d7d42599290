"""Everything at once, against the oracle: puts, reads, evictions, deletes, complaints and bad disks never give a foreign byte."""

import asyncio
import random

import pytest
from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus, ReserveStatus
from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.units import MIB, Bytes, seconds

SOON = seconds(20)
CHAINS = 40
ROUNDS = 60


@pytest.mark.parametrize("ssd", [False, True])
def test_many_clients_at_once_read_only_what_the_oracle_says_and_leave_nothing(serving, chain, eventually, seed, ssd):
    async def worker(client, rng, sizes):
        for _ in range(ROUNDS):
            name = rng.randrange(CHAINS)
            refs, size = chain(f"c{name}", 8), sizes[name]
            match rng.randrange(10):
                case 0 | 1 | 2:
                    statuses = await client.put(refs, size=size)
                    assert set(statuses) <= {CommitStatus.STORED, CommitStatus.EXPIRED, *ReserveStatus}
                case 3:
                    await client.reserve(refs[:2], size=size)
                case 4:
                    await client.stub.delete(client.key_space, refs[rng.randrange(8) :], timeout=SOON)
                case 5:
                    request = admin_pb2.EvictRequest(namespace=client.key_space.namespace)
                    await admin_pb2_grpc.AdminServiceStub(client.channel).Evict(request)
                case _:
                    acquired = await client.acquire(refs)
                    found = [ref for ref, copy in zip(refs, acquired.copies, strict=True) if copy is not None]
                    statuses = await client.read(acquired.lease_id, found, size=size) if found else []
                    assert set(statuses) <= {ReadStatus.OK, ReadStatus.CORRUPT, ReadStatus.IO_ERROR}
                    corrupt = [ref.hash for ref in found[:1]] if rng.random() < 0.1 else []
                    await client.stub.release(acquired.lease_id, client.key_space, corrupt_hashes=corrupt, timeout=SOON)

    async def scenario():
        faults = Faults(failing_reads=2, flipped_reads=3, short_reads=2)
        rng = random.Random(seed)
        sizes = [rng.choice([1, 5_000, 20_000, 60_000]) for _ in range(CHAINS)]
        async with serving(
            ssd=ssd, host_capacity=Bytes(2 * MIB), reservation_ttl=seconds(0.5), wrap_ssd=lambda regions: FaultyTier(regions, faults)
        ) as (server, client):
            async with asyncio.TaskGroup() as workers:
                for number in range(6):
                    workers.create_task(worker(client, random.Random(seed + number), sizes))
            await eventually(lambda: server.status().reservations == 0 and server.status().leases == 0 and server.node.reads == 0)
            await admin_pb2_grpc.AdminServiceStub(client.channel).Evict(admin_pb2.EvictRequest(all=True))
            await eventually(lambda: server.node.state.status().operations == 0)
            await admin_pb2_grpc.AdminServiceStub(client.channel).Evict(admin_pb2.EvictRequest(all=True))
            status = server.status()
            assert (status.blocks, [usage.used_bytes for usage in status.tiers]) == (0, [0] * (2 if ssd else 1))
            assert len(server.node.incoming) == 0

    asyncio.run(scenario())
