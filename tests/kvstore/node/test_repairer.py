"""Nodes that keep their replicas by themselves: several in this process, one view, its changes made by hand."""

import asyncio
import dataclasses
from contextlib import AsyncExitStack

import grpc
import pytest
from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.core.events.removals import AnswerEvict, EvictRequested
from kvstore.core.placement import place
from kvstore.core.upkeep.hot_stripes import HotStripes
from kvstore.core.upkeep.repair_config import RepairConfig
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.errors import StaleView, Unavailable
from kvstore.ids import Epoch, NodeId
from kvstore.node.walk import walk
from kvstore.registry.view_source import StaticViews
from kvstore.rpc.peer_stub import PeerStub
from kvstore.units import MIB, Bytes, milliseconds, seconds

QUICK = RepairConfig(delay=milliseconds(30), anti_entropy_every=Bytes(0))


class Cluster:
    """Its own registry: one view for all, changed by `set`."""

    def __init__(self) -> None:
        self.views = StaticViews(View(Epoch(1)))
        self.servers = {}
        self.clients = {}
        self.members = {}
        self.hot = {}
        self.refs = ()

    def set(self, **changes) -> None:
        """state or takeover by node id; another epoch."""
        for node_id, change in changes.items():
            key = "takeover" if isinstance(change, float) else "state"
            self.members[node_id] = dataclasses.replace(self.members[node_id], **{key: change})
        self.views.replace(View(Epoch(self.views.view.epoch + 1), tuple(self.members.values()), self.hot))

    def owners(self, ref):
        return place(ref.stripe, self.views.view, replicas=2)

    async def held(self, node_id):
        return {owned.block.hash async for _, owned in walk(self.servers[node_id].node)}

    async def everything_in_place(self, refs, *, exactly=False):
        wanted = {node_id: {ref.hash for ref in refs if node_id in self.owners(ref)} for node_id in self.members}
        for node_id, hashes in wanted.items():
            if self.members[node_id].state in (MemberState.ACTIVE, MemberState.SUSPECT):
                held = await self.held(node_id)
                if not hashes <= held or (exactly and hashes != held):
                    return False
        return True

    async def until(self, condition, *, within_s=60.0):
        async with asyncio.timeout(within_s):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def status(self, node_id):
        return await admin_pb2_grpc.AdminServiceStub(self.clients[node_id].channel).Status(admin_pb2.StatusRequest())


class OwnMember:
    """One node's standing in the cluster's view."""

    def __init__(self, cluster: Cluster, node_id: str) -> None:
        self._cluster = cluster
        self._node_id = node_id
        self.steps = []

    @property
    def member(self):
        return self._cluster.members.get(self._node_id)

    async def drain(self) -> None:
        self._cluster.set(**{self._node_id: MemberState.DRAINING})

    async def announce_hot(self, stripes, *, ttl) -> None:
        self._cluster.hot = dict(stripes)
        self._cluster.set()

    async def take_over(self, takeover: float) -> None:
        self.steps.append((takeover, await self._cluster.everything_in_place(self._cluster.refs)))
        self._cluster.set(**{self._node_id: takeover})


@pytest.fixture
def cluster(serving):
    """`cluster(stack, names, joining=...)`: all ACTIVE but the last `joining`, which are in no view yet. `small`: of 50 blocks."""

    async def start(stack, names=("n1", "n2", "n3", "n4"), *, joining=0, repair=QUICK, small=()):
        found = Cluster()
        for name in names:
            room = {"host_capacity": Bytes(MIB)} if name in small else {}
            server, client = await stack.enter_async_context(serving(views=found.views, node_id=name, replicas=2, repair=repair, **room))
            server._own = OwnMember(found, name)
            found.servers[name], found.clients[name] = server, client
        for name in names[: len(names) - joining]:
            found.members[name] = member_of(found.servers[name])
        found.set()
        await asyncio.sleep(0.3)  # the first view is no change
        return found

    return start


def member_of(server, **keys):
    return Member(node_id=NodeId(server.config.node_id), boot_id=server.boot_id, role=Role.STORE, address=server.address, **keys)


async def put_on_owners(cluster, refs):
    for node_id, client in cluster.clients.items():
        if owned := [ref for ref in refs if node_id in cluster.owners(ref)]:
            await client.store(owned)


