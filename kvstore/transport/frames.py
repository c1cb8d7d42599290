"""The framing of the data plane: what goes over a stream, byte by byte. Pure.

A frame is a header of 32 bytes and `length` bytes behind it. A header has a checksum of its own, so that a stream that got out of step is
noticed before its length is believed. Both sides speak one version; another one is refused in the greeting.

    node    GREETING  body: nonce, boot id
    client  READ      body: read request, proof                       -> one PAYLOAD per hash, in order: status, and the payload if OK
    client  WRITE     body: write request, proof; then the payloads    -> WRITTEN, body: refused write tokens
    client  ARENA                                                      -> ARENA with the descriptors (Unix socket only)
    client  CONTROL                                                    -> nothing; from here on control messages alone (control_frames.py):
    client  ACQUIRE, RESERVE, COMMIT, PLACED                           -> ANSWER with the request's number, each when it is known
    client  RELEASE                                                    -> nothing
    client  UCX                                                        -> UCX, body: address of the node's UCX worker
    client  FETCH   body: UCX part, read request, proof                -> GROUPs, body: a status for each of the next payloads; those that
                                                                          are OK follow as UCX messages
    client  PUSH    body: UCX part, write request, proof; the payloads as UCX messages -> WRITTEN

Payloads over UCX go in messages of at most UCX_PIECE_BYTES, each payload beginning one; the tag of the n-th message of a request is the
tag in its UCX part plus n. The client draws that tag at random for each request.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import xxhash

from kvstore.errors import InvalidRequest
from kvstore.ids import HASH_BYTES, BlockHash, KeySpace, LayoutFingerprint, LeaseId, Namespace, WriteToken
from kvstore.transport.ticket import PROOF_BYTES
from kvstore.units import MIB, Nanos

MAGIC = b"LRDR"
VERSION = 1
MAX_ITEMS = 4096
_HEADER = struct.Struct("<4sBBHIIQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_READ = struct.Struct("<QQHI")
_WRITE_COUNT = struct.Struct("<I")
_WRITE_ITEM = struct.Struct("<QQQ")
_TOKEN = struct.Struct("<Q")
_UCX = struct.Struct("<QH")
UCX_PIECE_BYTES = 4 * MIB
MAX_UCX_ADDRESS_BYTES = 4096
MAX_BODY_BYTES = _UCX.size + MAX_UCX_ADDRESS_BYTES + _READ.size + 255 + HASH_BYTES + MAX_ITEMS * HASH_BYTES + PROOF_BYTES
"""Of a request; what is longer is refused before a byte of it is read."""
_LAST_TAG = (1 << 64) - 1
MAX_WRITTEN_BYTES = MAX_ITEMS * _TOKEN.size


class FrameKind(IntEnum):
    GREETING = 1
    READ = 2
    PAYLOAD = 3
    WRITE = 4
    WRITTEN = 5
    ARENA = 6
    PLACED = 7
    ACQUIRE = 8
    RESERVE = 9
    COMMIT = 10
    RELEASE = 11
    ANSWER = 12
    UCX = 13
    FETCH = 14
    GROUP = 15
    PUSH = 16
    CONTROL = 17


class BadFrame(InvalidRequest):
    """Not a frame of ours: the stream cannot be trusted any further. `reason` is a label for counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Header(NamedTuple):
    kind: FrameKind
    number: int
    """Of a request: how many came before it on this connection. Of an answer: the request's."""
    length: int
    """Bytes behind the header; of a WRITE those of the body, without the payloads."""
    status: int = 0
    item: int = 0

    def pack(self) -> bytes:
        head = _HEADER.pack(MAGIC, VERSION, self.kind, self.status, self.number, self.item, self.length)
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Raises BadFrame."""
        magic, version, kind, status, number, item, length = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise BadFrame("garbage", "not a frame of the data plane")
        if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEADER.size]):
            raise BadFrame("bad_header", "the checksum of a header does not fit")
        if version != VERSION:
            raise BadFrame("version", f"version {version} of the data plane; this is {VERSION}")
        try:
            return cls(FrameKind(kind), number, length, status, item)
        except ValueError:
            raise BadFrame("garbage", f"unknown kind of frame {kind}") from None


class ReadBody(NamedTuple):
    lease_id: LeaseId
    ticket_expires_at: Nanos
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]

    def pack(self) -> bytes:
        namespace = self.key_space.namespace.encode()
        head = _READ.pack(self.lease_id, self.ticket_expires_at, len(namespace), len(self.hashes))
        return b"".join((head, namespace, self.key_space.layout, *self.hashes))

    @classmethod
    def unpack(cls, data: bytes) -> ReadBody:
        """Raises BadFrame."""
        if len(data) < _READ.size:
            raise BadFrame("bad_length", "a read request that ends in its head")
        lease_id, expires_at, namespace_bytes, count = _READ.unpack_from(data)
        at = _READ.size + namespace_bytes
        end = at + HASH_BYTES
        if not 0 < count <= MAX_ITEMS or len(data) != end + count * HASH_BYTES:
            raise BadFrame("bad_length", f"a read request of {count} blocks in {len(data)} bytes")
        try:
            namespace = Namespace(data[_READ.size : at].decode())
        except UnicodeDecodeError:
            raise BadFrame("garbage", "a namespace that is not UTF-8") from None
        hashes = tuple([BlockHash(data[start : start + HASH_BYTES]) for start in range(end, len(data), HASH_BYTES)])
        return cls(LeaseId(lease_id), Nanos(expires_at), KeySpace(namespace, LayoutFingerprint(data[at:end])), hashes)


class UcxPart(NamedTuple):
    tag: int
    address: bytes
    """Of the client's UCX worker. UCX believes what it is given: it must be looked at only after the proof."""

    def pack(self) -> bytes:
        return _UCX.pack(self.tag, len(self.address)) + self.address

    @classmethod
    def split(cls, data: bytes) -> tuple[UcxPart, bytes]:
        """It, and the request behind it. Raises BadFrame."""
        if len(data) < _UCX.size:
            raise BadFrame("bad_length", "a request that ends in its UCX part")
        tag, length = _UCX.unpack_from(data)
        end = _UCX.size + length
        if not 0 < length <= MAX_UCX_ADDRESS_BYTES or len(data) < end:
            raise BadFrame("bad_length", f"a UCX address of {length} bytes")
        return cls(tag, data[_UCX.size : end]), data[end:]

    def tags(self) -> Iterator[int]:
        """One for each message of the request, in order."""
        return (tag & _LAST_TAG for tag in itertools.count(self.tag))


