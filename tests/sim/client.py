"""A simulated client of the store: the real router, circuits, put progress, prefix search and batches, with a simulated wire below.

What `kvstore.client` does in asyncio tasks (put.py, read.py, lease_keeper.py, node_calls.py) is done here and in node_put.py by processes
of `sim.timeline`, step for step. Every operation is a generator to be spawned; each ends within its bounds, whatever the cluster does.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from sim.media import Media, checksum_of
from sim.messages import Failed, Greeting, Hello
from sim.node_put import NodePut
from sim.oracle import ByteOracle
from sim.timeline import Bell, Processes, Reply, Steps, Timeline

from kvstore.client.acquire import PrefixSearch
from kvstore.client.answers import Acknowledge, PutOutcome
from kvstore.client.config import ClientConfig
from kvstore.client.prefix_lease import HeldLease, HeldState
from kvstore.client.put_progress import BlockProgress, PutProgress
from kvstore.client.routing import Router
from kvstore.core.events.gets import AcquireRequested, AnswerAcquire, AnswerRenew, ReadRequested, ReleaseRequested, RenewRequested
from kvstore.core.events.removals import AnswerDelete, DeleteRequested
from kvstore.core.view import View
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, LeaseId, NodeId, RequestId
from kvstore.units import Nanos, milliseconds, seconds

CONFIG = ClientConfig(
    put_timeout=seconds(12), lease_ttl=seconds(5), lease_longest_hold=seconds(15), read_timeout=seconds(8), batch_blocks=4
)
_NO_REQUEST = RequestId(0)
_LEASE_GONE = frozenset({"not_leased", "lease_expired"})


class World(Protocol):
    timeline: Timeline
    oracle: ByteOracle
    stormy: bool
    """Whether readers may be slow."""

    def log(self, who: str, what: object) -> None: ...

    def call(self, client: str, node_id: NodeId, message: Any, *, timeout: Nanos) -> Reply:
        """The answer, or Failed within the timeout."""
        ...

    def mapped(self, node_id: NodeId, boot_id: BootId) -> Media | None:
        """The memory of a node on the client's own machine; None once that process is gone."""
        ...

    def acknowledged(self, key_space: KeySpace, block: BlockRef, holders: frozenset[NodeId], *, needed: int) -> None: ...


@dataclass(slots=True, eq=False)
class Held:
    """One node's part of a lease, and what it covers."""

    lease: HeldLease
    boot_id: BootId
    covered: dict[BlockHash, tuple[int, int | None, int]] = field(default_factory=dict)

    @property
    def lease_id(self) -> LeaseId:
        return self.lease.lease_id

    @property
    def key_space(self) -> KeySpace:
        return self.lease.key_space


@dataclass(slots=True, eq=False)
class Wanted:
    """One block on its way through the replicas."""

    ref: BlockRef
    held: Held
    copy: tuple[int, int | None, int]
    """(checksum, offset in the host arena or None, payload bytes)"""
    asked: set[NodeId] = field(default_factory=set)
    leased_again: bool = False
    reason: str = ""


@dataclass(slots=True)
class Lease:
    key_space: KeySpace
    blocks: list[Wanted]
    """As they were acquired; each read begins with these."""
    parts: list[Held]
    as_sealed: bool


