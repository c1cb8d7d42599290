"""Puts: reserve -> bytes -> commit. A block is listed when its bytes were found to be what was announced, never before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvstore.core.copies import CopyEvent, CopyState
from kvstore.core.durability import Settled
from kvstore.core.events.notes import NoteKind
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitRequested,
    CommitStatus,
    DiscardReservation,
    ReservationsAbandoned,
    ReserveGrant,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.events.verification import VerifyExtents, VerifyOutcome
from kvstore.core.extent import MAX_PAYLOAD_BYTES, Extent
from kvstore.core.index import Entry
from kvstore.core.manifest import MAX_NAMESPACE_BYTES
from kvstore.core.reservation import Reservation
from kvstore.core.room import Room
from kvstore.core.staging import Staging
from kvstore.core.stock import Stock
from kvstore.ids import AS_SEALED, BlockHash, KeySpace, RequestId
from kvstore.units import Nanos

_EXISTS = ReserveGrant(ReserveStatus.EXISTS)
_PENDING = ReserveGrant(ReserveStatus.PENDING)
_MOST_WAITING = 256
"""Reservations that wait for the disk at a time; the next ones do not wait."""


class _CommitBatch:
    """One CommitRequested until its last item is settled."""

    def __init__(self, request_id: RequestId, size: int) -> None:
        self.request_id = request_id
        self.statuses = [CommitStatus.EXPIRED] * size
        self.written: list[tuple[int, Reservation, int]] = []
        """What is to be verified: number of the item, reservation, announced checksum."""
        self.open = 1
        """Items that are being verified, or wait for the disk, and one for the event still being handled."""


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """A ReserveRequested that was not answered at once: the disk is behind."""

    event: ReserveRequested
    grants: list[ReserveGrant]
    """Of its first items."""
    until: Nanos


class Puts:
    def __init__(
        self,
        stock: Stock,
        room: Room,
        *,
        room_is_coming: Callable[[], bool],
        patience: Nanos,
        durability: Callable[[Entry, Settled], bool] | None,
        staging: Staging | None,
    ) -> None:
        """`room_is_coming`: demotions under way will make host copies spare. A reservation waits for that as long as `patience`, so that a
        burst of puts faster than the disk costs time and not blocks.
        `durability`: whether the commit of a block shall wait for the disk, and if so a call when it is there, or will not be.
        `staging`: of a node without a host tier."""
        self._stock = stock
        self._room = room
        self._room_is_coming = room_is_coming
        self._patience = patience
        self._durability = durability
        self._staging = staging
        self._longest = min(MAX_PAYLOAD_BYTES, stock.arena.capacity)
        self._waiting: deque[_Waiting] = deque()
        self.stopping = False

    def reserve(self, event: ReserveRequested, now: Nanos) -> None:
        self.sweep(now)
        self._stock.end_expired_leases(now)
        patience = self._patience if len(self._waiting) < _MOST_WAITING and not event.spare_room_only else 0
        waiting = _Waiting(event=event, grants=[], until=Nanos(now + patience))
        if (self._waiting and patience) or not self._go_on(waiting, now):
            self._stock.counters["put_waits", "demotion"] += 1
            self._waiting.append(waiting)

    def go_on(self, now: Nanos) -> None:
        """After every event: who waited longest first."""
        while self._waiting and self._go_on(self._waiting[0], now):
            self._waiting.popleft()

    def _go_on(self, waiting: _Waiting, now: Nanos) -> bool:
        """True: answered."""
        event, grants, stock = waiting.event, waiting.grants, self._stock
        key_space, entries = event.key_space, stock.index.entries(event.key_space)
        before = len(grants)
        stock.end_due_among(key_space, [item.block.hash for item in event.items[before:]])
        usual_ttl = stock.config.ttls.get(key_space.namespace, Nanos(0))
        for item in event.items[before:]:
            ttl = usual_ttl if item.ttl is None else item.ttl
            present = entries.get(item.block.hash)
            if present is not None and not self._improves(present, item):
                if not event.spare_room_only:
                    stock.put_again(present, ttl=ttl)
                grants.append(_EXISTS)
            elif (key_space, item.block.hash) in stock.reservations:
                grants.append(_PENDING)
            else:
                found = self._room_for(event, item.payload_bytes, now, may_wait=now < waiting.until)
                if found is None:
                    return False
                if not isinstance(found, Extent):
                    grants.append(ReserveGrant(found))
                    continue
                copy = stock.take_room(key_space, found, CopyState.RESERVED)
                token = stock.reservations.open(key_space, item.block, copy, ttl=ttl, rung=item.rung, now=now).token
                grants.append(ReserveGrant(ReserveStatus.GRANTED, token, found))
        # Since a grant was made its block may have been deleted (the request had to wait) or evicted (for a later item). Its extent may be
        # another's by now, so the writer must not hear of it.
        for at, grant in enumerate(grants):
            if grant is _EXISTS:
                gone = event.items[at].block.hash not in entries
            else:
                gone = at < before and grant.extent is not None and stock.reservations.named(grant.write_token) is None
            if gone:
                grants[at] = _PENDING
        stock.say(AnswerReserve(request_id=event.request_id, grants=tuple(grants)))
        return True

    def _room_for(self, event: ReserveRequested, length: int, now: Nanos, *, may_wait: bool) -> Extent | ReserveStatus | None:
        """Room, or why there is none; None: room is coming that costs no block its last copy."""
        stock, room, staging = self._stock, self._room, self._staging
        namespace, spare_only = event.key_space.namespace, event.spare_room_only
        if not 0 <= length <= self._longest or len(namespace.encode()) > MAX_NAMESPACE_BYTES:
            return ReserveStatus.TOO_LARGE
        if staging is not None and not staging.fits(event.key_space, length):
            return ReserveStatus.TOO_LARGE
        if not stock.quota.could_ever_fit(namespace, length):
            return ReserveStatus.QUOTA
        if self.stopping or (spare_only and not room.is_to_spare(length)):
            return ReserveStatus.NO_ROOM
        if staging is not None and not staging.takes(length, now):
            return ReserveStatus.NO_ROOM
        if missing := stock.quota.missing(namespace, length):
            if not spare_only:
                room.evict_of_namespace(namespace, missing)
            if stock.quota.missing(namespace, length):
                return ReserveStatus.QUOTA
        if length > stock.largest_payload:
            stock.largest_payload = length
        extent = room.spare_in_host(length, namespace)
        if extent is None:
            if may_wait and self._room_is_coming():
                return None
            extent = None if spare_only else room.of_last_in_host(length, namespace)
        return ReserveStatus.NO_ROOM if extent is None else extent

    def _improves(self, present: Entry, item: ReserveItem) -> bool:
        """The payload is as sealed, and the block is here re-coded alone. Without a host tier the copy on the SSD would be in its way."""
        return item.rung == AS_SEALED and self._staging is None and not present.readable_as_sealed

    def commit(self, event: CommitRequested, now: Nanos) -> None:
        stock = self._stock
        batch = _CommitBatch(event.request_id, len(event.items))
        extents: list[Extent] = []
        for at, item in enumerate(event.items):
            reservation = stock.reservations.take_token(item.write_token, now=now)
            if reservation is None:
                continue
            extent = reservation.copy.extent
            if item.received_bytes < extent.length:
                batch.statuses[at] = CommitStatus.INCOMPLETE
                self._refuse(reservation)
                continue
            reservation.copy.on(CopyEvent.COMMIT_ASKED)
            batch.written.append((at, reservation, item.checksum))
            extents.append(extent)
        if extents:
            batch.open += len(extents)
            operation = stock.verifications.start(partial(self._verified, batch))
            checksums = tuple([checksum for _, _, checksum in batch.written])
            stock.say(VerifyExtents(operation=operation, extents=tuple(extents), checksums=checksums))
        self._one_done(batch)

    def _verified(self, batch: _CommitBatch, outcomes: tuple[VerifyOutcome, ...]) -> None:
        batch.open += 1
        for (at, reservation, checksum), outcome in zip(batch.written, outcomes, strict=True):
            if reservation.doomed or outcome is not VerifyOutcome.OK:
                self._refuse(reservation)
                self._settle(batch, at, CommitStatus.EXPIRED if reservation.doomed else CommitStatus.BAD_CHECKSUM)
                continue
            reservation.copy.stamp(checksum=checksum, rung=reservation.rung)
            entry = Entry(key_space=reservation.key_space, block=reservation.block, length=reservation.copy.length, checksum=checksum)
            if self._staging is not None:
                self._staging.place(reservation, entry, partial(self._settle, batch, at), self._stock.now)
                continue
            self._list(reservation, entry)
            if self._durability is None or not self._durability(entry, partial(self._settle_durable, batch, at)):
                self._settle(batch, at, CommitStatus.STORED)
        self._one_done(batch)

    def _settle_durable(self, batch: _CommitBatch, at: int, durable: bool) -> None:
        self._settle(batch, at, CommitStatus.DURABLE if durable else CommitStatus.STORED)

    def _settle(self, batch: _CommitBatch, at: int, status: CommitStatus) -> None:
        batch.statuses[at] = status
        self._one_done(batch)

    def _list(self, reservation: Reservation, entry: Entry) -> None:
        stock, copy = self._stock, reservation.copy
        stock.reservations.close(reservation)
        copy.on(CopyEvent.VERIFIED)
        entry.expires_at = stock.today + reservation.ttl if reservation.ttl else 0
        stock.add_copy(entry, copy)
        recoded = stock.index.get(entry.key_space, entry.hash)
        if recoded is None:
            stock.list_entry(entry)
        else:
            stock.list_instead(recoded, entry)
        stock.note(NoteKind.STORED, "put" if recoded is None else "as_sealed", entry, copy.tier)

    def _one_done(self, batch: _CommitBatch) -> None:
        batch.open -= 1
        if batch.open == 0:
            self._stock.say(AnswerCommit(request_id=batch.request_id, statuses=tuple(batch.statuses)))

    def abandon(self, event: ReservationsAbandoned) -> None:
        for token in event.write_tokens:
            reservation = self._stock.reservations.named(token)
            if reservation is not None:
                self._discard(reservation)

    def withdraw(self, key_space: KeySpace, block: BlockHash) -> bool:
        """The block is deleted: a put under way must not bring it back. False: none was."""
        reservation = self._stock.reservations.find(key_space, block)
        if reservation is None:
            return False
        if reservation.copy.state is CopyState.VERIFYING:
            reservation.doomed = True
        else:
            self._discard(reservation)
        return True

    def sweep(self, now: Nanos) -> None:
        for reservation in self._stock.reservations.expired(now):
            self._stock.note(NoteKind.RESERVATION_EXPIRED, "time", payload_bytes=reservation.copy.length)
            self._discard(reservation)

    def _discard(self, reservation: Reservation) -> None:
        self._stock.say(DiscardReservation(write_token=reservation.token))
        self._refuse(reservation)

    def _refuse(self, reservation: Reservation) -> None:
        self._stock.reservations.close(reservation)
        reservation.copy.on(CopyEvent.REFUSED)
        self._stock.give_back(reservation.key_space, reservation.copy)