def pieces_of(payload: memoryview) -> list[memoryview]:
    """The messages in which a payload goes over UCX."""
    return [payload[start : start + UCX_PIECE_BYTES] for start in range(0, len(payload), UCX_PIECE_BYTES)]


class WriteItem(NamedTuple):
    write_token: WriteToken
    length: int
    ticket_expires_at: Nanos


def pack_write_body(items: Sequence[WriteItem]) -> bytes:
    return _WRITE_COUNT.pack(len(items)) + b"".join([_WRITE_ITEM.pack(*item) for item in items])


def unpack_write_body(data: bytes) -> list[WriteItem]:
    """Raises BadFrame."""
    if len(data) < _WRITE_COUNT.size:
        raise BadFrame("bad_length", "a write request that ends in its head")
    count = _WRITE_COUNT.unpack_from(data)[0]
    if not 0 < count <= MAX_ITEMS or len(data) != _WRITE_COUNT.size + count * _WRITE_ITEM.size:
        raise BadFrame("bad_length", f"a write request of {count} blocks in {len(data)} bytes")
    return [
        WriteItem(WriteToken(token), length, Nanos(expires_at))
        for token, length, expires_at in _WRITE_ITEM.iter_unpack(memoryview(data)[_WRITE_COUNT.size :])
    ]


def pack_tokens(tokens: Sequence[WriteToken]) -> bytes:
    return b"".join([_TOKEN.pack(token) for token in tokens])


def unpack_tokens(data: bytes) -> frozenset[WriteToken]:
    if len(data) % _TOKEN.size:
        raise BadFrame("bad_length", f"{len(data)} bytes of write tokens")
    return frozenset(WriteToken(token) for (token,) in _TOKEN.iter_unpack(data))
