"""One simulated node: a real StoreState on a memory and a disk of plain bytes; a seeded scheduler delays, fails, tears and crashes.

Every byte read is checked against what was written under that key, and after every event the invariants of a node hold or the run stops
with its seed and its last events.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from sim.describe import describe
from sim.followers import Followers
from sim.media import Media, checksum_of
from sim.node_invariants import (
    check_accounting,
    check_leased,
    check_listing,
    check_quiet,
    check_suffixes_first,
    check_tiers,
    moves_under_way,
)

from kvstore.core.admission import AdmissionConfig
from kvstore.core.chain import chain_of, root_hash
from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerProbe,
    AnswerRead,
    CancelRead,
    ProbeRequested,
    ReadFinished,
    ReadOutcome,
    ReadRequested,
    ReadStatus,
    ReleaseRequested,
    RenewRequested,
)
from kvstore.core.events.moves import CopyExtent, CopyReason, DropRecoded, RecodeExtent
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitItem,
    CommitRequested,
    CommitStatus,
    DiscardReservation,
    ReservationsAbandoned,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.events.questions import ListRequested
from kvstore.core.events.regions import WriteRegion
from kvstore.core.events.removals import AnswerDelete, DeleteRequested, EvictRequested
from kvstore.core.events.stop import StopRequested
from kvstore.core.events.tick import Tick
from kvstore.core.events.verification import VerifyExtents, VerifyRequested
from kvstore.core.events.wishes import PinKind, PinRequested, QuotaRequested, UnpinRequested
from kvstore.core.extent import ALIGNMENT, Extent, Tier
from kvstore.core.lease import LeaseConfig
from kvstore.core.step_down import EVERYBODY, StepDownRule
from kvstore.core.store_config import GpuConfig, SsdConfig, StoreConfig, WritePolicy
from kvstore.core.store_state import StoreState
from kvstore.ids import BlockHash, BlockRef, BootId, KeySpace, LayoutFingerprint, LeaseId, Namespace, RequestId, RungCode, WriteToken
from kvstore.units import Bytes, Nanos, milliseconds, seconds

REGION_BYTES = 16 * ALIGNMENT
REGIONS = 5
DAY_OFFSET = Nanos(1_700_000_000 * 10**9)
"""Time of day at the start of the run."""
KEY_SPACES = tuple(KeySpace(Namespace(name), LayoutFingerprint(bytes(32))) for name in ("a", "b"))


def chains_of(key_space: KeySpace) -> list[tuple[BlockRef, ...]]:
    """A small tree: three conversations that share their first four blocks, and one of its own."""
    root = root_hash(namespace=key_space.namespace, model_digest=b"m", layout=key_space.layout)
    shared = [1] * 8
    chains = [chain_of(shared + [branch] * 16, block_tokens=2, root=root) for branch in range(3)]
    return [*chains, chain_of([9] * 30, block_tokens=2, root=root)]


class SimulatedNode:
    """The random choices all come from one generator: the same seed gives the same run."""

    def __init__(self, seed: int, *, ssd: bool, faults: bool, gpu: bool = False, host: bool = True) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.faults = faults
        self.now = Nanos(0)
        self.boots = 0
        self.disk_stutters = False
        ssd_config = None
        if ssd:
            ssd_config = SsdConfig(
                capacity=Bytes(REGIONS * REGION_BYTES),
                min_dead_share=self.rng.choice((0.1, 0.25, 0.6)),
                region_bytes=Bytes(REGION_BYTES),
                write_policy=self.rng.choice(list(WritePolicy)) if host else WritePolicy.WRITE_BACK,
                demote_above=self.rng.choice((0.0, 0.3, 0.7)),
                max_moves=self.rng.choice((1, 3, 8)),
                retry_after=milliseconds(500),
                step_down={EVERYBODY: self._step_down_rules()} if self.rng.random() < 0.5 else {},
            )
        self.config = StoreConfig(
            host_capacity=Bytes(self.rng.choice((12, 24, 60)) * ALIGNMENT if host else 0),
            staging_capacity=Bytes(8 * ALIGNMENT if host else self.rng.choice((4, 12, 60)) * ALIGNMENT),
            placed_within=self.rng.choice((milliseconds(100), seconds(2))) if not host else seconds(5),
            ssd=ssd_config,
            gpu=GpuConfig(capacity=Bytes(self.rng.choice((4, 16)) * ALIGNMENT), max_moves=self.rng.choice((1, 4))) if gpu else None,
            lease=LeaseConfig(ttl=seconds(2), max_ttl=seconds(4), max_lifetime=seconds(20), max_read=seconds(3)),
            admission=AdmissionConfig(demote_after_uses=self.rng.choice((0, 0, 0, 1)), promote_after_uses=self.rng.choice((1, 2))),
            reservation_timeout=seconds(3),
            quotas={Namespace("b"): Bytes(20 * ALIGNMENT)} if self.rng.random() < 0.3 else {},
        )
        self.chains = {key_space: chains_of(key_space) for key_space in KEY_SPACES}
        self.media = Media(
            host_bytes=self.config.arena_capacity,
            gpu_bytes=self.config.gpu.capacity if self.config.gpu is not None else 0,
            regions=REGIONS if ssd else 0,
            region_bytes=REGION_BYTES,
            rng=self.rng,
        )
        # Each run has its own mood: some things often, some never. Runs that do a bit of everything all look alike.
        self.mood = [self.rng.choice((0.0, 1.0, 1.0, 4.0)) for _ in range(20)]
        for essential in (0, 1, 2, 3, 12, 13):
            self.mood[essential] = self.rng.choice((0.5, 1.0, 3.0))
        self.written: dict[tuple[KeySpace, BlockHash], set[int]] = {}  # checksums ever announced and written, by key
        self.tombs: set[tuple[KeySpace, BlockHash]] = set()  # deletes answered, and not put again since
        self.deleting: dict[RequestId, tuple[KeySpace, tuple[BlockHash, ...]]] = {}
        self.ends: dict[tuple[KeySpace, BlockHash], int] = {}  # when each block must be gone at the latest; 0: never
        self.was_listed: set[tuple[KeySpace, BlockHash]] = set()
        self.was_on_ssd: set[tuple[KeySpace, BlockHash]] = set()  # ever: a commit that waits may be answered after its block's next put
        self.first_ends: dict[tuple[KeySpace, BlockHash], int] = {}  # as its put asked, before it was put again
        self.log: deque[str] = deque(maxlen=60)
        self.steps = 0
        self._boot()

    # --- boot and crash -----------------------------------------------------------------------------------------------------------------

    def _boot(self) -> None:
        self.boots += 1
        self.boot_id = BootId(hashlib.sha256(f"{self.seed}/{self.boots}".encode()).digest()[:16])
        self.state = StoreState(self.config, boot_id=self.boot_id, day_offset=DAY_OFFSET)
        self.pending: list[Instruction] = []
        self.ttls: dict[tuple[KeySpace, BlockHash], int] = {}  # of the put under way
        self.probing: dict[RequestId, tuple[KeySpace, tuple[BlockHash, ...]]] = {}
        self.grants: dict[WriteToken, tuple[KeySpace, BlockRef, Extent]] = {}
        self.ready: list[tuple[WriteToken, int, int, float]] = []  # tokens whose bytes are (said to be) down
        self.reserving: dict[RequestId, tuple[KeySpace, tuple[ReserveItem, ...]]] = {}
        self.acquiring: dict[RequestId, tuple[KeySpace, tuple[BlockRef, ...]]] = {}
        self.leases: dict[LeaseId, tuple[KeySpace, dict[BlockHash, int], Nanos]] = {}  # (key space, hash -> checksum, end)
        self.reading: dict[RequestId, tuple[KeySpace, tuple[BlockHash, ...]]] = {}
        self.read_of: dict[int, tuple[KeySpace, tuple[BlockHash, ...]]] = {}
        self.committing: dict[RequestId, list[tuple[KeySpace, BlockRef]]] = {}
        self.deleting = {}
        self.stopped = False
        self.next_request = 0
        self.followers: Followers | None = None
        if self.media.disk:
            self.disk_stutters = self.faults and self.boots > 1 and self.rng.random() < 0.2
            found = self.media.recover(unreadable=0.3 if self.disk_stutters else 0.0)
            # A put that never came to the disk left there what an earlier one wrote, with the end which that one asked for.
            for record in sorted((record for region in found.regions for record in region.records), key=lambda record: record.generation):
                end = max(1, record.expires_at - DAY_OFFSET) if record.expires_at else 0
                self.first_ends[record.key_space, record.block.hash] = end
            self.hand_in(found)
        self.followers = Followers(self.state, boot_id=self.boot_id, now=lambda: self.now)
        self.followers.begin()

    def _step_down_rules(self) -> tuple[StepDownRule, ...]:
        """Two rungs, one coarser than the other."""
        after = self.rng.choice((Nanos(0), milliseconds(300), seconds(2)))
        finer = StepDownRule(rung=RungCode(7), keep_last=self.rng.choice((0, 1, 3)))
        return (finer, StepDownRule(rung=RungCode(4), after=after, keep_last=self.rng.choice((0, 2))))

    def crash(self) -> None:
        """kill -9, or power gone: of what was being written any part may be down."""
        stock = self.state._stock
        durable = {
            (entry.key_space, entry.hash)
            for entry in stock.index
            if entry.readable_ssd and entry.ssd is not None and not self.media.is_rotten(entry.ssd.extent)
            if not 0 < self.first_ends[entry.key_space, entry.hash] <= self.now
        }
        for instruction in self.pending:
            if isinstance(instruction, CopyExtent | WriteRegion) and self.rng.random() < 0.6:
                self.media.put_down(instruction, torn=True)
        self.log.append("CRASH")
        self.media.forget_made()
        self._boot()
        listed = {(entry.key_space, entry.hash) for entry in self.state._stock.index}
        # A record whose erasure was under way may or may not be found.
        lost = set() if self.media.has_rot_on_disk or self.disk_stutters else durable - listed
        assert not lost, f"{len(lost)} of {len(durable)} durable blocks were lost by the restart"

    # --- bytes --------------------------------------------------------------------------------------------------------------------------

    def payload(self, key_space: KeySpace, block: BlockRef, variant: int) -> bytes:
        """Different for every key; a few variants a key, as from writers with different codecs."""
        seed = hashlib.sha256(key_space.namespace.encode() + block.hash + bytes([variant])).digest()
        return (seed * 400)[: self.length(block)]

    def length(self, block: BlockRef) -> int:
        return 1 + block.hash[0] * 48

    # --- the shell ----------------------------------------------------------------------------------------------------------------------

    def hand_in(self, event: Event) -> None:
        self.log.append(f"{self.now / 1e9:.3f} {describe(event)}")
        self.evicted_now: list[Note] = []
        notes: list[Note] = []
        hard = {
            (pinned.key_space, pinned.hash)
            for pinned in self.state.pins()
            if pinned.kind is PinKind.HARD and pinned.expires_at > self.now + DAY_OFFSET
        }
        for instruction in self.state.handle(event, self.now):
            self.log.append(f"    -> {describe(instruction)}")
            self._take(instruction)
            if isinstance(instruction, Note):
                notes.append(instruction)
            match instruction:
                case Note(kind=NoteKind.EVICTED, key_space=KeySpace() as key_space, block=BlockRef() as block):
                    gone = self.state._stock.index.get(key_space, block.hash) is None
                    assert not (gone and (key_space, block.hash) in hard), "a hard pinned block was evicted"
        if self.followers is not None and notes:
            self.followers.note(notes)
            self.followers.check()
        self.check()

    def _take(self, instruction: Instruction) -> None:
        match instruction:
            case DropRecoded():
                self.media.drop(instruction.recoded)
            case CopyExtent() | RecodeExtent() | VerifyExtents() | WriteRegion():
                self.pending.append(instruction)
                if isinstance(instruction, CopyExtent) and instruction.reason is CopyReason.PLACE:
                    self._begin_life(instruction)
            case AnswerRead():
                key = self.reading.pop(instruction.request_id)
                assert (instruction.operation != 0) == any(item.status is ReadStatus.OK for item in instruction.items)
                if instruction.operation:
                    self.read_of[instruction.operation] = key
                    self.pending.append(instruction)
            case CancelRead():
                read = next(p for p in self.pending if isinstance(p, AnswerRead) and p.operation == instruction.operation)
                self.pending.remove(read)
                self.pending.insert(0, read)
            case AnswerReserve():
                key_space, items = self.reserving.pop(instruction.request_id)
                for item, grant in zip(items, instruction.grants, strict=True):
                    if grant.status is ReserveStatus.GRANTED:
                        assert grant.extent is not None
                        assert grant.write_token not in self.grants
                        assert self.state._stock.reservations.named(grant.write_token) is not None, "granted what is not reserved any more"
                        self.grants[grant.write_token] = (key_space, item.block, grant.extent)
                        self.ttls[key_space, item.block.hash] = item.ttl or 0
                        self.tombs.discard((key_space, item.block.hash))
                    elif grant.status is ReserveStatus.EXISTS and self.ends[key_space, item.block.hash]:
                        longer = max(self.ends[key_space, item.block.hash], self.now + item.ttl) if item.ttl else 0
                        self.ends[key_space, item.block.hash] = longer
            case DiscardReservation():
                self.grants.pop(instruction.write_token, None)
            case AnswerCommit():
                for (key_space, block), status in zip(self.committing.pop(instruction.request_id), instruction.statuses, strict=True):
                    if status.is_stored:
                        self.tombs.discard((key_space, block.hash))
                    if status is CommitStatus.DURABLE:
                        assert (key_space, block.hash) in self.was_on_ssd, "called durable and was never on the SSD"
                    if status.is_stored and not self.config.has_host:
                        assert (key_space, block.hash) in self.was_listed, "called stored and was never in a tier"
            case AnswerProbe():
                key_space, hashes = self.probing.pop(instruction.request_id)
                self._check_ends(key_space, [block for block, here in zip(hashes, instruction.present, strict=True) if here])
            case AnswerAcquire():
                key_space, blocks = self.acquiring.pop(instruction.request_id)
                covered = {block.hash: found.checksum for block, found in zip(blocks, instruction.blocks, strict=True) if found is not None}
                assert bool(covered) == bool(instruction.lease_id)
                self._check_ends(key_space, covered)
                if covered:
                    self.leases[instruction.lease_id] = (key_space, covered, Nanos(self.now + instruction.ttl))
            case AnswerDelete():
                key_space, hashes = self.deleting.pop(instruction.request_id)
                for block, deleted in zip(hashes, instruction.deleted, strict=True):
                    taken = any(space == key_space and ref.hash == block for space, ref, _ in self.grants.values())
                    listed = self.state._stock.index.get(key_space, block) is not None
                    if deleted and not taken and not listed and self.state._stock.reservations.find(key_space, block) is None:
                        self.tombs.add((key_space, block))
            case Note(kind=NoteKind.STORED, key_space=KeySpace() as key_space, block=BlockRef() as block):
                self.was_listed.add((key_space, block.hash))
                if instruction.tier is Tier.SSD:
                    self.was_on_ssd.add((key_space, block.hash))
                if self.config.has_host:
                    ttl = self.ttls[key_space, block.hash]
                    end = self.now + ttl if ttl else 0
                    if instruction.reason == "as_sealed":
                        before = self.ends[key_space, block.hash]
                        end = max(before, end) if before and end else 0
                    self.ends[key_space, block.hash] = self.first_ends[key_space, block.hash] = end
            case Note(kind=NoteKind.DEMOTED, key_space=KeySpace() as key_space, block=BlockRef() as block):
                self.was_on_ssd.add((key_space, block.hash))
            case Note() if instruction.kind is NoteKind.EVICTED and instruction.reason == "room":
                self.evicted_now.append(instruction)
            case _:
                pass

    def _begin_life(self, instruction: CopyExtent) -> None:
        """A put leaves staging: should the node crash now, the block may be found though nobody was told."""
        entry = moves_under_way(self.state)[instruction.operation].entry
        key = entry.key_space, entry.hash
        ttl = self.ttls[key]
        self.ends[key] = self.first_ends[key] = self.now + ttl if ttl else 0

    def _check_ends(self, key_space: KeySpace, found: Iterable[BlockHash]) -> None:
        for block in found:
            end = self.ends[key_space, block]
            if any(space == key_space and item.block.hash == block for space, items in self.reserving.values() for item in items):
                continue  # put again by a request that waits for the disk: its answer says for how long
            assert not end or self.now < end, "a block was found after its end"

    def finish_one(self, *, at: int | None = None, may_fail: bool = True) -> None:
        """Some I/O under way ends; which one is the scheduler's whim."""
        if not self.pending:
            return
        instruction = self.pending.pop(self.rng.randrange(len(self.pending)) if at is None else at)
        fails = self.faults and may_fail and self.rng.random() < 0.06
        outcome = self.media.carry_out(instruction, fails=fails)
        if isinstance(instruction, AnswerRead):
            assert isinstance(outcome, ReadFinished)
            self._check_read(instruction, outcome)
        self.hand_in(outcome)

    def _finish_some(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.finish_one()

    def _check_read(self, instruction: AnswerRead, finished: ReadFinished) -> None:
        key_space, hashes = self.read_of.pop(instruction.operation)
        for block, item, outcome in zip(hashes, instruction.items, finished.outcomes, strict=True):
            if outcome is ReadOutcome.OK:
                put = self.media.stepped_from.get(item.checksum, item.checksum)
                assert put in self.written[key_space, block], "a read got another key's bytes"

    # --- the world ----------------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps += 1
        actions: list[tuple[int, Callable[[], None]]] = [
            (14, self._reserve),
            (16, self._fill),
            (14, self._commit),
            (14, self._acquire),
            (12, self._read),
            (6, self._release),
            (3, self._renew),
            (3, self._probe),
            (3, self._delete),
            (1, self._evict),
            (3, self._scrub),
            (2, self._abandon),
            (30, self._finish_some),
            (10, self._wait),
            (25, self._put),
            (15, self._get),
            (3, self._wish),
        ]
        if self.faults:
            actions += [(4, self._flip_bit), (1, self.crash)]
        weights = [weight * factor for (weight, _), factor in zip(actions, self.mood, strict=False)]
        self.rng.choices([action for _, action in actions], weights)[0]()

    def _request(self) -> RequestId:
        self.next_request += 1
        return RequestId(self.next_request)

    def _some_run(self) -> tuple[KeySpace, tuple[BlockRef, ...]]:
        key_space = self.rng.choice(KEY_SPACES)
        chain = self.rng.choice(self.chains[key_space])
        start = self.rng.choice((0, 0, 0, self.rng.randrange(len(chain))))
        return key_space, chain[start : start + self.rng.randint(1, 8)]

    def _reserve(self) -> None:
        key_space, blocks = self._some_run()
        request = self._request()
        ttl = self.rng.choice((None, Nanos(0), milliseconds(50), seconds(3), seconds(30)))
        items = tuple(ReserveItem(block, self.length(block), ttl) for block in blocks)
        self.reserving[request] = (key_space, items)
        self.hand_in(ReserveRequested(request_id=request, key_space=key_space, items=items))

    def _put(self) -> None:
        """A writer that dawdles nowhere."""
        self._reserve()
        self._fill()
        self._commit()

    def _get(self) -> None:
        self._acquire()
        self._read()

    def _fill(self) -> None:
        """A writer puts its bytes down: good ones, other ones than it announces, or too few."""
        waiting = [token for token in self.grants if not any(token == ready for ready, *_ in self.ready)]
        for token in waiting[:8]:
            key_space, block, extent = self.grants[token]
            data = self.payload(key_space, block, self.rng.randrange(3))
            announced = checksum_of(data)
            kind = self.rng.random()
            if kind < 0.05:
                data = bytes([data[0] ^ 1]) + data[1:]
            received = len(data) - 1 if 0.05 <= kind < 0.08 else len(data)
            self.media.write(Tier.HOST, 0, extent.offset, data)
            self.written.setdefault((key_space, block.hash), set()).add(announced)
            self.ready.append((token, announced, received, kind))

    def _commit(self) -> None:
        if not self.ready:
            return
        self.rng.shuffle(self.ready)
        batch, self.ready = self.ready[:8], self.ready[8:]
        request = self._request()
        keys = []
        items = []
        for token, announced, received, _ in batch:
            known = self.grants.pop(token, None)
            keys.append((known[0], known[1]) if known else (KEY_SPACES[0], self.chains[KEY_SPACES[0]][0][0]))
            items.append(CommitItem(token, announced, received))
        self.committing[request] = keys
        if any(token in self.grants for token, *_ in batch):
            raise AssertionError("a token stayed writable after its commit")
        self.hand_in(CommitRequested(request_id=request, items=tuple(items)))

    def _acquire(self) -> None:
        key_space, blocks = self._some_run()
        request = self._request()
        self.acquiring[request] = (key_space, blocks)
        ttl = self.rng.choice((None, milliseconds(300), seconds(100)))
        self.hand_in(AcquireRequested(request_id=request, key_space=key_space, blocks=blocks, ttl=ttl))

    def _some_lease(self) -> LeaseId | None:
        return self.rng.choice(sorted(self.leases)) if self.leases else None

    def _read(self) -> None:
        lease_id = self._some_lease()
        if lease_id is None:
            return
        key_space, covered, _ = self.leases[lease_id]
        hashes = tuple(self.rng.sample(sorted(covered), self.rng.randint(1, len(covered)))) if covered else ()
        request = self._request()
        self.reading[request] = (key_space, hashes)
        self.hand_in(ReadRequested(request_id=request, lease_id=lease_id, key_space=key_space, hashes=hashes))

    def _release(self) -> None:
        lease_id = self._some_lease()
        if lease_id is None:
            return
        key_space, covered, end = self.leases[lease_id]
        if self.rng.random() < 0.3:
            del self.leases[lease_id]  # the client is gone and says nothing
            return
        some = tuple(self.rng.sample(sorted(covered), self.rng.randint(0, len(covered))))
        corrupt = some[:1] if self.rng.random() < 0.3 else ()
        left = {block: checksum for block, checksum in covered.items() if some and block not in some}
        if left:
            self.leases[lease_id] = (key_space, left, end)
        elif self.rng.random() < 0.7:
            del self.leases[lease_id]
        else:
            self.leases[lease_id] = (key_space, {}, end)  # will be released again
        event = ReleaseRequested(request_id=self._request(), lease_id=lease_id, key_space=key_space, hashes=some, corrupt_hashes=corrupt)
        self.hand_in(event)

    def _renew(self) -> None:
        lease_id = self._some_lease()
        if lease_id is not None:
            # The model keeps the old end: a renewal only ever adds to the promise.
            self.hand_in(RenewRequested(request_id=self._request(), lease_id=lease_id))

    def _probe(self) -> None:
        key_space, blocks = self._some_run()
        hashes = tuple(block.hash for block in blocks)
        request = self._request()
        self.probing[request] = (key_space, hashes)
        self.hand_in(ProbeRequested(request_id=request, key_space=key_space, hashes=hashes))

    def _delete(self) -> None:
        key_space, blocks = self._some_run()
        hashes = tuple(block.hash for block in blocks)
        request = self._request()
        self.deleting[request] = (key_space, hashes)
        self.hand_in(DeleteRequested(request_id=request, key_space=key_space, hashes=hashes))

    def _wish(self) -> None:
        key_space, blocks = self._some_run()
        hashes = tuple(block.hash for block in blocks)
        match self.rng.randrange(4):
            case 0:
                limit = self.rng.choice((None, Bytes(4 * ALIGNMENT), Bytes(40 * ALIGNMENT)))
                self.hand_in(QuotaRequested(request_id=self._request(), namespace=key_space.namespace, change=True, limit=limit))
            case 1:
                self.hand_in(UnpinRequested(request_id=self._request(), key_space=key_space, hashes=hashes))
            case _:
                kind, ttl = self.rng.choice(list(PinKind)), self.rng.choice((milliseconds(200), seconds(10)))
                self.hand_in(PinRequested(request_id=self._request(), key_space=key_space, hashes=hashes, kind=kind, ttl=ttl))

    def _evict(self) -> None:
        self.hand_in(EvictRequested(request_id=self._request(), namespace=self.rng.choice(KEY_SPACES).namespace))

    def _scrub(self) -> None:
        key_space, blocks = self._some_run()
        tier = self.rng.choice(tuple(Tier))
        self.hand_in(VerifyRequested(request_id=self._request(), key_space=key_space, hash=blocks[0].hash, tier=tier))
        self.hand_in(ListRequested(request_id=self._request()))

    def _abandon(self) -> None:
        tokens = tuple(sorted(self.grants))[:2]
        self.hand_in(ReservationsAbandoned(write_tokens=tokens))
        assert not any(token in self.grants for token in tokens)

    def _wait(self) -> None:
        self.now = Nanos(self.now + self.rng.choice((milliseconds(1), milliseconds(100), seconds(1))))
        self.hand_in(Tick())

    def _flip_bit(self) -> None:
        self.log.append(f"FLIP {self.media.flip_bit()}")

    # --- the end ------------------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All I/O ends well, all clients are gone, all timers run out: then nothing may be left over."""
        self.leases.clear()
        for _ in range(40):
            while self.pending:
                self.finish_one(at=0, may_fail=False)
            self.now = Nanos(self.now + seconds(1))
            self.hand_in(Tick())
        check_quiet(self.state)

    def stop(self) -> None:
        """Graceful stop: what was worth it is on disk, and the restart finds it without reading a single payload."""
        self.hand_in(StopRequested(request_id=self._request()))
        for _ in range(20):
            while self.pending:
                self.finish_one(at=0, may_fail=False)
            self.now = Nanos(self.now + seconds(1))
            self.hand_in(Tick())
        self.crash()

    # --- invariants ---------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        stock = self.state._stock
        check_accounting(self.state)
        check_tiers(self.state)
        check_listing(self.state, self.media, self.written)
        for lease_id, (key_space, covered, end) in self.leases.items():
            if self.now < end:
                for block, checksum in covered.items():
                    check_leased(stock.leases.entry(lease_id, key_space, block, now=self.now), self.media, checksum)
        # A delete that was answered lasts.
        for key_space, block in self.tombs:
            assert stock.index.get(key_space, block) is None, "a deleted block came back"
        check_suffixes_first(self.state, self.evicted_now)


def run(seed: int, *, steps: int, ssd: bool, faults: bool, gpu: bool = False, host: bool = True) -> SimulatedNode:
    node: SimulatedNode | None = None
    try:
        node = SimulatedNode(seed, ssd=ssd, faults=faults, gpu=gpu, host=host)
        for _ in range(steps):
            node.step()
        node.settle()
        if ssd:
            node.stop()
    except Exception as error:
        last = "\n".join(node.log) if node is not None else ""
        raise AssertionError(
            f"seed {seed}, host={host}, ssd={ssd}, gpu={gpu}, faults={faults}, step {node.steps if node else 0}: {error!r}\n{last}"
        ) from error
    return node
