"""The control messages that go with every put and get, in the framing of the data plane. Pure.

A gRPC call would cost more than everything else of a get. They are trusted as they are through gRPC, which has no authentication either.
All sizes are checked before anything is made of a body; what does not fit raises BadFrame. Answers are columns, one kind of number after
another: a batch is packed, and unpacked, in one call.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import starmap
from typing import Any, NamedTuple

from kvstore.core.events.gets import AcquiredBlock
from kvstore.core.events.puts import CommitStatus, ReserveGrant, ReserveItem, ReserveStatus
from kvstore.core.extent import Tier
from kvstore.ids import AS_SEALED, HASH_BYTES, BlockHash, BlockRef, KeySpace, LayoutFingerprint, LeaseId, Namespace, RungCode, WriteToken
from kvstore.rpc.store_stub import Acquired, FoundCopy, Grant
from kvstore.transport.frames import MAX_ITEMS, BadFrame
from kvstore.transport.ticket import TICKET_BYTES
from kvstore.units import Nanos, milliseconds, to_milliseconds

_COUNT = struct.Struct("<I")
_KEY_SPACE = struct.Struct("<H")
_REF = struct.Struct("<32s32s32sI")
_RESERVE_ITEM = struct.Struct("<32s32s32sIQqH")
_ACQUIRE = struct.Struct("<IB")  # time to live, whether as sealed
_ACQUIRED = struct.Struct(f"<QIII{TICKET_BYTES}s")  # lease, its time, blocks, those not as sealed, ticket
_RECODED = struct.Struct("<IH")  # which block, its rung
_GRANTS = struct.Struct("<IIB")
_COMMIT_ITEM = struct.Struct("<QQ")
_LEASE = struct.Struct("<Q")
_HASH = struct.Struct(f"<{HASH_BYTES}s")
MAX_CONTROL_BYTES = 1024 + MAX_ITEMS * _RESERVE_ITEM.size
_NOWHERE = -1
_TIERS = {int(tier): tier for tier in Tier}
"""Ten times as quick as Tier(number)."""
_RESERVE_STATUSES = {int(status): status for status in ReserveStatus}
_COMMIT_STATUSES = {int(status): status for status in CommitStatus}
_UNSAID = -1
_NO_TICKET = bytes(TICKET_BYTES)
_make_ref: Any = partial(tuple.__new__, BlockRef)
_make_found: Any = partial(tuple.__new__, FoundCopy)
"""From all fields. Half the time of the constructor; a wide acquire makes a thousand."""


class AcquireBody(NamedTuple):
    key_space: KeySpace
    ttl: Nanos | None
    blocks: tuple[BlockRef, ...]
    as_sealed: bool = False

    def pack(self) -> bytes:
        ttl_ms = 0 if self.ttl is None else max(1, round(to_milliseconds(self.ttl)))
        return b"".join((_ACQUIRE.pack(ttl_ms, self.as_sealed), _pack_key_space(self.key_space), _pack_many(_REF, self.blocks)))

    @classmethod
    def unpack(cls, data: bytes) -> AcquireBody:
        ttl_ms, as_sealed = _unpack_head(_ACQUIRE, data)
        key_space, at = _unpack_key_space(data, _ACQUIRE.size)
        refs = tuple(map(_make_ref, _unpack_many(_REF, data, at)))
        return cls(key_space, milliseconds(ttl_ms) if ttl_ms else None, refs, bool(as_sealed))


@lru_cache(64)
def _acquired_columns(count: int) -> struct.Struct:
    """Lengths (4 bytes: see MAX_PAYLOAD_BYTES), checksums, places in the arena, tiers (0: not there). Behind them _RECODED for each that is
    not given as sealed."""
    return struct.Struct(f"<{count}I{count}Q{count}q{count}B")


def pack_acquired(
    lease_id: LeaseId, ttl: Nanos, ticket: bytes, blocks: Sequence[AcquiredBlock | None], recoded: Mapping[int, RungCode]
) -> bytes:
    head = _ACQUIRED.pack(lease_id, int(to_milliseconds(ttl)), len(blocks), len(recoded), ticket)
    lengths, checksums, offsets, tiers = [], [], [], []
    for block in blocks:
        if block is None:
            block = _NOT_THERE
        length, checksum, tier, extent = block
        lengths.append(length)
        checksums.append(checksum)
        offsets.append(_NOWHERE if extent is None else extent[2])  # its offset; by name it takes twice as long
        tiers.append(tier)
    body = head + _acquired_columns(len(blocks)).pack(*lengths, *checksums, *offsets, *tiers)
    return b"".join((body, *starmap(_RECODED.pack, recoded.items()))) if recoded else body


_NOT_THERE: Any = (0, 0, 0, None)


def unpack_acquired(data: bytes) -> Acquired:
    lease_id, ttl_ms, count, recoded, ticket = _unpack_head(_ACQUIRED, data)
    recoded_bytes = recoded * _RECODED.size
    columns = _unpack_columns(_acquired_columns, data, _ACQUIRED.size, count, behind=recoded_bytes)
    copies: list[FoundCopy | None] = []
    try:
        for length, checksum, offset, tier in zip(
            columns[:count], columns[count : 2 * count], columns[2 * count : 3 * count], columns[3 * count :], strict=True
        ):
            place = None if offset == _NOWHERE else offset
            copies.append(_make_found((length, checksum, _TIERS[tier], place, AS_SEALED)) if tier else None)
    except KeyError:
        raise BadFrame("garbage", "an unknown tier") from None
    for number, rung in _RECODED.iter_unpack(data[len(data) - recoded_bytes :]) if recoded else ():
        copy = copies[number] if number < count else None
        if copy is None:
            raise BadFrame("garbage", "the rung of a block that is not there")
        copies[number] = copy._replace(rung=RungCode(rung))
    return Acquired(LeaseId(lease_id), milliseconds(ttl_ms), tuple(copies), ticket)


class ReleaseBody(NamedTuple):
    lease_id: LeaseId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]
    """Empty: the whole lease."""

    def pack(self) -> bytes:
        return b"".join((_LEASE.pack(self.lease_id), _pack_key_space(self.key_space), _COUNT.pack(len(self.hashes)), *self.hashes))

    @classmethod
    def unpack(cls, data: bytes) -> ReleaseBody:
        lease_id = _unpack_head(_LEASE, data)[0]
        key_space, at = _unpack_key_space(data, _LEASE.size)
        hashes = _unpack_many(_HASH, data, at)
        return cls(LeaseId(lease_id), key_space, tuple([digest for (digest,) in hashes]))


class ReserveBody(NamedTuple):
    key_space: KeySpace
    items: tuple[ReserveItem, ...]

    def pack(self) -> bytes:
        return _pack_key_space(self.key_space) + _pack_many(
            _RESERVE_ITEM, [(*ref, size, _UNSAID if ttl is None else ttl, rung) for ref, size, ttl, rung in self.items]
        )

    @classmethod
    def unpack(cls, data: bytes) -> ReserveBody:
        key_space, at = _unpack_key_space(data, 0)
        items = _unpack_many(_RESERVE_ITEM, data, at)
        make = tuple.__new__
        return cls(
            key_space,
            tuple(
                [
                    make(ReserveItem, (_make_ref((digest, parent, stripe, index)), size, None if ttl < 0 else ttl, rung))
                    for digest, parent, stripe, index, size, ttl, rung in items
                ]
            ),
        )


@lru_cache(64)
def _grant_columns(count: int) -> struct.Struct:
    """Write tokens, places in the arena, statuses; behind them the tickets, or nothing."""
    return struct.Struct(f"<{count}Q{count}Q{count}B")


def pack_grants(grants: Sequence[ReserveGrant], *, ttl: Nanos, tickets: Sequence[bytes]) -> bytes:
    """`tickets`: of TICKET_BYTES, one a grant, anything where it is none; none at all where nobody sends the bytes over a stream."""
    assert len(tickets) in (0, len(grants))
    head = _GRANTS.pack(int(to_milliseconds(ttl)), len(grants), bool(tickets))
    tokens = [grant.write_token for grant in grants]
    offsets = [0 if grant.extent is None else grant.extent.offset for grant in grants]
    columns = _grant_columns(len(grants)).pack(*tokens, *offsets, *[grant.status for grant in grants])
    return b"".join((head, columns, *[ticket or _NO_TICKET for ticket in tickets]))


def unpack_grants(data: bytes) -> list[Grant]:
    ttl_ms, count, with_tickets = _unpack_head(_GRANTS, data)
    ticket_bytes = count * TICKET_BYTES if with_tickets else 0
    columns = _unpack_columns(_grant_columns, data, _GRANTS.size, count, behind=ticket_bytes)
    tickets_at = len(data) - ticket_bytes
    ttl = milliseconds(ttl_ms)
    try:
        return [
            Grant(_RESERVE_STATUSES[status], WriteToken(token), offset, data[at : at + TICKET_BYTES] if with_tickets else b"", ttl)
            for token, offset, status, at in zip(
                columns[:count],
                columns[count : 2 * count],
                columns[2 * count :],
                range(tickets_at, tickets_at + count * TICKET_BYTES, TICKET_BYTES),
                strict=True,
            )
        ]
    except KeyError:
        raise BadFrame("garbage", "an unknown status of a reservation") from None


def pack_commit(items: Sequence[tuple[WriteToken, int]]) -> bytes:
    """(write token, checksum) each."""
    return _pack_many(_COMMIT_ITEM, items)


def unpack_commit(data: bytes) -> list[tuple[WriteToken, int]]:
    return _unpack_many(_COMMIT_ITEM, data, 0)


def pack_committed(statuses: Sequence[CommitStatus]) -> bytes:
    return bytes(statuses)


def unpack_committed(data: bytes) -> list[CommitStatus]:
    try:
        return [_COMMIT_STATUSES[status] for status in data]
    except KeyError:
        raise BadFrame("garbage", "an unknown status of a commit") from None


def _pack_key_space(key_space: KeySpace) -> bytes:
    namespace = key_space.namespace.encode()
    return b"".join((_KEY_SPACE.pack(len(namespace)), namespace, key_space.layout))


def _unpack_key_space(data: bytes, at: int) -> tuple[KeySpace, int]:
    start = at + _KEY_SPACE.size
    if len(data) < start:
        raise BadFrame("bad_length", "a body that ends before its key space")
    end = start + _KEY_SPACE.unpack_from(data, at)[0]
    if len(data) < end + HASH_BYTES:
        raise BadFrame("bad_length", "a body that ends in its key space")
    try:
        namespace = Namespace(data[start:end].decode())
    except UnicodeDecodeError:
        raise BadFrame("garbage", "a namespace that is not UTF-8") from None
    if not 0 < end - start <= 255:
        raise BadFrame("bad_length", f"a namespace of {end - start} bytes")
    return KeySpace(namespace, LayoutFingerprint(data[end : end + HASH_BYTES])), end + HASH_BYTES


def _pack_many(form: struct.Struct, items: Sequence[tuple[object, ...]]) -> bytes:
    return _COUNT.pack(len(items)) + b"".join([form.pack(*item) for item in items])


def _unpack_head(form: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < form.size:
        raise BadFrame("bad_length", "a body that ends in its head")
    return form.unpack_from(data)


def _unpack_many(form: struct.Struct, data: bytes, at: int) -> list[tuple[Any, ...]]:
    if len(data) < at + _COUNT.size:
        raise BadFrame("bad_length", "a body that ends before its items")
    count = _COUNT.unpack_from(data, at)[0]
    at += _COUNT.size
    if count > MAX_ITEMS or len(data) != at + count * form.size:
        raise BadFrame("bad_length", f"{count} items in {len(data) - at} bytes")
    return list(form.iter_unpack(memoryview(data)[at:]))


def _unpack_columns(columns: Any, data: bytes, at: int, count: int, *, behind: int) -> tuple[Any, ...]:
    """`behind`: bytes that are to come after the columns."""
    if count > MAX_ITEMS or len(data) != at + columns(count).size + behind:
        raise BadFrame("bad_length", f"{count} items in {len(data) - at} bytes")
    found: tuple[Any, ...] = columns(count).unpack_from(data, at)
    return found
