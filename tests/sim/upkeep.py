"""The upkeep of one boot of a simulated store: the real processes of kvstore/core/upkeep and the real standing, on the timeline.

What is simulated is what they wait for: their core's answers, the bytes of their media, the other stores and the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.messages import Failed, UpkeepCall, WriteBytes
from sim.registry import CONFIG as REGISTRY
from sim.registry import RegistryWire
from sim.timeline import Pause, Processes, Reply

from kvstore.core.events.puts import CommitItem, CommitRequested, CommitStatus, ReserveItem, ReserveRequested
from kvstore.core.events.removals import EvictRequested
from kvstore.core.extent import Extent, Tier
from kvstore.core.upkeep.anti_entropy import AntiEntropy
from kvstore.core.upkeep.handover import Handover
from kvstore.core.upkeep.inventory import Inventory
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.core.upkeep.peer_answers import PeerAnswers
from kvstore.core.upkeep.repair_config import RepairConfig
from kvstore.core.upkeep.repairer import Repairer
from kvstore.core.upkeep.surroundings import AnswerT, PeerGrant, PeerProgress, PeerWrite, Request
from kvstore.core.upkeep.takeover import first_takeover, take_over_by_and_by
from kvstore.core.view import Member, MemberEvent, MemberState, Role, View
from kvstore.errors import CorruptPayload, LarderError, Unavailable
from kvstore.ids import BlockHash, Epoch, KeySpace, LeaseId, NodeId, RequestId, StripeId, WriteToken
from kvstore.node.walk import walk
from kvstore.registry.standing import Membership, Standing
from kvstore.units import Nanos, milliseconds, seconds

if TYPE_CHECKING:
    from sim.store_node import StoreNode, World

_NO_REQUEST = RequestId(0)


class UpkeepConfig(NamedTuple):
    repair: RepairConfig
    replicas: int
    zone: str
    weight: float


class NodeUpkeep:
    """Surroundings and OwnMember of the processes it runs. Dies with its boot."""

    def __init__(self, node: StoreNode, world: World, config: UpkeepConfig) -> None:
        assert node.state is not None
        self._node = node
        self._world = world
        self._config = config
        self.processes = Processes(world.timeline, gate=node.when_awake)
        self.view = View(Epoch(0))
        self.inventory = Inventory(node.state)
        self.registry = RegistryWire(node.node_id, world.registry, world.timeline, world.network)
        self.standing = Standing(self.registry)
        self.repairer = Repairer(self, self.inventory.catalog, node_id=node.node_id, replicas=config.replicas, config=config.repair)
        self.handover = Handover(self.repairer)
        self.answers: PeerAnswers | None = None
        """None before the first view: a real node does not listen before it has one."""
        self.filled = False

    def start(self) -> None:
        self.processes.spawn(self._live())

    def see(self, view: View) -> None:
        def take() -> None:
            if not self.processes.killed and self.answers is not None and view.epoch > self.view.epoch:
                self.view = view

        self._node.when_awake(take)

    # --- the life of a member -------------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """As kvstore/node/__main__.py and server.py: whatever goes wrong on the way in ends the process, and another one is started."""
        repair = self._config.repair
        await self.inventory.fill(walk(self))  # type: ignore[arg-type]
        self.filled = True
        try:
            self.view = await self.registry.view()
            self.answers = PeerAnswers(self.repairer)
            self.repairer.begin()
            for process in (self.repairer.follow_views(), self.repairer.work(), self.handover.run()):
                self.processes.spawn(process)
            self.processes.spawn(AntiEntropy(self.repairer).run(repair.anti_entropy_every))
            member = Member(
                node_id=self._node.node_id,
                boot_id=self._node.boot_id,
                role=Role.STORE,
                address=self._node.node_id,
                zone=self._config.zone,
                weight=self._config.weight,
                takeover=await first_takeover(self.view.stores, self, config=repair),
                state=MemberState.JOINING,
            )
            await self.standing.join(member)
            self.processes.spawn(self._renew())
            self.processes.spawn(self._sweep())
            await self.standing.change(MemberEvent.SERVES)
        except LarderError:
            self._world.exits(self._node)
            return
        await take_over_by_and_by(self.repairer, self.standing)

    async def _renew(self) -> None:
        while True:
            await Pause(REGISTRY.renew_every)
            if self.standing.membership is not Membership.MEMBER:
                continue
            try:
                if not await self.standing.renew(self.view):
                    self._world.exits(self._node)
                    return
            except LarderError:
                pass

    async def _sweep(self) -> None:
        while True:
            await Pause(REGISTRY.renew_every)
            if self.standing.membership is Membership.MEMBER:
                try:
                    await self.registry.sweep()
                except LarderError:
                    pass

    async def drain(self) -> bool:
        """The operator's word, as NodeServer takes it. False: not now."""
        others = [member for member in self.view.stores if member.state is MemberState.ACTIVE and member.node_id != self._node.node_id]
        if self.standing.member is None or not others:
            return False
        try:
            await self.standing.drain()
        except LarderError:
            return False
        return True

    async def leave(self) -> None:
        try:
            if self.standing.member is not None:
                await self.standing.leave()
        except LarderError:
            pass

    # --- Surroundings -------------------------------------------------------------------------------------------------------------------

    def now(self) -> Nanos:
        return self._node.now()

    async def pause(self, duration: Nanos) -> None:
        await Pause(duration)

    def next_request_id(self) -> RequestId:
        return self._node.next_request_id()

    async def ask(self, request: Request, answer: type[AnswerT]) -> AnswerT:
        if self.processes.killed:
            raise GeneratorExit  # the end of a killed process runs when it is collected: nothing waits any more
        if isinstance(request, EvictRequested):
            assert request.key_space is not None
            self._world.drops(self._node, request.key_space, request.hashes, self.view)
        found = await self._asked(request)
        assert isinstance(found, answer), found
        return found

    async def open_read(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash], *, counts: bool) -> OpenRead:
        return await self._asked(self._node.read_request(lease_id, key_space, hashes, counts=counts))

    async def _asked(self, request: Any) -> Any:
        """The answer comes when its event is dealt with, as by a future."""
        reply = Reply()
        self._node.ask(request, lambda value: self._world.timeline.after(0, lambda: reply.set(value)))
        return await reply

    async def read_payload(self, extent: Extent, checksum: int) -> bytes | memoryview:
        await Pause(self._node.io_time())
        if extent.tier is not Tier.HOST and self._node.io_fails():
            raise Unavailable("the medium failed")
        payload = self._node.payload(extent, checksum)
        if payload is None:
            raise CorruptPayload("not what was stored")
        return payload

    def peer(self, member: Member) -> SimulatedPeer:
        return SimulatedPeer(self._node.node_id, member.node_id, self._world)

    # --- the other side -----------------------------------------------------------------------------------------------------------------

    def serve(self, call: UpkeepCall, answer: Callable[[Any], None]) -> None:
        if not self.processes.killed:
            self.processes.spawn(self._serve(call, answer))

    async def _serve(self, call: UpkeepCall, answer: Callable[[Any], None]) -> None:
        assert self.answers is not None
        try:
            found = getattr(self.answers, call.name)(*call.arguments, **dict(call.options))
            answer(found if call.name == "progress" else await found)
        except LarderError as error:
            answer(Failed(repr(error), error=error))


