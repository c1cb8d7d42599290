"""Reservations: room promised to one writer, until a time, under a write token."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.copies import Copy
from kvstore.ids import AS_SEALED, BlockHash, BlockRef, KeySpace, RungCode, WriteToken
from kvstore.units import Nanos


@dataclass(slots=True)
class Reservation:
    """Mutable: `doomed` is set when its block is deleted while the commit is being verified."""

    token: WriteToken
    key_space: KeySpace
    block: BlockRef
    copy: Copy
    expires_at: Nanos
    ttl: Nanos
    """Of the block, once it is listed; 0: no end."""
    rung: RungCode = AS_SEALED
    """What the writer says of the bytes."""
    doomed: bool = False


class ReservationTable:
    """At most one reservation per key. One that is being committed keeps its key but has lost its token. Cost: O(1) each."""

    def __init__(self, *, timeout: Nanos, first_token: int) -> None:
        self._timeout = timeout
        self._next_token = first_token
        self._by_token: dict[WriteToken, Reservation] = {}  # by age, so by expiry
        self._by_key: dict[tuple[KeySpace, BlockHash], Reservation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: tuple[KeySpace, BlockHash]) -> bool:
        return key in self._by_key

    def open(self, key_space: KeySpace, block: BlockRef, copy: Copy, *, ttl: Nanos, rung: RungCode = AS_SEALED, now: Nanos) -> Reservation:
        token = WriteToken(self._next_token)
        self._next_token += 1
        reservation = Reservation(token, key_space, block, copy, Nanos(now + self._timeout), ttl, rung)
        self._by_token[token] = reservation
        self._by_key[key_space, block.hash] = reservation
        return reservation

    def find(self, key_space: KeySpace, block: BlockHash) -> Reservation | None:
        return self._by_key.get((key_space, block))

    def take_token(self, token: WriteToken, *, now: Nanos) -> Reservation | None:
        """The token's reservation, if its time is not over. The token is spent; the key stays taken until `close`."""
        reservation = self._by_token.get(token)
        if reservation is None or now >= reservation.expires_at:
            return None
        return self._by_token.pop(token)

    def close(self, reservation: Reservation) -> None:
        self._by_token.pop(reservation.token, None)
        del self._by_key[reservation.key_space, reservation.block.hash]

    def named(self, token: WriteToken) -> Reservation | None:
        """The token's reservation, unspent."""
        return self._by_token.get(token)

    def expired(self, now: Nanos) -> list[Reservation]:
        """Those whose time is over, still open."""
        over: list[Reservation] = []
        for reservation in self._by_token.values():
            if reservation.expires_at > now:
                break
            over.append(reservation)
        return over
