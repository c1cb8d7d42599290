"""Gets: probe, acquire, read, renew, release. What a reader was told it has stays readable until its lease ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.copies import Copy, CopyState
from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerProbe,
    AnswerRead,
    AnswerRelease,
    AnswerRenew,
    CancelRead,
    ProbeRequested,
    ReadItem,
    ReadOutcome,
    ReadRequested,
    ReadStatus,
    ReleaseRequested,
    RenewRequested,
)
from kvstore.core.extent import Tier
from kvstore.core.index import Entry, acquired_blocks
from kvstore.core.stock import Stock
from kvstore.ids import LeaseId, OperationId
from kvstore.units import Nanos

_SERVES_LEASES = (CopyState.READABLE, CopyState.RECLAIMING)


@dataclass(slots=True, kw_only=True)
class _Reading:
    deadline: Nanos
    held: list[tuple[Entry, Copy] | None]
    """One per item of the answer."""
    cancelled: bool = False


class Gets:
    def __init__(
        self,
        stock: Stock,
        *,
        check_copy: Callable[[Entry, Copy], None],
        hit_on_ssd: Callable[[Entry], None],
        used: Callable[[list[Entry]], None],
    ) -> None:
        """`check_copy` verifies a copy that a reader complained about; `hit_on_ssd` is told of reads that a promotion would speed up,
        `used` of every block that was just leased."""
        self._stock = stock
        self._check_copy = check_copy
        self._hit_on_ssd = hit_on_ssd
        self._used = used
        self._readings: dict[OperationId, _Reading] = {}  # by age, so by deadline

    def probe(self, event: ProbeRequested) -> None:
        self._stock.end_due_among(event.key_space, event.hashes)
        entries = self._stock.index.entries(event.key_space)
        self._stock.say(AnswerProbe(request_id=event.request_id, present=tuple([block in entries for block in event.hashes])))

    def acquire(self, event: AcquireRequested, now: Nanos) -> None:
        """Cost: O(blocks)."""
        stock = self._stock
        stock.end_due_among(event.key_space, (block.hash for block in event.blocks))
        found = stock.index.leading_runs(event.key_space, event.blocks, as_sealed=event.as_sealed)
        entries = list(dict.fromkeys([entry for entry in found if entry is not None]))
        granted = stock.leases.grant(event.key_space, entries, ttl=event.ttl, now=now) if entries else None
        if granted is None:
            nothing = AnswerAcquire(request_id=event.request_id, lease_id=LeaseId(0), ttl=Nanos(0), blocks=(None,) * len(event.blocks))
            stock.say(nothing)
            return
        if event.counts:
            self._count_use(entries)
            self._used(entries)
        lease_id, ttl = granted
        blocks, recoded = acquired_blocks(found)
        if recoded:
            stock.leases.promise(lease_id, {event.blocks[number].hash: rung for number, rung in recoded.items()})
        stock.say(AnswerAcquire(request_id=event.request_id, lease_id=lease_id, ttl=ttl, blocks=tuple(blocks), recoded=recoded))

    def _count_use(self, entries: list[Entry]) -> None:
        stock = self._stock
        stock.count_use(entries)
        most = stock.admission.counted_uses
        for entry in entries:
            if entry.uses < most:
                entry.uses += 1
                if entry.ssd is None and entry.readable_host and stock.admission.demotes(entry):
                    stock.want_demotion(entry)

    def read(self, event: ReadRequested, now: Nanos) -> None:
        stock = self._stock
        items: list[ReadItem] = []
        held: list[tuple[Entry, Copy] | None] = []
        from_ssd: list[Entry] = []
        for block in event.hashes:
            entry = stock.leases.entry(event.lease_id, event.key_space, block, now=now)
            copy = None if entry is None else entry.serving(_SERVES_LEASES, stock.leases.rung(event.lease_id, block))
            if entry is None or copy is None:
                items.append(ReadItem(ReadStatus.NOT_LEASED if entry is None else ReadStatus.IO_ERROR, None, 0))
                held.append(None)
                continue
            copy.hold()
            items.append(ReadItem(ReadStatus.OK, copy.extent, copy.checksum))
            held.append((entry, copy))
            if copy.tier is Tier.SSD:
                from_ssd.append(entry)
        operation = OperationId(0)
        if any(held):
            reading = _Reading(deadline=Nanos(now + stock.config.lease.max_read), held=held)

            def on_outcomes(outcomes: tuple[ReadOutcome, ...]) -> None:
                del self._readings[operation]
                self._finish(reading, outcomes)

            operation = stock.reads.start(on_outcomes)
            self._readings[operation] = reading
        stock.say(AnswerRead(request_id=event.request_id, operation=operation, items=tuple(items)))
        for entry in from_ssd if event.counts else ():
            self._hit_on_ssd(entry)

    def _finish(self, reading: _Reading, outcomes: tuple[ReadOutcome, ...]) -> None:
        assert len(outcomes) == len(reading.held)
        for hold, outcome in zip(reading.held, outcomes, strict=True):
            if hold is None:
                continue
            entry, copy = hold
            if outcome is ReadOutcome.CORRUPT:
                self._stock.quarantine(entry, copy, "checksum")
            elif outcome is ReadOutcome.IO_ERROR:
                self._stock.quarantine(entry, copy, "io_error")
            self._stock.unhold(entry, copy)

    def renew(self, event: RenewRequested, now: Nanos) -> None:
        ttl = self._stock.leases.renew(event.lease_id, ttl=event.ttl, now=now)
        self._stock.say(AnswerRenew(request_id=event.request_id, ttl=ttl))

    def release(self, event: ReleaseRequested, now: Nanos) -> None:
        stock = self._stock
        for block in event.corrupt_hashes:
            leased = stock.leases.entry(event.lease_id, event.key_space, block, now=now)
            entry = leased if leased is not None else stock.index.get(event.key_space, block)
            if entry is not None:
                for copy in entry.copies:
                    if copy.state in _SERVES_LEASES:
                        self._check_copy(entry, copy)
        stock.unleased(stock.leases.release(event.lease_id, event.key_space, event.hashes or None))
        stock.say(AnswerRelease(request_id=event.request_id))

    def sweep(self, now: Nanos) -> None:
        self._stock.end_expired_leases(now)
        for operation, reading in self._readings.items():
            if reading.deadline > now:
                break
            if not reading.cancelled:
                reading.cancelled = True
                self._stock.say(CancelRead(operation=operation))
