"""Nodes among themselves, and what operators ask: list, pull, repair, verify, locate, evict, status."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest
from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.core.extent import Tier
from kvstore.core.placement import place
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.errors import InvalidRequest, StaleView
from kvstore.ids import BootId, Epoch, NodeId
from kvstore.registry.view_source import StaticViews
from kvstore.rpc.convert import block_refs_to_proto, key_space_to_proto
from kvstore.rpc.peer_stub import PeerStub
from kvstore.units import seconds

SOON = seconds(20)


def members(servers, **states):
    return tuple(
        Member(
            node_id=NodeId(server.config.node_id),
            boot_id=BootId(server.boot_id),
            role=Role.STORE,
            address=server.address,
            state=states.get(server.config.node_id, MemberState.ACTIVE),
        )
        for server in servers
    )


@pytest.fixture
def cluster(serving):
    """Three nodes in this process, two replicas of each stripe, one view."""

    async def start(stack, names=("n1", "n2", "n3")):
        views = StaticViews(View(Epoch(1)))
        nodes = [await stack.enter_async_context(serving(views=views, node_id=name, replicas=2)) for name in names]
        views.replace(View(Epoch(2), members([server for server, _ in nodes])))
        return nodes, views

    return start


async def put_on_owners(nodes, views, refs):
    clients = {server.config.node_id: client for server, client in nodes}
    for ref in refs:
        for owner in place(ref.stripe, views.view, replicas=2):
            await clients[owner].store([ref])


def test_a_repair_fetches_what_a_new_owner_lacks_and_nothing_else(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            nodes, views = await cluster(stack)
            refs = chain("a", 64)
            await put_on_owners(nodes, views, refs)
            lost_server, lost_client = nodes[0]
            owned = [ref for ref in refs if "n1" in place(ref.stripe, views.view, replicas=2)]
            assert 0 < len(owned) < len(refs)
            admin = admin_pb2_grpc.AdminServiceStub(lost_client.channel)
            await admin.Evict(admin_pb2.EvictRequest(all=True))
            steps = [progress async for progress in admin.Repair(admin_pb2.RepairRequest())]
            assert (steps[-1].copied_blocks, steps[-1].missing_blocks, steps[-1].failed_blocks) == (len(owned), len(owned), 0)
            assert steps[-1].copied_bytes == len(owned) * 20_000
            present = await lost_client.stub.probe_prefix(lost_client.key_space, refs, timeout=SOON)
            assert [ref for ref, here in zip(refs, present, strict=True) if here] == owned
            for ref in owned:
                assert await lost_client.get([ref]) == 1
            assert lost_server.status().reservations == 0
            again = [progress async for progress in admin.Repair(admin_pb2.RepairRequest())]
            assert (again[-1].copied_blocks, again[-1].missing_blocks) == (0, 0)

    asyncio.run(scenario())


def test_a_node_keeps_no_connection_to_one_that_no_view_names_any_more(cluster, chain, eventually):
    async def scenario():
        async with AsyncExitStack() as stack:
            nodes, views = await cluster(stack, names=("n1", "n2"))
            (first_server, first), (second_server, second) = nodes
            await second.store(chain("a", 4))
            admin = admin_pb2_grpc.AdminServiceStub(first.channel)
            assert [progress async for progress in admin.Repair(admin_pb2.RepairRequest())][-1].copied_blocks == 4
            assert sum(second_server.status().data_connections.values()) > 0
            views.replace(View(Epoch(3), members([first_server])))
            await eventually(lambda: sum(second_server.status().data_connections.values()) == 0)
            views.replace(View(Epoch(4), members([first_server, second_server])))
            await second.store(chain("b", 4))
            assert [progress async for progress in admin.Repair(admin_pb2.RepairRequest())][-1].copied_blocks == 4

    asyncio.run(scenario())


def test_a_repair_takes_no_bad_bytes_and_counts_what_nobody_could_give(cluster, chain, payload):
    async def scenario():
        async with AsyncExitStack() as stack:
            nodes, _ = await cluster(stack, names=("n1", "n2"))
            (_, first), (second_server, second) = nodes
            refs = chain("a", 4)
            await second.store(refs)
            arena = second_server.host.view(0, second_server.config.host_capacity)
            at = bytes(arena).index(payload(refs[2]))
            arena[at + 10] ^= 1
            admin = admin_pb2_grpc.AdminServiceStub(first.channel)
            last = [progress async for progress in admin.Repair(admin_pb2.RepairRequest())][-1]
            assert (last.copied_blocks, last.missing_blocks, last.failed_blocks) == (3, 4, 1)
            assert await first.stub.probe_prefix(first.key_space, refs, timeout=SOON) == [True, True, False, True]
            assert await second.stub.probe_prefix(second.key_space, refs, timeout=SOON) == [True, True, False, True], "it was told"

    asyncio.run(scenario())


def test_a_repair_with_a_dead_peer_in_the_view_passes_it_over(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            nodes, views = await cluster(stack, names=("n1", "n2"))
            (first_server, first), (second_server, second) = nodes
            await second.store(chain("a", 3))
            gone = Member(node_id=NodeId("n0"), boot_id=BootId(bytes(16)), role=Role.STORE, address="127.0.0.1:1")
            views.replace(View(Epoch(3), (gone, *members([first_server, second_server]))))
            admin = admin_pb2_grpc.AdminServiceStub(first.channel)
            last = [progress async for progress in admin.Repair(admin_pb2.RepairRequest())][-1]
            assert last.failed_blocks == 0

    asyncio.run(scenario())


def test_a_question_about_a_view_that_the_node_does_not_know_yet_is_refused(cluster):
    async def scenario():
        async with AsyncExitStack() as stack:
            nodes, _ = await cluster(stack, names=("n1", "n2"))
            stub = PeerStub(nodes[0][1].channel)
            with pytest.raises(StaleView):
                [found async for found in stub.list_owned(NodeId("n2"), Epoch(9), timeout=SOON)]
            with pytest.raises(InvalidRequest, match="not a member"):
                [found async for found in stub.list_owned(NodeId("n9"), Epoch(2), timeout=SOON)]

    asyncio.run(scenario())


def test_a_verify_checks_every_copy_of_every_tier_and_counts_the_bad_ones(serving, chain, payload, push_to_ssd):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            refs = chain("a", 8)
            await client.store(refs)
            await push_to_ssd(server, client, refs)
            fresh = chain("fresh", 2)
            await client.store(fresh)
            arena = server.host.view(0, server.config.host_capacity)
            arena[bytes(arena).index(payload(fresh[1])) + 5] ^= 1
            copies = sum(usage.copies for usage in server.status().tiers)
            steps = [progress async for progress in admin_pb2_grpc.AdminServiceStub(client.channel).Verify(admin_pb2.VerifyRequest())]
            last = steps[-1]
            assert last.total_copies == last.checked_copies
            assert abs(last.total_copies - copies) <= 16, "copies under way"
            assert last.bad_copies <= 1
            assert server.status().counters["quarantined:checksum"] == 1, "found by the verify, or by a demotion before it"
            assert last.checked_bytes >= 20_000 * (last.total_copies - 20)
            assert await client.get(fresh) in (1, 2), "2: a good copy had reached the SSD before the bad one was made"

    asyncio.run(scenario())


def test_a_verify_finds_the_one_bad_copy(serving, chain, payload):
    async def scenario():
        async with serving() as (server, client):
            refs = chain("a", 100)
            await client.store(refs)
            arena = server.host.view(0, server.config.host_capacity)
            arena[bytes(arena).index(payload(refs[70])) + 19_999] ^= 128
            steps = [progress async for progress in admin_pb2_grpc.AdminServiceStub(client.channel).Verify(admin_pb2.VerifyRequest())]
            assert len(steps) > 1, "progress is streamed"
            assert (steps[-1].checked_copies, steps[-1].total_copies, steps[-1].bad_copies) == (100, 100, 1)
            assert (await client.stub.probe_prefix(client.key_space, refs, timeout=SOON)).index(False) == 70

    asyncio.run(scenario())


def test_locate_names_the_tiers_and_leases_of_each_block(serving, chain, push_to_ssd, key_space):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            cold, hot = chain("cold", 2), chain("hot", 2)
            await client.store(cold)
            await push_to_ssd(server, client, cold)
            await client.store(hot[:1])
            await client.acquire(cold)
            request = admin_pb2.LocateRequest(key_space=key_space_to_proto(key_space), blocks=block_refs_to_proto(cold + hot))
            places = (await admin_pb2_grpc.AdminServiceStub(client.channel).Locate(request)).blocks
            assert [list(place.tiers)[:1] for place in places] == [[Tier.SSD], [Tier.SSD], [Tier.HOST], []]
            assert [place.leases for place in places] == [1, 1, 0, 0]
            assert [place.payload_bytes for place in places] == [20_000, 20_000, 20_000, 0]

    asyncio.run(scenario())


def test_an_evict_spares_what_is_leased_and_the_lease_stays_readable(serving, chain):
    async def scenario():
        async with serving() as (server, client):
            leased, loose = chain("leased", 3), chain("loose", 3)
            await client.store(leased + loose)
            lease = await client.acquire(leased)
            answer = await admin_pb2_grpc.AdminServiceStub(client.channel).Evict(admin_pb2.EvictRequest(all=True))
            assert (answer.evicted_copies, answer.evicted_bytes, answer.leased_copies_kept) == (3, 60_000, 3)
            assert [int(status) for status in await client.read(lease.lease_id, leased)] == [1, 1, 1]
            assert server.status().blocks == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_",
    [
        admin_pb2.EvictRequest(),
        admin_pb2.EvictRequest(all=True, namespace="kitchen"),
        admin_pb2.EvictRequest(hashes=[bytes(32)]),
        admin_pb2.EvictRequest(all=True, hashes=[bytes(32)]),
    ],
)
def test_an_evict_that_does_not_say_what_is_refused(serving, request_):
    async def scenario():
        async with serving() as (_, client):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin_pb2_grpc.AdminServiceStub(client.channel).Evict(request_)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_status_counts_what_is_there(serving, chain):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            await client.store(chain("a", 5))
            await client.acquire(chain("a", 5))
            await client.reserve(chain("b", 2))
            status = await admin_pb2_grpc.AdminServiceStub(client.channel).Status(admin_pb2.StatusRequest())
            assert (status.node_id, status.boot_id, status.blocks, status.leases) == ("node-a", server.boot_id, 5, 1)
            assert status.reservations == 2
            assert status.tiers[0].used_bytes == 7 * 20_480
            assert status.tiers[0].capacity_bytes == server.config.host_capacity
            assert status.counters["stored:put"] == 5

    asyncio.run(scenario())