class SimulatedClient:
    def __init__(self, name: str, world: World, *, replicas: int, rng: Random) -> None:
        self.name = name
        self.config = CONFIG
        self.processes = Processes(world.timeline)
        self.router = Router(replicas=replicas, config=CONFIG)
        self.held: dict[Held, None] = {}
        self._world = world
        self._rng = rng
        self._probing: set[NodeId] = set()

    @property
    def now(self) -> Nanos:
        return self._world.timeline.now

    @property
    def known_epoch(self) -> Epoch:
        return self.router.view.epoch

    def see(self, view: View) -> None:
        self.router.see(view, self.now)

    def kill(self) -> None:
        self.processes.kill()
        self.held.clear()

    # --- calls ----------------------------------------------------------------------------------------------------------------------------

    def call(self, node_id: NodeId, message: Any, *, timeout: Nanos = CONFIG.rpc_timeout) -> Generator[Reply | int, Any, Any]:
        """The answer or Failed; moves the node's circuit."""
        if self.router.member(node_id) is None or not self.router.usable(node_id):
            return Failed("circuit_open")
        answer = yield self._world.call(self.name, node_id, message, timeout=timeout)
        if self.router.member(node_id) is None:
            return answer
        circuit = self.router.circuit(node_id)
        if not isinstance(answer, Failed):
            circuit.succeeded()
        elif circuit.failed(self.now, deadline_passed=answer.deadline_passed, jitter=self._rng.random()) and node_id not in self._probing:
            self._probing.add(node_id)
            self.processes.spawn(self._probe(node_id))
        return answer

    def _probe(self, node_id: NodeId) -> Steps:
        while self.router.member(node_id) is not None and not self.router.usable(node_id):
            circuit = self.router.circuit(node_id)
            if circuit.probe_at > self.now:
                yield circuit.probe_at - self.now
                continue
            circuit.start_probe()
            greeting = yield self._world.call(self.name, node_id, Hello(), timeout=CONFIG.rpc_timeout)
            if isinstance(greeting, Greeting) and greeting.node_id == node_id:
                circuit.probe_succeeded()
            else:
                circuit.probe_failed(self.now, jitter=self._rng.random())
        self._probing.discard(node_id)

    # --- put ------------------------------------------------------------------------------------------------------------------------------

    def put(self, key_space: KeySpace, blocks: Sequence[tuple[BlockRef, bytes]], acknowledge: Acknowledge) -> Steps:
        """Returns the outcome of each block."""
        router = self.router
        needed = acknowledge.replicas_needed(router.replicas)
        progress = PutProgress([BlockProgress(ref, payload, checksum_of(payload)) for ref, payload in blocks], needed)
        holders: dict[BlockHash, set[NodeId]] = {ref.hash: set() for ref, _ in blocks}
        by_node: dict[NodeId, list[BlockProgress]] = {}
        for block in progress.blocks:
            self._world.oracle.announced(key_space, block.ref, block.checksum)
            owners = router.owners(block.ref.stripe)
            block.reasons += ["no_replica"] * (router.replicas - len(owners))
            for node_id in owners:
                if router.usable(node_id):
                    block.outstanding += 1
                    by_node.setdefault(node_id, []).append(block)
                else:
                    block.reasons.append("circuit_open")
        changed = Bell()
        parts = [self.processes.spawn(NodePut(self, node_id, key_space, changed, holders).run(part)) for node_id, part in by_node.items()]
        while not progress.settled and not all(part.done for part in parts):
            yield changed.heard()
        outcomes = progress.outcomes()
        for block, outcome in zip(progress.blocks, outcomes, strict=True):
            if outcome in (PutOutcome.STORED, PutOutcome.EXISTS):
                self._world.acknowledged(key_space, block.ref, frozenset(holders[block.ref.hash]), needed=needed)
        return outcomes, progress.reasons()

    # --- acquire, renew, release --------------------------------------------------------------------------------------------------------

    def acquire(self, key_space: KeySpace, chain: Sequence[BlockRef], *, as_sealed: bool = False) -> Steps:
        """Returns a Lease on the longest run."""
        search: PrefixSearch[Held] = PrefixSearch(chain, self.router)
        parts: list[Held] = []

        def ask(node_id: NodeId, positions: Sequence[int]) -> Steps:
            held = yield from self._acquire_at(node_id, key_space, [chain[position] for position in positions], as_sealed=as_sealed)
            if held is not None:
                parts.append(held)
                search.note(positions, [held if chain[position].hash in held.covered else None for position in positions])

        while asks := search.next_round():
            yield from [self.processes.spawn(ask(node_id, positions)) for node_id, positions in asks.items()]
        run = [(chain[at], held) for at, held in enumerate(search.found[: search.run_length]) if held is not None]
        needed = {held: [ref.hash for ref, holder in run if holder is held] for held in parts}
        for held, hashes in needed.items():
            surplus = tuple(block for block in held.covered if block not in hashes)
            if not hashes:
                self.give_back(held)
            elif surplus:
                self.give_back(held, surplus)
        blocks = [Wanted(ref, held, held.covered[ref.hash]) for ref, held in run]
        return Lease(key_space, blocks, [held for held in parts if needed[held]], as_sealed)

    def _acquire_at(
        self, node_id: NodeId, key_space: KeySpace, blocks: Sequence[BlockRef], *, as_sealed: bool
    ) -> Generator[Reply | int, Any, Held | None]:
        asked_at = self.now
        member = self.router.member(node_id)
        request = AcquireRequested(
            request_id=_NO_REQUEST, key_space=key_space, blocks=tuple(blocks), ttl=CONFIG.lease_ttl, as_sealed=as_sealed
        )
        answer = yield from self.call(node_id, request)
        if not isinstance(answer, AnswerAcquire) or not answer.lease_id or member is None:
            return None
        lease = HeldLease(
            node_id,
            answer.lease_id,
            key_space,
            answer.ttl,
            renew_at=Nanos(asked_at + answer.ttl // 3),
            expires_at=Nanos(asked_at + answer.ttl),
            renew_until=Nanos(asked_at + CONFIG.lease_longest_hold),
        )
        held = Held(lease, member.boot_id)
        for ref, found in zip(blocks, answer.blocks, strict=True):
            if found is not None:
                held.covered[ref.hash] = (found.checksum, found.extent.offset if found.extent else None, found.payload_bytes)
        self.held[held] = None
        self.processes.spawn(self._keep(held))
        return held

    def _keep(self, held: Held) -> Steps:
        """Renews at a third of the time, until released, lost or held for too long."""
        lease = held.lease
        while True:
            yield lease.renew_at - self.now
            if lease.state is not HeldState.HELD:
                return
            asked_at = self.now
            if asked_at >= min(lease.expires_at, lease.renew_until):
                self._lose(held)
                return
            lease.renew_at = Nanos(asked_at + lease.ttl // 3)
            answer = yield from self.call(
                lease.node_id, RenewRequested(request_id=_NO_REQUEST, lease_id=lease.lease_id, ttl=CONFIG.lease_ttl)
            )
            if isinstance(answer, AnswerRenew) and answer.ttl == 0:
                self._lose(held)
            elif isinstance(answer, AnswerRenew):
                lease.ttl = answer.ttl
                lease.expires_at = Nanos(asked_at + answer.ttl)
                lease.renew_at = Nanos(asked_at + answer.ttl // 3)

    def _lose(self, held: Held) -> None:
        self.held.pop(held, None)
        if held.lease.state is HeldState.HELD:
            held.lease.state = HeldState.LOST

    def release(self, lease: Lease) -> None:
        for held in lease.parts:
            self.give_back(held)

    def give_back(self, held: Held, hashes: tuple[BlockHash, ...] = (), *, corrupt: tuple[BlockHash, ...] = ()) -> None:
        """All of it, or these blocks. The node is told behind the scenes; when that fails the lease runs out by itself."""
        if held.lease.state is not HeldState.HELD:
            return
        for block in hashes:
            held.covered.pop(block, None)
        if not hashes:
            self.held.pop(held, None)
            held.lease.state = HeldState.RELEASED
        request = ReleaseRequested(
            request_id=_NO_REQUEST, lease_id=held.lease_id, key_space=held.key_space, hashes=hashes, corrupt_hashes=corrupt
        )
        self.processes.spawn(self.call(held.lease.node_id, request))

    # --- read -----------------------------------------------------------------------------------------------------------------------------

    def read(self, lease: Lease) -> Steps:
        """Reads each block of the lease from one replica after another. Returns {hash: payload or None}."""
        arrived: dict[BlockHash, bytes | None] = {}
        todo = [Wanted(block.ref, block.held, block.copy) for block in lease.blocks]
        while todo:
            by_held: dict[Held, list[Wanted]] = {}
            for wanted in todo:
                by_held.setdefault(wanted.held, []).append(wanted)
            failed: list[Wanted] = []
            for part in [self.processes.spawn(self._read_at(held, blocks, arrived)) for held, blocks in by_held.items()]:
                failed += yield part
            todo = yield from self._fall_over(lease, failed, arrived)
        for block in lease.blocks:
            payload = arrived[block.ref.hash]
            if payload is not None:
                self._world.oracle.check_read(lease.key_space, block.ref, payload, as_sealed=lease.as_sealed)
        return arrived

    def _read_at(self, held: Held, blocks: list[Wanted], arrived: dict[BlockHash, bytes | None]) -> Steps:
        """Returns the blocks that did not come, each with its reason."""
        for wanted in blocks:
            wanted.asked.add(held.lease.node_id)
        if held.lease.state is not HeldState.HELD:
            return _all_failed(blocks, "not_leased")
        failed: list[Wanted] = []
        others: list[Wanted] = []
        for wanted in blocks:
            memory = self._world.mapped(held.lease.node_id, held.boot_id) if self._rng.random() < 0.5 else None
            if memory is None or wanted.copy[1] is None:
                others.append(wanted)
            else:
                failed += yield from self._read_mapped(memory, wanted, arrived)
        if others:
            hashes = tuple(wanted.ref.hash for wanted in others)
            request = ReadRequested(request_id=_NO_REQUEST, lease_id=held.lease_id, key_space=held.key_space, hashes=hashes)
            answer = yield from self.call(held.lease.node_id, request, timeout=CONFIG.read_timeout)
            if isinstance(answer, Failed):
                return failed + _all_failed(others, answer.reason)
            for wanted, item in zip(others, answer, strict=True):
                wanted.reason = item.outcome
                if item.outcome == "ok" and checksum_of(item.payload) == wanted.copy[0]:
                    arrived[wanted.ref.hash] = item.payload
                    continue
                failed.append(wanted)
                if item.outcome == "ok":
                    wanted.reason = "bad_checksum"
                    self.give_back(held, (wanted.ref.hash,), corrupt=(wanted.ref.hash,))
        return failed

    def _read_mapped(self, memory: Media, wanted: Wanted, arrived: dict[BlockHash, bytes | None]) -> Steps:
        """Without a word to the node, in two pieces; whether the lease had lasted is looked at after the last touch."""
        held, (checksum, offset, length) = wanted.held, wanted.copy
        assert offset is not None
        payload = bytes(memory.host[offset : offset + length // 2])
        slowest = seconds(2) if self._world.stormy else milliseconds(1)
        yield self._rng.choice((milliseconds(1), milliseconds(1), slowest))
        payload += bytes(memory.host[offset + length // 2 : offset + length])
        lasts = held.lease.lasts(self.now) and self._world.mapped(held.lease.node_id, held.boot_id) is memory
        if lasts and checksum_of(payload) == checksum:
            arrived[wanted.ref.hash] = payload
            return []
        if lasts:
            self.give_back(held, (wanted.ref.hash,), corrupt=(wanted.ref.hash,))
        return _all_failed([wanted], "bad_checksum" if lasts else "not_leased")

    def _fall_over(self, lease: Lease, failed: list[Wanted], arrived: dict[BlockHash, bytes | None]) -> Steps:
        """Each to the next replica of its stripe, under a new lease there; or to a miss. Returns those to be read."""
        by_node: dict[NodeId, list[Wanted]] = {}
        for wanted in failed:
            last = wanted.held.lease.node_id
            node_id: NodeId | None
            if wanted.reason in _LEASE_GONE and not wanted.leased_again and self.router.usable(last):
                wanted.leased_again = True
                node_id = last
            else:
                node_id = self.router.next_reader(wanted.ref.stripe, asked=wanted.asked)
            if node_id is None:
                arrived[wanted.ref.hash] = None
            else:
                by_node.setdefault(node_id, []).append(wanted)
        found: list[Wanted] = []
        for node_id, blocks in by_node.items():
            for wanted in blocks:
                wanted.asked.add(node_id)
            held = yield from self._acquire_at(node_id, lease.key_space, [wanted.ref for wanted in blocks], as_sealed=lease.as_sealed)
            if held is not None:
                lease.parts.append(held)
            missing = []
            for wanted in blocks:
                if held is not None and wanted.ref.hash in held.covered:
                    wanted.held, wanted.copy = held, held.covered[wanted.ref.hash]
                    found.append(wanted)
                else:
                    missing.append(wanted)
            if missing:
                found += yield from self._fall_over(lease, _all_failed(missing, "not_found"), arrived)
        return found

    def delete(self, key_space: KeySpace, blocks: Sequence[BlockRef]) -> Steps:
        """Returns the hashes that some store said it had and has no more."""
        request = DeleteRequested(request_id=_NO_REQUEST, key_space=key_space, hashes=tuple(ref.hash for ref in blocks))
        calls = [self.processes.spawn(self.call(node_id, request)) for node_id in self.router.stores()]
        deleted: set[BlockHash] = set()
        for call in calls:
            answer = yield call
            if isinstance(answer, AnswerDelete):
                deleted.update(block for block, gone in zip(request.hashes, answer.deleted, strict=True) if gone)
        return deleted


def _all_failed(blocks: list[Wanted], reason: str) -> list[Wanted]:
    for wanted in blocks:
        wanted.reason = reason
    return blocks