def test_after_a_death_the_survivors_make_everything_whole_again_and_send_nothing_twice(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack)
            refs = chain("a", 128)
            await put_on_owners(found, refs)
            short = {ref.hash for ref in refs if "n2" in found.owners(ref)}
            assert short
            found.set(n2=MemberState.DEAD)
            await found.until(lambda: found.everything_in_place(refs))
            statuses = [await found.status(node_id) for node_id in ("n1", "n3", "n4")]
            assert sum(status.repair.sent_blocks for status in statuses) == len(short)
            assert sum(status.repair.sent_bytes for status in statuses) == len(short) * 20_000
            await found.until(lambda: settled(found, "n1", "n3", "n4"))
            assert {status.repair.waiting_blocks for status in [await found.status(node_id) for node_id in ("n1", "n3", "n4")]} == {0}
            for ref in refs:
                for owner in found.owners(ref):
                    assert await found.clients[owner].get([ref]) == 1

    asyncio.run(scenario())


async def settled(cluster, *node_ids):
    progress = [await PeerStub(cluster.clients[node_id].channel).progress(timeout=seconds(5)) for node_id in node_ids]
    return all(each.settled_epoch == cluster.views.view.epoch for each in progress)


def test_copies_that_their_new_owner_did_not_take_the_first_time_are_sent_again(cluster, chain):
    """With no comparison between replicas that would find them missing."""

    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack)
            refs = chain("a", 64)
            await put_on_owners(found, refs)
            refused = []
            for server in found.servers.values():
                sender = server._repairer.sender

                async def send(member, shipment, *, sender=sender, really=sender.send):
                    sender.send = really
                    refused.append(shipment)
                    raise Unavailable("not now")

                sender.send = send
            # Dead: it has nothing to hand over either.
            await admin_pb2_grpc.AdminServiceStub(found.clients["n2"].channel).Evict(admin_pb2.EvictRequest(all=True))
            found.set(n2=MemberState.DEAD)
            await found.until(lambda: found.everything_in_place(refs))
            assert refused

    asyncio.run(scenario())


