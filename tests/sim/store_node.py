"""One store of a simulated cluster: a real StoreState, its media, and a shell that is slow, freezes, crashes and starts again.

After every event the invariants of a node hold (`sim.node_invariants`; the dear ones are looked at after some), and what a client was
told is true: nothing that was listed goes without a reason said in a note, a delete lasts, a lease that its holder may still count on
covers the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Protocol

from sim.media import Media, checksum_of
from sim.messages import UNREACHABLE, Failed, Greeting, Hello, ReadPayload, UpkeepCall, WriteBytes
from sim.network import Network
from sim.node_invariants import check_accounting, check_leased, check_listing, check_suffixes_first
from sim.oracle import ByteOracle, Key
from sim.registry import SimulatedRegistry
from sim.timeline import Reply, Timeline
from sim.upkeep import NodeUpkeep, UpkeepConfig

from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerRead,
    CancelRead,
    ReadFinished,
    ReadOutcome,
    ReadRequested,
    ReadStatus,
    RenewRequested,
)
from kvstore.core.events.moves import CopyExtent, DropRecoded, RecodeExtent
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitRequested,
    DiscardReservation,
    ReservationsAbandoned,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.events.regions import WriteRegion
from kvstore.core.events.removals import AnswerDelete, DeleteRequested
from kvstore.core.events.stop import StopRequested
from kvstore.core.events.tick import Tick
from kvstore.core.events.verification import VerifyExtents
from kvstore.core.extent import Extent, Tier
from kvstore.core.store_config import StoreConfig
from kvstore.core.store_state import StoreState
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.core.view import View
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, LeaseId, NodeId, RequestId, WriteToken
from kvstore.node.incoming import IncomingPayloads
from kvstore.units import Nanos, milliseconds, seconds

Answer = Callable[[Any], None]

_GONE_FOR = (NoteKind.EVICTED, NoteKind.DELETED, NoteKind.QUARANTINED)
_ONLY_LEASES = (AcquireRequested, RenewRequested, ReadRequested)
"""Events that, when a mere answer follows, can have changed leases and holds alone: half of all, so the dear checks are left out."""
_DRAIN_DEADLINE = seconds(8)


class OwnRead(ReadRequested):
    """Of the node's own upkeep: its answer opens a read."""


class Belief(Protocol):
    """What the holder of a lease counts on."""

    lease_id: LeaseId
    covered: dict[BlockHash, tuple[int, int | None, int]]
    """hash -> (checksum, offset in the host arena or None, payload bytes)"""

    @property
    def key_space(self) -> KeySpace: ...


class World(Protocol):
    timeline: Timeline
    network: Network
    oracle: ByteOracle
    registry: SimulatedRegistry

    def log(self, who: str, what: object) -> None: ...

    def beliefs(self, node_id: NodeId, boot_id: BootId) -> Iterable[Belief]:
        """Leases of this boot that their holders count on now."""
        ...

    def call(self, caller: str, node_id: NodeId, message: Any, *, timeout: Nanos) -> Reply:
        """The answer, or Failed within the timeout."""
        ...

    def wants_whole_check(self) -> bool:
        """Of everything that a node holds, now."""
        ...

    def drops(self, node: StoreNode, key_space: KeySpace, hashes: tuple[BlockHash, ...], view: View) -> None:
        """A node is about to give up copies that are in their place elsewhere, as it believes."""
        ...

    def exits(self, node: StoreNode) -> None:
        """Its process ends by itself; who watches it starts another one."""
        ...