class SimulatedPeer:
    """PeerCalls over the network."""

    def __init__(self, own: NodeId, other: NodeId, world: World) -> None:
        self._own = own
        self._other = other
        self._world = world

    async def progress(self, *, timeout: Nanos) -> PeerProgress:
        return await self._call(UpkeepCall("progress", ()), timeout)

    async def holds(self, key_space: KeySpace, hashes: Sequence[BlockHash], *, verify: bool, epoch: Epoch, timeout: Nanos) -> list[bool]:
        return await self._call(UpkeepCall("holds", (key_space, tuple(hashes)), (("verify", verify), ("epoch", epoch))), timeout)

    async def compare_buckets(
        self, node_id: NodeId, epoch: Epoch, first_bucket: int, digests: Sequence[int], *, timeout: Nanos
    ) -> dict[int, int]:
        return await self._call(UpkeepCall("compare_buckets", (node_id, epoch, first_bucket, tuple(digests))), timeout)

    async def list_stripes(self, node_id: NodeId, epoch: Epoch, bucket: int, *, timeout: Nanos) -> dict[StripeId, int]:
        return await self._call(UpkeepCall("list_stripes", (node_id, epoch, bucket)), timeout)

    async def reserve(self, key_space: KeySpace, items: Sequence[ReserveItem], *, spare_room_only: bool, timeout: Nanos) -> list[PeerGrant]:
        request = ReserveRequested(request_id=_NO_REQUEST, key_space=key_space, items=tuple(items), spare_room_only=spare_room_only)
        return [PeerGrant(grant.status, grant.write_token, None) for grant in (await self._call(request, timeout)).grants]

    async def write(self, writes: Sequence[PeerWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        return frozenset(await self._call(WriteBytes(tuple((grant.write_token, bytes(payload)) for grant, payload in writes)), timeout))

    async def commit(self, items: Sequence[tuple[WriteToken, int]], *, timeout: Nanos) -> list[CommitStatus]:
        request = CommitRequested(request_id=_NO_REQUEST, items=tuple(CommitItem(token, checksum, 0) for token, checksum in items))
        return list((await self._call(request, timeout)).statuses)

    async def _call(self, message: Any, timeout: Nanos) -> Any:
        answer = await self._world.call(self._own, self._other, message, timeout=timeout)
        if isinstance(answer, Failed):
            raise answer.error or Unavailable(answer.reason)
        return answer


def upkeep_config(rng: Any, *, nodes: int, replicas: int, zone: str) -> UpkeepConfig:
    """Of one node; the larger the cluster, the rarer its comparisons: their number grows with the square."""
    repair = RepairConfig(
        rate=rng.choice((20_000, 1_000_000)),
        delay=rng.choice((milliseconds(100), seconds(1))),
        anti_entropy_every=Nanos(rng.choice((seconds(3), seconds(8))) * max(1, nodes // 6)),
        takeover_steps=rng.choice((1, 2, 4)),
        takeover_step_limit=seconds(8),
    )
    return UpkeepConfig(repair, replicas, zone, rng.choice((1.0, 1.0, 0.5, 2.0)))
