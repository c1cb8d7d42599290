"""The four control messages that go with every put and get, in the framing of the data plane. Pure.

A gRPC call would cost more than everything else of a get. They are trusted as they are through gRPC, which has no authentication either.
All sizes are checked before anything is made of a body; what does not fit raises BadFrame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore.core.events import ReserveItem
from kvstore.core.extent import Tier
from kvstore.ids import (
    AS_SEALED,
    HASH_BYTES,
    BlockHash,
    BlockRef,
    KeySpace,
    LayoutFingerprint,
    LeaseId,
    Namespace,
    RungCode,
    StripeId,
    WriteToken,
)
from kvstore.transport.frames import MAX_ITEMS, BadFrame
from kvstore.transport.ticket import TICKET_BYTES
from kvstore.units import Nanos, milliseconds, to_milliseconds

_COUNT = struct.Struct("<I")
_KEY_SPACE = struct.Struct("<H")
_REF = struct.Struct("<32s32s32sI")
_RESERVE_ITEM = struct.Struct("<32s32s32sIQqH")
_ACQUIRE = struct.Struct("<IB")  # time to live, whether as sealed
_ACQUIRED = struct.Struct(f"<QII{TICKET_BYTES}s")
_BLOCK = struct.Struct("<BQQqH")
_GRANTS = struct.Struct("<II")
_GRANT = struct.Struct(f"<BQQ{TICKET_BYTES}s")
_COMMIT_ITEM = struct.Struct("<QQ")
_LEASE = struct.Struct("<Q")
_HASH = struct.Struct(f"<{HASH_BYTES}s")
MAX_CONTROL_BYTES = 1024 + MAX_ITEMS * _RESERVE_ITEM.size
_NOWHERE = -1
_TIERS = {int(tier): tier for tier in Tier}
"""Ten times as quick as Tier(number)."""
_UNSAID = -1


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
        refs = _unpack_many(_REF, data, at)
        return cls(key_space, milliseconds(ttl_ms) if ttl_ms else None, tuple([_ref(*ref) for ref in refs]), bool(as_sealed))


class AcquiredCopy(NamedTuple):
    payload_bytes: int
    checksum: int
    tier: Tier
    arena_offset: int | None
    rung: RungCode = AS_SEALED


class AcquiredBody(NamedTuple):
    lease_id: LeaseId
    ttl: Nanos
    ticket: bytes
    copies: tuple[AcquiredCopy | None, ...]

    def pack(self) -> bytes:
        head = _ACQUIRED.pack(self.lease_id, int(to_milliseconds(self.ttl)), len(self.copies), self.ticket)
        return head + b"".join(
            [
                _BLOCK.pack(0, 0, 0, _NOWHERE, 0)
                if copy is None
                else _BLOCK.pack(copy[2], copy[0], copy[1], _NOWHERE if copy[3] is None else copy[3], copy[4])
                for copy in self.copies
            ]
        )

    @classmethod
    def unpack(cls, data: bytes) -> AcquiredBody:
        lease_id, ttl_ms, count, ticket = _unpack_head(_ACQUIRED, data)
        blocks = _unpack_counted(_BLOCK, data, _ACQUIRED.size, count)
        try:
            copies = [
                None if not tier else AcquiredCopy(length, checksum, _TIERS[tier], None if offset == _NOWHERE else offset, RungCode(rung))
                for tier, length, checksum, offset, rung in blocks
            ]
        except KeyError:
            raise BadFrame("garbage", "an unknown tier") from None
        return cls(LeaseId(lease_id), milliseconds(ttl_ms), ticket, tuple(copies))


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
        return cls(LeaseId(lease_id), key_space, tuple([BlockHash(digest) for (digest,) in hashes]))


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
        return cls(
            key_space,
            tuple([ReserveItem(_ref(*ref), size, None if ttl < 0 else Nanos(ttl), RungCode(rung)) for *ref, size, ttl, rung in items]),
        )


class PackedGrant(NamedTuple):
    status: int
    write_token: WriteToken
    arena_offset: int
    ticket: bytes
    """Of TICKET_BYTES; anything without a grant."""


def pack_grants(grants: Sequence[PackedGrant], *, ttl: Nanos) -> bytes:
    return _GRANTS.pack(int(to_milliseconds(ttl)), len(grants)) + b"".join([_GRANT.pack(*grant) for grant in grants])


def unpack_grants(data: bytes) -> tuple[Nanos, list[PackedGrant]]:
    ttl_ms, count = _unpack_head(_GRANTS, data)
    grants = _unpack_counted(_GRANT, data, _GRANTS.size, count)
    return milliseconds(ttl_ms), [PackedGrant(status, WriteToken(token), offset, ticket) for status, token, offset, ticket in grants]


def pack_commit(items: Sequence[tuple[WriteToken, int]]) -> bytes:
    """(write token, checksum) each."""
    return _pack_many(_COMMIT_ITEM, items)


def unpack_commit(data: bytes) -> list[tuple[WriteToken, int]]:
    return [(WriteToken(token), checksum) for token, checksum in _unpack_many(_COMMIT_ITEM, data, 0)]


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
    return _unpack_counted(form, data, at + _COUNT.size, _COUNT.unpack_from(data, at)[0])


def _unpack_counted(form: struct.Struct, data: bytes, at: int, count: int) -> list[tuple[Any, ...]]:
    if count > MAX_ITEMS or len(data) != at + count * form.size:
        raise BadFrame("bad_length", f"{count} items in {len(data) - at} bytes")
    return list(form.iter_unpack(memoryview(data)[at:]))


def _ref(digest: bytes, parent: bytes, stripe: bytes, index: int) -> BlockRef:
    return BlockRef(BlockHash(digest), BlockHash(parent), StripeId(stripe), index)