class StoreNode:
    """Down until `boot`."""

    def __init__(self, node_id: NodeId, *, world: World, config: StoreConfig, upkeep: UpkeepConfig, rng: Random) -> None:
        self.node_id = node_id
        self.state: StoreState | None = None
        self.boot_id = BootId(bytes(16))
        self.fault_rate = 0.0
        """Of each piece of I/O: it fails, and leaves a tear."""
        self.slow_disk = False
        self.disk_full = False
        self.crash_soon = False
        """Crash at the next event that has several instructions, after some of them."""
        self.boots = 0
        self._world = world
        self._config = config
        self.upkeep_config = upkeep
        self._rng = rng
        self.lost_at: dict[Key, Nanos] = {}
        """When a block went from here, for whatever reason; by the time of the timeline."""
        regions = (0, 0) if config.ssd is None else (config.ssd.regions, config.ssd.region_bytes)
        self.media = Media(
            host_bytes=config.host_capacity, regions=regions[0], region_bytes=regions[1], rng=rng, stepped_from=world.oracle.stepped_from
        )
        self._tombs: set[Key] = set()
        self._disk_stutters = False
        self._given_out: set[tuple[str, int]] = set()
        self._asleep: deque[Callable[[], None]] | None = None

    # --- boot, crash, freeze --------------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.boots += 1
        self.boot_id = BootId(hashlib.sha256(f"{self.node_id}/{self.boots}".encode()).digest()[:16])
        self._world.log(self.node_id, f"BOOT {self.boots}")
        self.state = StoreState(self._config, boot_id=self.boot_id)
        self.incoming = IncomingPayloads(self.media)  # type: ignore[arg-type]
        self.stopping = False
        self._clock_base = self._rng.randrange(10**15)  # the clocks of two machines, and of two boots, have nothing in common
        self._events: deque[Event] = deque()
        self._feeding = False
        self._io: dict[int, Instruction] = {}
        self._waiting: dict[RequestId, Answer] = {}
        self._asked: dict[RequestId, Any] = {}
        self._key_of: dict[WriteToken, Key] = {}
        self._reading: dict[int, Answer] = {}
        self._requests = 0
        self._shelf: dict[KeySpace, dict[BlockHash, None]] = {}
        self._open_reads: dict[int, OpenRead] = {}
        self.upkeep = NodeUpkeep(self, self._world, self.upkeep_config)
        if self._config.ssd is not None:
            self._disk_stutters = self.boots > 1 and self._rng.random() < self.fault_rate
            self.hand_in(self.media.recover(unreadable=0.3 if self._disk_stutters else 0.0))
        self.upkeep.start()
        self._later(0, self._tick)

    def crash(self, *, torn: bool = True, silent: bool = False) -> None:
        """kill -9, or power gone: of what was being written any part may be down. `silent`: callers learn it by their deadlines only."""
        assert self.state is not None
        durable = {
            (entry.key_space, entry.hash)
            for entry in self.state._stock.index
            if entry.readable_ssd and entry.ssd is not None and not self.media.is_rotten(entry.ssd.extent)
        }
        for instruction in self._io.values():
            if torn and isinstance(instruction, CopyExtent | WriteRegion) and self._rng.random() < 0.6:
                self.media.put_down(instruction, torn=True)
        self.media.forget_made()
        self._world.log(self.node_id, "CRASH")
        waiting = [*self._waiting.values(), *self._reading.values()]
        self.lost_at.update(
            dict.fromkeys(((space, block) for space, blocks in self._shelf.items() for block in blocks), self._world.timeline.now)
        )
        self.state = None
        self.upkeep.processes.kill()
        self._asleep = None
        self.crash_soon = False
        self._durable = durable
        for answer in waiting if not silent else ():
            answer(UNREACHABLE)

    def restart(self) -> None:
        self.boot()
        assert self.state is not None
        listed = {(entry.key_space, entry.hash) for entry in self.state._stock.index}
        lost = set() if self.media.has_rot_on_disk or self._disk_stutters else self._durable - listed
        assert not lost, f"{len(lost)} of {len(self._durable)} durable blocks were lost by the restart"
        self.check_whole()

    def stop(self) -> None:
        """Graceful: the others are told first, then what is hot is demoted, if the disk is quick enough."""
        self.stopping = True
        self.upkeep.processes.spawn(self._stop())

    async def _stop(self) -> None:
        await self.upkeep.drain()
        saved = Reply()
        self.ask(StopRequested(request_id=self.next_request_id(), within=_DRAIN_DEADLINE), lambda _: saved.set(True))
        self._later(_DRAIN_DEADLINE + seconds(1), lambda: saved.set(False))  # a hung disk is not waited for
        in_time = await saved
        await self.upkeep.leave()
        self._later(0, lambda: self.crash(torn=not in_time))

    def freeze(self, duration: int) -> None:
        """SIGSTOP: what arrives, and what its disk has done, waits."""
        self._asleep = deque()
        self._world.log(self.node_id, f"FREEZE {duration / 1e9:.1f} s")
        boots = self.boots

        def wake() -> None:
            queued, self._asleep = self._asleep, None
            for do in queued or ():
                if self.state is not None and self.boots == boots:
                    do()

        self._world.timeline.after(duration, lambda: wake() if self.boots == boots else None)

    @property
    def is_up(self) -> bool:
        return self.state is not None

    @property
    def is_frozen(self) -> bool:
        return self._asleep is not None

    @property
    def known_epoch(self) -> Epoch:
        return self.upkeep.view.epoch

    def see(self, view: View) -> None:
        if self.state is not None:
            self.upkeep.see(view)

    def holds(self, key_space: KeySpace, block: BlockHash) -> bool:
        return self.state is not None and self.state.holds(key_space, block)

    def holds_good(self, key_space: KeySpace, block: BlockHash) -> bool:
        """No copy of it has rotted."""
        entry = None if self.state is None else self.state._stock.index.get(key_space, block)
        return entry is not None and not any(self.media.is_rotten(copy.extent) for copy in entry.copies)

    def can_give(self, key_space: KeySpace, block: BlockHash) -> bool:
        """The bytes of one copy are good: rot in its pages may have hit what is beside them."""
        entry = None if self.state is None else self.state._stock.index.get(key_space, block)
        return entry is not None and any(checksum_of(self.media.bytes_at(copy.extent)) == copy.checksum for copy in entry.copies)

    def has_room_for(self, key_space: KeySpace, block: BlockRef, length: int) -> bool:
        """Without costing another block its room; nothing is left of the question."""
        answers: list[AnswerReserve] = []
        item = ReserveItem(block, length)
        request_id = self.next_request_id()
        self.ask(ReserveRequested(request_id=request_id, key_space=key_space, items=(item,), spare_room_only=True), answers.append)
        (grant,) = answers[0].grants
        if grant.status is ReserveStatus.GRANTED:
            self.hand_in(ReservationsAbandoned(write_tokens=(grant.write_token,)))
        return grant.status in (ReserveStatus.GRANTED, ReserveStatus.EXISTS, ReserveStatus.PENDING)

    # --- the door -------------------------------------------------------------------------------------------------------------------------

    def serve(self, message: Any, answer: Answer) -> None:
        """`answer` is called once, or never when the node dies first."""
        if self.state is None:
            answer(UNREACHABLE)
            return
        self.when_awake(lambda: self._serve(message, answer))

    def _serve(self, message: Any, answer: Answer) -> None:
        if isinstance(message, Hello):
            answer(Greeting(self.node_id, self.boot_id))
        elif isinstance(message, WriteBytes):
            self._take_bytes(message, answer)
        elif isinstance(message, UpkeepCall):
            if self.upkeep.answers is None:
                answer(UNREACHABLE)
            else:
                self.upkeep.serve(message, answer)
        else:
            if isinstance(message, CommitRequested):
                items = tuple(item._replace(received_bytes=self.incoming.received_bytes(item.write_token)) for item in message.items)
                for item in items:
                    self.incoming.close(item.write_token)
                message = dataclasses.replace(message, items=items)
            request = self._request(answer)
            self._asked[request] = message
            self.hand_in(dataclasses.replace(message, request_id=request))

    def next_request_id(self) -> RequestId:
        self._requests += 1
        return RequestId(self._requests)

    def _request(self, answer: Answer) -> RequestId:
        request_id = self.next_request_id()
        self._waiting[request_id] = answer
        return request_id

    # --- for the upkeep -------------------------------------------------------------------------------------------------------------------

    def now(self) -> Nanos:
        return Nanos(self._world.timeline.now + self._clock_base)

    def ask(self, request: Any, answer: Answer) -> None:
        """Of its own core. The answer to a read is an OpenRead."""
        self._waiting[request.request_id] = answer
        self._asked[request.request_id] = request
        self.hand_in(request)

    def read_request(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash], *, counts: bool) -> OwnRead:
        return OwnRead(request_id=self.next_request_id(), lease_id=lease_id, key_space=key_space, hashes=tuple(hashes), counts=counts)

    def payload(self, extent: Extent, checksum: int) -> bytes | memoryview | None:
        """In place, of the host tier. None: these are other bytes, and then they must have rotted."""
        if checksum_of(self.media.bytes_at(extent)) == checksum:
            if extent.tier is Tier.HOST:
                return memoryview(self.media.host)[extent.offset : extent.offset + extent.length]
            return self.media.bytes_at(extent)
        held = any(read.is_open and any(item.extent == extent for item in read.items) for read in self._open_reads.values())
        assert not held or self.media.is_rotten(extent), "a copy was overwritten under its reader in the node"
        return None

    def io_time(self) -> int:
        return self._rng.randrange(seconds(6) if self.slow_disk and self._rng.random() < 0.3 else milliseconds(4))

    def io_fails(self) -> bool:
        return self._rng.random() < self.fault_rate

    def _take_bytes(self, message: WriteBytes, answer: Answer) -> None:
        """Each payload in two pieces, with time between them; now and then the stream breaks."""
        pieces = [
            (token, offset, data[offset:end])
            for token, data in message.writes
            for offset, end in ((0, len(data) // 2), (len(data) // 2, len(data)))
        ]
        refused: dict[WriteToken, None] = {}
        breaks_at = self._rng.randrange(len(pieces)) if self._rng.random() < self.fault_rate else None

        def take(at: int) -> None:
            if at == len(pieces) or at == breaks_at:
                unfinished = [token for token, _ in message.writes if self.incoming.is_open(token) and not self.incoming.is_complete(token)]
                if unfinished:
                    self.hand_in(ReservationsAbandoned(write_tokens=tuple(unfinished)))
                answer(tuple(refused) if at == len(pieces) else UNREACHABLE)
                return
            token, offset, data = pieces[at]
            if token not in refused and not self.incoming.take(token, offset, data):
                refused[token] = None
            if at % 2:
                take(at + 1)
            else:
                self._later(self._rng.randrange(milliseconds(2)), lambda: take(at + 1))

        take(0)

    # --- the shell ------------------------------------------------------------------------------------------------------------------------

    def hand_in(self, event: Event) -> None:
        """An event that comes up while one is handled is taken after it, as in the real shell."""
        self._events.append(event)
        if self._feeding or self.state is None:
            return
        self._feeding = True
        while self._events and self.state is not None:
            event = self._events.popleft()
            out = self.state.handle(event, self.now())
            if isinstance(event, Tick) and not out:
                continue
            self._world.log(self.node_id, event)
            crash_at = self._rng.randrange(len(out)) if self.crash_soon and len(out) > 1 else None
            notes = [one for one in out if isinstance(one, Note)]
            self._just_gone = {(note.key_space, note.block.hash) for note in notes if note.kind in _GONE_FOR and note.block is not None}
            for number, instruction in enumerate(out):
                if number == crash_at:
                    self.crash()
                    break
                self._world.log(self.node_id, instruction)
                self._take(instruction)
            else:
                self._check(notes, only_leases=len(out) == 1 and isinstance(event, _ONLY_LEASES))
        self._feeding = False

    def _take(self, instruction: Instruction) -> None:
        match instruction:
            case DropRecoded():
                self.media.drop(instruction.recoded)
            case CopyExtent() | RecodeExtent() | VerifyExtents() | WriteRegion():
                self._start_io(instruction.operation, instruction)
            case AnswerRead():
                answer = self._waiting.pop(instruction.request_id)
                if isinstance(self._asked.pop(instruction.request_id), OwnRead):
                    answer(self._open_read(instruction))
                    return
                assert (instruction.operation != 0) == any(item.status is ReadStatus.OK for item in instruction.items)
                if instruction.operation:
                    self._reading[instruction.operation] = answer
                    self._start_io(instruction.operation, instruction)
                else:
                    answer(tuple(ReadPayload(item.status.name.lower(), b"") for item in instruction.items))
            case CancelRead() if instruction.operation in self._open_reads:
                self._open_reads[instruction.operation].finish()
            case CancelRead():
                read = self._io.pop(instruction.operation)
                assert isinstance(read, AnswerRead)
                self._reading.pop(instruction.operation)(Failed("cancelled"))
                unread = (ReadOutcome.UNREAD,) * len(read.items)
                self.hand_in(ReadFinished(operation=instruction.operation, outcomes=unread))
            case DiscardReservation():
                self.incoming.close(instruction.write_token)
            case Note():
                self.upkeep.inventory.note([instruction])
            case _:
                self._check_told(instruction)
                self._waiting.pop(instruction.request_id)(instruction)

    def _open_read(self, plan: AnswerRead) -> OpenRead:
        processes = self.upkeep.processes

        def finish(finished: ReadFinished) -> None:
            if not processes.killed:
                del self._open_reads[plan.operation]
                self.hand_in(finished)

        read = OpenRead(plan, finish)
        if plan.operation:
            self._open_reads[plan.operation] = read
        return read

    def _check_told(self, answer: Any) -> None:
        """What a client is about to be told is so."""
        assert self.state is not None
        asked = self._asked.pop(answer.request_id, None)
        stock = self.state._stock
        match answer:
            case AnswerReserve():
                assert isinstance(asked, ReserveRequested)
                for item, grant in zip(asked.items, answer.grants, strict=True):
                    key = (asked.key_space, item.block.hash)
                    if grant.status is ReserveStatus.GRANTED:
                        assert grant.extent is not None
                        self._check_fresh("write token", grant.write_token)
                        assert stock.reservations.named(grant.write_token) is not None, "granted what is not reserved any more"
                        self._key_of[grant.write_token] = key
                        self.incoming.open(grant.write_token, grant.extent)
                    elif grant.status is ReserveStatus.EXISTS and key not in self._just_gone:
                        assert stock.index.get(*key) is not None, "said to exist, and not there"
            case AnswerAcquire():
                if answer.lease_id:
                    self._check_fresh("lease", answer.lease_id)
            case AnswerCommit():
                assert isinstance(asked, CommitRequested)
                for commit, status in zip(asked.items, answer.statuses, strict=True):
                    if status.is_stored:
                        self._tombs.discard(self._key_of[commit.write_token])
            case AnswerDelete():
                assert isinstance(asked, DeleteRequested)
                for block, deleted in zip(asked.hashes, answer.deleted, strict=True):
                    key = (asked.key_space, block)
                    if deleted and stock.index.get(*key) is None and key not in stock.reservations:
                        self._tombs.add(key)

    def _check_fresh(self, kind: str, identity: int) -> None:
        """Tokens and leases of this boot match nothing that an earlier one gave out."""
        assert (kind, identity) not in self._given_out, f"a {kind} was given out twice"
        self._given_out.add((kind, identity))

    def _start_io(self, operation: int, instruction: Instruction) -> None:
        self._io[operation] = instruction
        self._later(self.io_time(), lambda: self._finish_io(operation))

    def _finish_io(self, operation: int) -> None:
        instruction = self._io.pop(operation, None)
        if instruction is None:
            return  # a read that was cancelled
        fails = self.io_fails()
        if self.disk_full and isinstance(instruction, CopyExtent | WriteRegion):
            fails = True
        if isinstance(instruction, AnswerRead):
            self._finish_read(instruction, fails)
        else:
            self.hand_in(self.media.carry_out(instruction, fails=fails))

    def _finish_read(self, read: AnswerRead, fails: bool) -> None:
        """A payload of the host tier goes out as it is: its reader compares."""
        finished = self.media.carry_out(read, fails=fails)
        assert isinstance(finished, ReadFinished)
        outcomes, payloads = [], []
        for item, outcome in zip(read.items, finished.outcomes, strict=True):
            if item.extent is None:
                payloads.append(ReadPayload(item.status.name.lower(), b""))
            elif item.extent.tier is Tier.HOST or outcome is ReadOutcome.OK:
                outcome = ReadOutcome.OK
                payloads.append(ReadPayload("ok", self.media.bytes_at(item.extent)))
            else:
                payloads.append(ReadPayload(outcome.value, b""))
            outcomes.append(outcome)
        self._reading.pop(read.operation)(tuple(payloads))
        self.hand_in(ReadFinished(operation=read.operation, outcomes=tuple(outcomes)))

    def _tick(self) -> None:
        self.hand_in(Tick())
        if self.state is not None:
            self._later(seconds(1), self._tick)

    def _later(self, delay: int, do: Callable[[], None]) -> None:
        """In this boot, and when the process is not frozen."""
        boots = self.boots
        self._world.timeline.after(delay, lambda: self.when_awake(do) if self.state is not None and self.boots == boots else None)

    def when_awake(self, do: Callable[[], None]) -> None:
        if self._asleep is None:
            do()
        else:
            self._asleep.append(do)

    # --- invariants -----------------------------------------------------------------------------------------------------------------------

    def _check(self, notes: list[Note], *, only_leases: bool) -> None:
        state = self.state
        assert state is not None
        index = state._stock.index
        if not only_leases and self._world.wants_whole_check():
            self.check_whole()
        listed = sum(len(index.entries(space)) for space in index.key_spaces())
        assert not self.upkeep.filled or self.upkeep.inventory.catalog.blocks == listed, "the catalog is not what is here"
        check_suffixes_first(state, [note for note in notes if note.kind is NoteKind.EVICTED and note.reason == "room"])
        spaces = index.key_spaces()
        if any(index.entries(space).keys() != self._shelf.get(space, {}).keys() for space in {*spaces, *self._shelf}):
            self._check_shelf({space: dict.fromkeys(index.entries(space)) for space in spaces}, notes)
        now = self.now()
        for belief in self._world.beliefs(self.node_id, self.boot_id):
            for block, (checksum, offset, length) in belief.covered.items():
                entry = state._stock.leases.entry(belief.lease_id, belief.key_space, block, now=now)
                check_leased(entry, self.media, checksum)
                if offset is not None:
                    assert entry is not None
                    assert entry.host is not None
                    assert (entry.host.offset, entry.host.length) == (offset, length), "a leased copy moved under its reader"

    def check_whole(self) -> None:
        assert self.state is not None
        check_accounting(self.state)
        check_listing(self.state, self.media, self._world.oracle.written)

    def _check_shelf(self, shelf: dict[KeySpace, dict[BlockHash, None]], notes: list[Note]) -> None:
        """Other blocks are listed than before: what went was said to go, what came was not deleted before."""
        said = {(note.key_space, note.block.hash): note.kind for note in notes if note.block is not None}
        for space, blocks in self._shelf.items():
            for block in blocks:
                gone = block not in shelf.get(space, ())
                if gone:
                    self.lost_at[space, block] = self._world.timeline.now
                assert not gone or said.get((space, block)) in _GONE_FOR, "a block went from the shelf without a word"
        self._tombs -= {key for key, kind in said.items() if kind is NoteKind.STORED}
        assert not any(block in shelf.get(space, ()) for space, block in self._tombs), "a deleted block came back"
        self._shelf = shelf
