"""One simulated node: a real StoreState on a memory and a disk of plain bytes; a seeded scheduler delays, fails, tears and crashes.

Every byte read is checked against what was written under that key, and after every event the invariants of a node hold or the run stops
with its seed and its last events.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import pairwise
from random import Random

import pytest

from kvstore.core.admission import AdmissionConfig
from kvstore.core.chain import chain_of, root_hash
from kvstore.core.copies import Copy, CopyState
from kvstore.core.events import (
    AcquireRequested,
    AnswerAcquire,
    AnswerCommit,
    AnswerDelete,
    AnswerProbe,
    AnswerRead,
    AnswerReserve,
    CancelRead,
    CommitItem,
    CommitRequested,
    CommitStatus,
    CopyExtent,
    CopyOutcome,
    DeleteRequested,
    DiscardReservation,
    Event,
    EvictRequested,
    ExtentCopied,
    ExtentVerified,
    Instruction,
    ListRequested,
    Note,
    NoteKind,
    ProbeRequested,
    ReadFinished,
    ReadOutcome,
    ReadRequested,
    ReadStatus,
    RecoveredRecord,
    RegionsRecovered,
    RegionWritten,
    ReleaseRequested,
    RenewRequested,
    ReservationsAbandoned,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
    StopRequested,
    Tick,
    VerifyExtent,
    VerifyOutcome,
    VerifyRequested,
    WriteRegion,
)
from kvstore.core.extent import ALIGNMENT, Extent, Tier
from kvstore.core.index import Entry
from kvstore.core.lease import LeaseConfig
from kvstore.core.recovery import recover_region
from kvstore.core.store_config import SsdConfig, StoreConfig
from kvstore.core.store_state import StoreState
from kvstore.ids import BlockHash, BlockRef, BootId, KeySpace, LayoutFingerprint, LeaseId, Namespace, RequestId, WriteToken
from kvstore.units import Bytes, Nanos, milliseconds, seconds

REGION_BYTES = 16 * ALIGNMENT
REGIONS = 5
DAY_OFFSET = Nanos(1_700_000_000 * 10**9)
"""Time of day at the start of the run."""
KEY_SPACES = tuple(KeySpace(Namespace(name), LayoutFingerprint(bytes(32))) for name in ("a", "b"))


def checksum_of(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def chains_of(key_space: KeySpace) -> list[tuple[BlockRef, ...]]:
    """A small tree: three conversations that share their first four blocks, and one of its own."""
    root = root_hash(namespace=key_space.namespace, model_digest=b"m", layout=key_space.layout)
    shared = [1] * 8
    chains = [chain_of(shared + [branch] * 16, block_tokens=2, root=root) for branch in range(3)]
    return [*chains, chain_of([9] * 30, block_tokens=2, root=root)]


class SimulatedNode:
    """The random choices all come from one generator: the same seed gives the same run."""

    def __init__(self, seed: int, *, ssd: bool, faults: bool) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.faults = faults
        self.now = Nanos(0)
        self.boots = 0
        ssd_config = None
        if ssd:
            ssd_config = SsdConfig(
                capacity=Bytes(REGIONS * REGION_BYTES),
                min_dead_share=self.rng.choice((0.1, 0.25, 0.6)),
                region_bytes=Bytes(REGION_BYTES),
                demote_above=self.rng.choice((0.0, 0.3, 0.7)),
                max_moves=self.rng.choice((1, 3, 8)),
                retry_after=milliseconds(500),
            )
        self.config = StoreConfig(
            host_capacity=Bytes(self.rng.choice((12, 24, 60)) * ALIGNMENT),
            ssd=ssd_config,
            lease=LeaseConfig(ttl=seconds(2), max_ttl=seconds(4), max_lifetime=seconds(20), max_read=seconds(3)),
            admission=AdmissionConfig(demote_after_uses=self.rng.choice((0, 0, 0, 1)), promote_after_uses=self.rng.choice((1, 2))),
            reservation_timeout=seconds(3),
            quotas={Namespace("b"): Bytes(20 * ALIGNMENT)} if self.rng.random() < 0.3 else {},
        )
        self.chains = {key_space: chains_of(key_space) for key_space in KEY_SPACES}
        self.host = bytearray(self.config.host_capacity)
        self.disk = [bytearray(REGION_BYTES) for _ in range(REGIONS if ssd else 0)]
        # Each run has its own mood: some things often, some never. Runs that do a bit of everything all look alike.
        self.mood = [self.rng.choice((0.0, 1.0, 1.0, 4.0)) for _ in range(20)]
        for essential in (0, 1, 2, 3, 12, 13):
            self.mood[essential] = self.rng.choice((0.5, 1.0, 3.0))
        self.sums: dict[tuple, int] = {}
        self.rotten: set[tuple[Tier, int, int]] = set()  # pages hit by a bit flip since they were written
        self.written: dict[tuple[KeySpace, BlockHash], set[int]] = {}  # checksums ever announced and written, by key
        self.tombs: set[tuple[KeySpace, BlockHash]] = set()  # deletes answered, and not put again since
        self.deleting: dict[RequestId, tuple[KeySpace, tuple[BlockHash, ...]]] = {}
        self.ends: dict[tuple[KeySpace, BlockHash], int] = {}  # when each block must be gone at the latest; 0: never
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
        if self.disk:
            found = []
            for number in range(REGIONS):
                region = recover_region(
                    lambda offset, length, number=number: bytes(self.disk[number][offset : offset + length]),
                    lambda record, number=number: self._is_intact(record, number),
                    region=number,
                    region_bytes=REGION_BYTES,
                )
                if region is not None:
                    found.append(region)
            self.hand_in(RegionsRecovered(regions=tuple(found)))

    def _is_intact(self, record: RecoveredRecord, region: int) -> bool:
        return checksum_of(bytes(self.disk[region][record.offset : record.offset + record.length])) == record.checksum

    def crash(self) -> None:
        """kill -9, or power gone: of what was being written any part may be down."""
        stock = self.state._stock
        durable = {
            (entry.key_space, entry.hash)
            for entry in stock.index
            if entry.readable_ssd and entry.ssd is not None and not self._is_rotten(entry.ssd.extent)
            if not 0 < self.first_ends[entry.key_space, entry.hash] <= self.now
        }
        for instruction in self.pending:
            if isinstance(instruction, CopyExtent | WriteRegion) and self.rng.random() < 0.6:
                self._write_instruction(instruction, torn=True)
        self.log.append("CRASH")
        self._boot()
        listed = {(entry.key_space, entry.hash) for entry in self.state._stock.index}
        # A record whose erasure was under way may or may not be found.
        lost = {key for key in durable if key not in listed and not self._header_is_rotten(key)}
        assert not lost, f"{len(lost)} of {len(durable)} durable blocks were lost by the restart"

    def _header_is_rotten(self, key: tuple[KeySpace, BlockHash]) -> bool:
        return any(tier is Tier.SSD for tier, _, _ in self.rotten)

    # --- bytes --------------------------------------------------------------------------------------------------------------------------

    def payload(self, key_space: KeySpace, block: BlockRef, variant: int) -> bytes:
        """Different for every key; a few variants a key, as from writers with different codecs."""
        seed = hashlib.sha256(key_space.namespace.encode() + block.hash + bytes([variant])).digest()
        return (seed * 400)[: self.length(block)]

    def length(self, block: BlockRef) -> int:
        return 1 + block.hash[0] * 48

    def medium(self, extent: Extent) -> bytearray:
        return self.host if extent.tier is Tier.HOST else self.disk[extent.region]

    def bytes_at(self, extent: Extent) -> bytes:
        return bytes(self.medium(extent)[extent.offset : extent.offset + extent.length])

    def sum_at(self, extent: Extent) -> int:
        """Checksum of the bytes there; computed anew only when they were touched."""
        key = extent[:4]
        found = self.sums.get(key)
        if found is None:
            found = self.sums[key] = checksum_of(self.bytes_at(extent))
        return found

    def _touched(self, tier: Tier, region: int, start: int, end: int) -> None:
        for key in [key for key in self.sums if key[:2] == (tier, region) and key[2] < end and start < key[2] + key[3]]:
            del self.sums[key]

    def write(self, tier: Tier, region: int, offset: int, data: bytes) -> None:
        self._touched(tier, region, offset, offset + len(data))
        medium = self.host if tier is Tier.HOST else self.disk[region]
        assert offset + len(data) <= len(medium)
        medium[offset : offset + len(data)] = data
        for page in range(offset // ALIGNMENT, -(-(offset + len(data)) // ALIGNMENT)):
            self.rotten.discard((tier, region, page))

    def _is_rotten(self, extent: Extent) -> bool:
        first = extent.offset // ALIGNMENT - (1 if extent.tier is Tier.SSD else 0)
        pages = range(first, -(-(extent.offset + extent.length) // ALIGNMENT))
        return any((extent.tier, extent.region, page) in self.rotten for page in pages)

    def _write_instruction(self, instruction: CopyExtent | WriteRegion, *, torn: bool) -> None:
        if isinstance(instruction, WriteRegion):
            keep = len(instruction.data) if not torn else self.rng.choice((0, 512, 1024, len(instruction.data)))
            self.write(Tier.SSD, instruction.region, instruction.offset, instruction.data[:keep])
            return
        target = instruction.target
        payload = self.bytes_at(instruction.source)
        header_too = not torn or self.rng.random() < 0.5
        keep = len(payload) if not torn or self.rng.random() < 0.3 else self.rng.randrange(len(payload) + 1)
        if header_too and instruction.header:
            self.write(Tier.SSD, target.region, target.offset - len(instruction.header), instruction.header)
        self.write(target.tier, target.region, target.offset, payload[:keep])

    # --- the shell ----------------------------------------------------------------------------------------------------------------------

    def hand_in(self, event: Event) -> None:
        self.log.append(f"{self.now / 1e9:.3f} {describe(event)}")
        self.evicted_now: list[Note] = []
        for instruction in self.state.handle(event, self.now):
            self.log.append(f"    -> {describe(instruction)}")
            self._take(instruction)
        self.check()

    def _take(self, instruction: Instruction) -> None:
        match instruction:
            case CopyExtent() | VerifyExtent() | WriteRegion():
                self.pending.append(instruction)
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
                    if status is CommitStatus.STORED:
                        self.tombs.discard((key_space, block.hash))
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
                ttl = self.ttls[key_space, block.hash]
                self.ends[key_space, block.hash] = self.first_ends[key_space, block.hash] = self.now + ttl if ttl else 0
            case Note() if instruction.kind is NoteKind.EVICTED and instruction.reason == "room":
                self.evicted_now.append(instruction)
            case _:
                pass

    def _check_ends(self, key_space: KeySpace, found: Iterable[BlockHash]) -> None:
        for block in found:
            end = self.ends[key_space, block]
            assert not end or self.now < end, "a block was found after its end"

    def finish_one(self, *, at: int | None = None, may_fail: bool = True) -> None:
        """Some I/O under way ends; which one is the scheduler's whim."""
        if not self.pending:
            return
        instruction = self.pending.pop(self.rng.randrange(len(self.pending)) if at is None else at)
        fails = self.faults and may_fail and self.rng.random() < 0.06
        match instruction:
            case VerifyExtent():
                data = self.bytes_at(instruction.extent)
                good = checksum_of(data) == instruction.checksum
                outcome = VerifyOutcome.OK if good else VerifyOutcome.CORRUPT
                if fails and instruction.extent.tier is Tier.SSD:
                    outcome = VerifyOutcome.IO_ERROR
                self.hand_in(ExtentVerified(operation=instruction.operation, outcome=outcome))
            case CopyExtent():
                self._finish_copy(instruction, fails)
            case WriteRegion():
                self._write_instruction(instruction, torn=fails)
                self.hand_in(RegionWritten(operation=instruction.operation, ok=not fails))
            case AnswerRead():
                self._finish_read(instruction, fails)
            case _:
                raise AssertionError(instruction)

    def _finish_some(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.finish_one()

    def _finish_copy(self, instruction: CopyExtent, fails: bool) -> None:
        outcome = CopyOutcome.OK
        if checksum_of(self.bytes_at(instruction.source)) != instruction.checksum:
            assert self._is_rotten(instruction.source), "a copy's source holds foreign bytes"
            outcome = CopyOutcome.SOURCE_CORRUPT
        elif fails:
            reads_disk = instruction.source.tier is Tier.SSD and self.rng.random() < 0.5
            outcome = CopyOutcome.SOURCE_FAILED if reads_disk else CopyOutcome.TARGET_FAILED
        if outcome is CopyOutcome.OK:
            self._write_instruction(instruction, torn=False)
        elif outcome is CopyOutcome.TARGET_FAILED:
            self._write_instruction(instruction, torn=True)
        self.hand_in(ExtentCopied(operation=instruction.operation, outcome=outcome))

    def _finish_read(self, instruction: AnswerRead, fails: bool) -> None:
        key_space, hashes = self.read_of.pop(instruction.operation)
        outcomes = []
        for block, item in zip(hashes, instruction.items, strict=True):
            if item.extent is None:
                outcomes.append(ReadOutcome.UNREAD)
                continue
            data = self.bytes_at(item.extent)
            if checksum_of(data) != item.checksum:
                assert self._is_rotten(item.extent), "a read got foreign bytes"
                outcomes.append(ReadOutcome.CORRUPT)
            elif fails and item.extent.tier is Tier.SSD:
                outcomes.append(ReadOutcome.IO_ERROR)
            else:
                assert item.checksum in self.written[key_space, block], "a read got another key's bytes"
                outcomes.append(ReadOutcome.OK)
        self.hand_in(ReadFinished(operation=instruction.operation, outcomes=tuple(outcomes)))

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
            self.write(Tier.HOST, 0, extent.offset, data)
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

    def _evict(self) -> None:
        self.hand_in(EvictRequested(request_id=self._request(), namespace=self.rng.choice(KEY_SPACES).namespace))

    def _scrub(self) -> None:
        key_space, blocks = self._some_run()
        tier = self.rng.choice((Tier.HOST, Tier.SSD))
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
        """Rot of any byte of a page in use or not: same size, silent."""
        tier = Tier.HOST if not self.disk or self.rng.random() < 0.5 else Tier.SSD
        region = 0 if tier is Tier.HOST else self.rng.randrange(REGIONS)
        medium = self.host if tier is Tier.HOST else self.disk[region]
        at = self.rng.randrange(len(medium))
        medium[at] ^= 1 << self.rng.randrange(8)
        self._touched(tier, region, at, at + 1)
        self.rotten.add((tier, region, at // ALIGNMENT))
        self.log.append(f"FLIP {tier.name} {region} {at}")

    # --- the end ------------------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All I/O ends well, all clients are gone, all timers run out: then nothing may be left over."""
        self.leases.clear()
        for _ in range(40):
            while self.pending:
                self.finish_one(at=0, may_fail=False)
            self.now = Nanos(self.now + seconds(1))
            self.hand_in(Tick())
        status = self.state.status()
        assert (status.leases, status.reservations) == (0, 0), "something was never swept"
        copies = self.all_copies()
        assert all(copy.state is CopyState.READABLE for copy in copies), "a copy neither readable nor freed"
        assert all(entry.leases == 0 and copy.holds == 0 for entry in self.state._stock.index for copy in entry.copies)

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

    def all_copies(self) -> list[Copy]:
        stock = self.state._stock
        found: dict[Copy, None] = {}
        entries: dict[Entry, None] = dict.fromkeys(stock.index)
        for lease in stock.leases._leases.values():
            entries.update(dict.fromkeys(lease.entries.values()))
        for reading in self.state._gets._readings.values():
            for hold in reading.held:
                if hold is not None:
                    entries[hold[0]] = None
                    found[hold[1]] = None
        for copy in self.state._scrubs._waiting:
            found[copy] = None
        if self.state._tiering is not None:
            for move in self.state._tiering._moves.values():
                entries[move.entry] = None
                found[move.source] = None
                found[move.target] = None
        for entry in entries:
            found.update(dict.fromkeys(entry.copies))
        for reservation in stock.reservations._by_key.values():
            found[reservation.copy] = None
        return list(found)

    def check(self) -> None:
        stock = self.state._stock
        now = self.now
        copies = self.all_copies()
        # Bytes used = bytes on the medium; no two extents overlap.
        host = sorted((copy.offset, copy.length) for copy in copies if copy.tier is Tier.HOST)
        assert sum(max(1, -(-length // ALIGNMENT)) for _, length in host) * ALIGNMENT == stock.arena.used, "host accounting"
        for (offset, length), (following, _) in pairwise(host):
            assert offset + length <= following, "host extents overlap"
        for key_space in KEY_SPACES:
            assert stock.quota.used(key_space.namespace) >= 0
        if stock.regions is not None:
            ssd = [copy for copy in copies if copy.tier is Tier.SSD]
            assert sum(region.live_bytes for region in stock.regions) == stock.regions.live_bytes
            assert sum(len(region.live) for region in stock.regions) == sum(copy.state is CopyState.READABLE for copy in ssd)
            assert stock.copies[Tier.SSD] == len(ssd)
        # Nothing is listed before its bytes are down, and everything listed can be read.
        for entry in stock.index:
            assert entry.readable, "listed without a readable copy"
            for copy in entry.copies:
                if copy.state is CopyState.READABLE and not self._is_rotten(copy.extent):
                    assert self.sum_at(copy.extent) == entry.checksum, f"listed {copy.tier.name} copy holds other bytes"
                    assert entry.checksum in self.written[entry.key_space, entry.hash], "listed under another key"
            parent = stock.index.get(entry.key_space, entry.parent)
            if parent is not None:
                assert parent.children > 0
        # A leased block stays readable with the bytes it was leased with.
        for lease_id, (key_space, covered, end) in self.leases.items():
            if now >= end:
                continue
            for block, checksum in covered.items():
                entry = stock.leases.entry(lease_id, key_space, block, now=now)
                assert entry is not None, "a lease lost a block before its end"
                assert entry.checksum == checksum
                assert entry.leases > 0
                for copy in entry.copies:
                    if copy.state in (CopyState.READABLE, CopyState.RECLAIMING) and not self._is_rotten(copy.extent):
                        assert self.sum_at(copy.extent) == checksum, "a leased copy was overwritten"
        # A delete that was answered lasts.
        for key_space, block in self.tombs:
            assert stock.index.get(key_space, block) is None, "a deleted block came back"
        # Suffixes go before heads: whatever was evicted for room and is gone left no child behind.
        for note in self.evicted_now:
            assert note.key_space is not None
            assert note.block is not None
            if stock.index.get(note.key_space, note.block.hash) is None:
                orphans = [entry for entry in stock.index.entries(note.key_space).values() if entry.parent == note.block.hash]
                assert not orphans, "a head was evicted before its children"


def describe(what: object) -> str:
    """One short line: names and values, hashes by their first digits, long batches by their first items."""
    if isinstance(what, bytes):
        return what.hex()[:6] if len(what) <= 32 else f"<{len(what)} bytes>"
    if isinstance(what, Enum):
        return str(what.name)
    if is_dataclass(what):
        return f"{type(what).__name__}({', '.join(f'{f.name}={describe(getattr(what, f.name))}' for f in fields(what))})"
    if isinstance(what, BlockRef):
        return f"{what.index}:{describe(what.hash)}"
    if isinstance(what, KeySpace):
        return what.namespace
    if isinstance(what, tuple):
        return f"({', '.join(map(describe, what[:6]))}{', ...' if len(what) > 6 else ''})"
    return repr(what)


def run(seed: int, *, steps: int, ssd: bool, faults: bool) -> SimulatedNode:
    node: SimulatedNode | None = None
    try:
        node = SimulatedNode(seed, ssd=ssd, faults=faults)
        for _ in range(steps):
            node.step()
        node.settle()
        if ssd:
            node.stop()
    except Exception as error:
        last = "\n".join(node.log) if node is not None else ""
        raise AssertionError(f"seed {seed}, ssd={ssd}, faults={faults}, step {node.steps if node else 0}: {error!r}\n{last}") from error
    return node


@pytest.fixture
def run_node() -> Callable[..., SimulatedNode]:
    """run_node(seed, steps=..., ssd=..., faults=...): the finished run, or AssertionError with the seed and the last events."""
    return run