def test_repair_keeps_to_its_rate_and_says_how_long_it_will_take(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            slow = dataclasses.replace(QUICK, rate=Bytes(16_000))
            found = await cluster(stack, ("n1", "n2", "n3"), repair=slow)
            await put_on_owners(found, refs := chain("a", 64))
            for server in found.servers.values():
                assert server.status().repair.eta_ms == 0
            found.set(n3=MemberState.DEAD)

            async def under_way():
                return any([(await found.status(node_id)).repair.waiting_stripes for node_id in ("n1", "n2")])

            await found.until(under_way)
            waiting = [status.repair for status in [await found.status(node_id) for node_id in ("n1", "n2")]]
            assert all(repair.eta_ms > 0 for repair in waiting if repair.waiting_stripes)
            assert sum(repair.endangered_stripes for repair in waiting) == sum(repair.waiting_stripes for repair in waiting)
            assert not await settled(found, "n1", "n2")
            assert not await found.everything_in_place(refs)

    asyncio.run(scenario())


def test_what_the_plan_missed_is_found_by_comparing_replicas(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, repair=dataclasses.replace(QUICK, anti_entropy_every=milliseconds(500)))
            refs = chain("a", 64)
            for number, ref in enumerate(refs):
                owner = found.owners(ref)[number % 2]
                await found.clients[owner].store([ref])
            await found.until(lambda: found.everything_in_place(refs))
            statuses = [await found.status(node_id) for node_id in found.members]
            assert sum(status.repair.sent_blocks for status in statuses) == len(refs)
            assert sum(status.repair.found_blocks for status in statuses) >= len(refs)

    asyncio.run(scenario())


def test_a_comparison_about_another_view_is_refused(cluster):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2"))
            stub = PeerStub(found.clients["n1"].channel)
            with pytest.raises(StaleView):
                await stub.compare_buckets(NodeId("n2"), Epoch(99), 0, [0] * 32, timeout=seconds(5))
            assert await stub.compare_buckets(NodeId("n2"), found.views.view.epoch, 0, [0, 5], timeout=seconds(5)) == {1: 0}

    asyncio.run(scenario())


def test_a_copy_that_is_not_an_owners_goes_when_the_owners_have_read_theirs_back_and_not_before(cluster, chain, payload):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2", "n3"))
            refs = chain("a", 32)
            await put_on_owners(found, refs)
            surplus = [ref for ref in refs if "n1" not in found.owners(ref)]
            assert surplus
            rotten = surplus[0]
            arena = found.servers["n2"].host.view(0, found.servers["n2"].config.host_capacity)
            arena[bytes(arena).index(payload(rotten)) + 100] ^= 1
            await found.clients["n1"].store(surplus)
            found.set()
            await found.until(lambda: found.everything_in_place(refs, exactly=True))
            assert (await found.status("n1")).repair.dropped_blocks == len(surplus)
            assert (await found.status("n2")).counters["quarantined:checksum"] == 1, "the bad one was found, and made anew from the surplus"
            for ref in surplus:
                assert await found.clients["n2"].get([ref]) == 1

    asyncio.run(scenario())


def test_a_drain_hands_everything_over_and_says_when_it_is_safe_to_stop(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2", "n3"))
            refs = chain("a", 64)
            await put_on_owners(found, refs)
            only_here = chain("only here", 8)
            await found.clients["n1"].store(only_here)
            before = await found.held("n1")
            assert not (await found.status("n1")).HasField("drain")
            admin = admin_pb2_grpc.AdminServiceStub(found.clients["n1"].channel)
            await admin.Drain(admin_pb2.DrainStoreRequest())
            await admin.Drain(admin_pb2.DrainStoreRequest())  # asked twice
            first = await found.status("n1")
            assert first.state == "draining"
            assert (first.drain.safe_to_stop, first.drain.remaining_blocks) == (False, len(before))

            async def safe():
                return (await found.status("n1")).drain.safe_to_stop

            await found.until(safe)
            assert await found.everything_in_place([*refs, *only_here])
            drain = (await found.status("n1")).drain
            assert (drain.blocks, drain.remaining_blocks, drain.remaining_bytes) == (len(before), 0, 0)
            assert await found.held("n1") == before, "it serves until it is stopped"

    asyncio.run(scenario())


def test_a_drain_to_owners_that_are_too_small_ends_and_says_what_found_no_room(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2", "n3"), small=("n2", "n3"))
            await found.clients["n1"].store(chain("only here", 64))
            await admin_pb2_grpc.AdminServiceStub(found.clients["n1"].channel).Drain(admin_pb2.DrainStoreRequest())

            async def safe():
                return (await found.status("n1")).drain.safe_to_stop

            await found.until(safe)
            drain = (await found.status("n1")).drain
            assert 0 < drain.no_room_blocks < 64  # what was read back once may be evicted later as well

    asyncio.run(scenario())


def test_a_drain_that_nobody_could_take_over_is_refused(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            alone = await cluster(stack, ("n1",))
            with pytest.raises(grpc.aio.AioRpcError, match="nobody to take"):
                await admin_pb2_grpc.AdminServiceStub(alone.clients["n1"].channel).Drain(admin_pb2.DrainStoreRequest())
            idle = await cluster(stack, ("n1", "n2"), repair=RepairConfig(rate=Bytes(0)))
            with pytest.raises(grpc.aio.AioRpcError, match=r"repair\.rate is 0"):
                await admin_pb2_grpc.AdminServiceStub(idle.clients["n1"].channel).Drain(admin_pb2.DrainStoreRequest())
            assert {member.state for member in (*alone.members.values(), *idle.members.values())} == {MemberState.ACTIVE}

    asyncio.run(scenario())


def test_a_newcomer_takes_over_in_steps_and_each_step_is_filled_before_the_next(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, joining=1)
            refs = found.refs = chain("a", 160)
            await put_on_owners(found, refs)
            new = found.servers["n4"]
            assert await new.first_takeover() == 0.25
            found.members["n4"] = member_of(new, takeover=0.25)
            found.set()
            new.serves()

            async def grown():
                return found.members["n4"].takeover == 1.0

            await found.until(grown)
            assert new._own.steps == [(0.5, True), (0.75, True), (1.0, True)]
            await found.until(lambda: found.everything_in_place(refs, exactly=True))

    asyncio.run(scenario())


def test_where_there_is_nothing_to_take_over_a_node_starts_whole(cluster):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2", "n3"), joining=1)
            assert await found.servers["n3"].first_takeover() == 1.0
            found.members["n0"] = dataclasses.replace(found.members["n1"], node_id=NodeId("n0"), address="127.0.0.1:1")
            found.set()
            assert await found.servers["n3"].first_takeover() == 0.25, "who does not answer may hold something"

    asyncio.run(scenario())


def test_a_rebalance_says_what_would_move_and_then_moves_it(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, repair=dataclasses.replace(QUICK, drop_surplus=False))
            refs = chain("a", 64)
            for ref in refs:  # all of it beside its place, and twice
                for node_id in [node_id for node_id in found.members if node_id not in found.owners(ref)]:
                    await found.clients[node_id].store([ref])
            answers = await rebalance(found, dry_run=True)
            moves = [move for answer in answers for move in answer.moves]
            assert sum(move.blocks for move in moves) == 2 * len(refs), "each owner of each block, once"
            assert sum(move.bytes for move in moves) == 2 * len(refs) * 20_000
            assert sum(answer.surplus_blocks for answer in answers) == 2 * len(refs)
            assert not await found.everything_in_place(refs)
            assert {(await found.status(node_id)).repair.sent_blocks for node_id in found.members} == {0}
            await rebalance(found, dry_run=False)
            await found.until(lambda: found.everything_in_place(refs))
            assert not [move for answer in await rebalance(found, dry_run=True) for move in answer.moves]

    asyncio.run(scenario())


def test_a_store_that_is_not_in_its_view_says_too_what_would_move(serving, chain):
    """It has yet to register, or was declared dead."""

    async def scenario():
        async with serving() as (_, client):
            await client.store(chain("a", 3))
            answer = await admin_pb2_grpc.AdminServiceStub(client.channel).Rebalance(admin_pb2.RebalanceRequest(dry_run=True))
            assert (answer.surplus_blocks, list(answer.moves)) == (3, [])

    asyncio.run(scenario())


async def rebalance(cluster, *, dry_run):
    request = admin_pb2.RebalanceRequest(dry_run=dry_run)
    stubs = [admin_pb2_grpc.AdminServiceStub(client.channel) for client in cluster.clients.values()]
    return [await stub.Rebalance(request) for stub in stubs]


def test_a_copy_that_nobody_asked_for_evicts_nothing(cluster, chain):
    """Two full caches differ for ever: they must not push each other's blocks out in turn."""

    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2"), repair=dataclasses.replace(QUICK, anti_entropy_every=milliseconds(300)))
            capacity = found.servers["n1"].config.host_capacity // 20_480
            for number in range(capacity // 8):
                await found.clients["n1"].store(chain(f"one {number}", 8))
                await found.clients["n2"].store(chain(f"two {number}", 8))
            before = {node_id: await found.held(node_id) for node_id in ("n1", "n2")}
            for _ in range(2):
                rounds = [(await found.status(node_id)).repair.refused_blocks for node_id in ("n1", "n2")]

                async def compared(rounds=rounds):
                    now = [(await found.status(node_id)).repair.refused_blocks for node_id in ("n1", "n2")]
                    return all(after > before for after, before in zip(now, rounds, strict=True))

                await found.until(compared)
            for node_id, held in before.items():
                assert held <= await found.held(node_id)

    asyncio.run(scenario())


def test_a_node_that_repairs_nothing_by_itself_owes_nothing(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2"), repair=RepairConfig(rate=Bytes(0)))
            await put_on_owners(found, chain("a", 8))
            node = found.servers["n1"].node
            await node.ask(EvictRequested(request_id=node.next_request_id(), everything=True), AnswerEvict)
            found.set(n1=MemberState.DRAINING)
            assert await settled(found, "n1", "n2")
            assert await found.held("n1") == set()

    asyncio.run(scenario())


def test_a_hot_stripe_gets_a_replica_more_that_stays_while_it_is_hot_and_goes_when_it_is_not(cluster, chain):
    async def scenario():
        async with AsyncExitStack() as stack:
            found = await cluster(stack, ("n1", "n2", "n3"))
            refs = chain("a", 16)
            await put_on_owners(found, refs)
            hot, other = refs[:8], refs[8:]
            owner = found.owners(hot[0])[0]
            (third,) = set(found.members) - set(found.owners(hot[0]))
            server = found.servers[owner]
            await found.clients[owner].get([hot[0]])
            assert set(server._state.heat.take()) == {hot[0].stripe}
            stripes = HotStripes(server._repairer, OwnMember(found, owner), take_heat=server._state.heat.take)
            await stripes.look({hot[0].stripe: 99.0})
            assert found.hot == {}
            await stripes.look({hot[0].stripe: 100.0})
            assert found.hot == {hot[0].stripe: 1}

            async def third_has(blocks):
                mine = {ref.hash for ref in other if third in found.owners(ref)}
                return await found.held(third) == {ref.hash for ref in blocks} | mine

            await found.until(lambda: third_has(hot))
            found.set()  # another look at what is in its place
            await found.until(lambda: settled(found, *found.members))
            assert await found.clients[third].get(hot) == len(hot)
            found.hot = {}
            found.set()
            await found.until(lambda: third_has([]))
            for node_id in found.owners(hot[0]):
                assert await found.clients[node_id].get(hot) == len(hot)

    asyncio.run(scenario())
