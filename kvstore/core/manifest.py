"""The bytes that make an SSD region self-describing: region header, record headers, footer. Pure bytes <-> dataclass.

A region is `[region header 4 KiB][record]...[footer]`; a record is `[record header 4 KiB][payload, padded to 4 KiB]`. The footer ends
with the region. Record headers and footer are authenticated with the region's nonce, which nobody outside the node knows and which
changes with every reuse: so bytes of an older use, or a payload crafted to look like a header, never count.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from kvstore.core.events.regions import RecoveredRecord
from kvstore.core.extent import ALIGNMENT, round_up
from kvstore.errors import UnsupportedFormat
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, RungCode, StripeId

FORMAT_VERSION = 3
"""2: records say when their block ends. 3: and at which rung they are."""
NONCE_BYTES = 16
MAX_NAMESPACE_BYTES = 1024
"""So that a record header fits its block whatever the namespace."""

_REGION_MAGIC = b"LARDRGN\x00"
_RECORD_MAGIC = b"LARDREC\x00"
_FOOTER_MAGIC = b"LARDFTR\x00"
_MAC_BYTES = 16

_REGION = struct.Struct("<8sHxxIQQQ16s")  # magic, version, alignment, region, region_bytes, sequence, nonce
_RECORD_HEAD = struct.Struct("<8sHBxI")  # magic, version, erased, body length
_BODY = struct.Struct("<QQQQQHI32s32s32s32sH")
"""Offset, length, checksum, generation, end, rung, index, layout, hash, parent, stripe, namespace length."""
_TRAILER = struct.Struct("<8sHxxIQ")  # magic, version, count, footer offset; the MAC follows and ends the region
_TRAILER_BYTES = _TRAILER.size + _MAC_BYTES

HEADER_BYTES = ALIGNMENT
"""Room of a region header, and of each record header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionHeader:
    region: int
    region_bytes: int
    sequence: int
    """Grows with each opening of any region of the node."""
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    record: RecoveredRecord
    erased: bool


def encode_region_header(header: RegionHeader) -> bytes:
    """One block. Its own checksum guards it against tears."""
    assert len(header.nonce) == NONCE_BYTES
    packed = _REGION.pack(_REGION_MAGIC, FORMAT_VERSION, ALIGNMENT, header.region, header.region_bytes, header.sequence, header.nonce)
    return (packed + _mac(b"", packed)).ljust(HEADER_BYTES, b"\0")


def decode_region_header(block: bytes) -> RegionHeader | None:
    """None: no region was ever opened here, or it was dropped, or the header is torn; the region is free.

    Raises UnsupportedFormat when it is a region of another format version: not ours to overwrite.
    """
    if len(block) < _REGION.size + _MAC_BYTES or not block.startswith(_REGION_MAGIC):
        return None
    packed = block[: _REGION.size]
    _, version, alignment, region, region_bytes, sequence, nonce = _REGION.unpack(packed)
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(f"SSD region in format {version}; this program reads format {FORMAT_VERSION}")
    if not hmac.compare_digest(_mac(b"", packed), block[_REGION.size : _REGION.size + _MAC_BYTES]):
        return None
    if alignment != ALIGNMENT:
        raise UnsupportedFormat(f"SSD region with alignment {alignment}; this program uses {ALIGNMENT}")
    return RegionHeader(region=region, region_bytes=region_bytes, sequence=sequence, nonce=nonce)


def encode_record_header(record: RecoveredRecord, *, nonce: bytes, erased: bool = False) -> bytes:
    """One block, to stand right before the payload. An erased one keeps its length, so that a scan can step over it."""
    body = _encode_body(record)
    packed = _RECORD_HEAD.pack(_RECORD_MAGIC, FORMAT_VERSION, erased, len(body)) + body
    block = packed + _mac(nonce, packed)
    assert len(block) <= HEADER_BYTES
    return block.ljust(HEADER_BYTES, b"\0")


def decode_record_header(block: bytes, *, nonce: bytes) -> RecordHeader | None:
    """None: no record of this use of the region starts here."""
    if len(block) < _RECORD_HEAD.size or not block.startswith(_RECORD_MAGIC):
        return None
    _, version, erased, body_bytes = _RECORD_HEAD.unpack_from(block)
    end = _RECORD_HEAD.size + body_bytes
    if version != FORMAT_VERSION or end + _MAC_BYTES > len(block):
        return None
    if not hmac.compare_digest(_mac(nonce, block[:end]), block[end : end + _MAC_BYTES]):
        return None
    record, _ = _decode_body(block, _RECORD_HEAD.size)
    return RecordHeader(record=record, erased=bool(erased))


def footer_entry_bytes(key_space: KeySpace) -> int:
    """What one record of this key space adds to a footer."""
    return _BODY.size + len(key_space.namespace.encode())


def footer_bytes(entry_bytes: int) -> int:
    """Room of a footer whose entries take `entry_bytes` in all."""
    return round_up(entry_bytes + _TRAILER_BYTES)


def encode_footer(records: list[RecoveredRecord], *, nonce: bytes, region_bytes: int) -> tuple[int, bytes]:
    """(offset, data) of the footer: data ends with the region, its trailer says where it starts."""
    entries = b"".join(map(_encode_body, records))
    size = footer_bytes(len(entries))
    offset = region_bytes - size
    packed = entries.ljust(size - _TRAILER_BYTES, b"\0") + _TRAILER.pack(_FOOTER_MAGIC, FORMAT_VERSION, len(records), offset)
    return offset, packed + _mac(nonce, packed)


def footer_offset(last_block: bytes, *, region_bytes: int) -> int | None:
    """Where the footer starts, by the last ALIGNMENT bytes of the region. None: there is none. Not yet authenticated."""
    if len(last_block) != ALIGNMENT:
        return None
    magic, version, _, offset = _TRAILER.unpack_from(last_block, ALIGNMENT - _TRAILER_BYTES)
    plausible = HEADER_BYTES <= offset <= region_bytes - ALIGNMENT and offset % ALIGNMENT == 0
    return int(offset) if magic == _FOOTER_MAGIC and version == FORMAT_VERSION and plausible else None


def decode_footer(data: bytes, *, nonce: bytes) -> tuple[RecoveredRecord, ...] | None:
    """The records, from the bytes [footer offset, region end). None: torn, or of an older use."""
    if len(data) < _TRAILER_BYTES or not hmac.compare_digest(_mac(nonce, data[:-_MAC_BYTES]), data[-_MAC_BYTES:]):
        return None
    _, _, count, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER_BYTES)
    records: list[RecoveredRecord] = []
    at = 0
    spaces: dict[KeySpace, KeySpace] = {}
    for _ in range(count):
        record, at = _decode_body(data, at)
        records.append(record._replace(key_space=spaces.setdefault(record.key_space, record.key_space)))
    return tuple(records)


def _encode_body(record: RecoveredRecord) -> bytes:
    block, namespace = record.block, record.key_space.namespace.encode()
    assert len(namespace) <= MAX_NAMESPACE_BYTES
    fixed = _BODY.pack(
        record.offset,
        record.length,
        record.checksum,
        record.generation,
        record.expires_at,
        record.rung,
        block.index,
        record.key_space.layout,
        block.hash,
        block.parent,
        block.stripe,
        len(namespace),
    )
    return fixed + namespace


def _decode_body(data: bytes, at: int) -> tuple[RecoveredRecord, int]:
    offset, length, checksum, generation, expires_at, rung, index, *hashes, namespace_bytes = _BODY.unpack_from(data, at)
    layout, hashed, parent, stripe = hashes
    at += _BODY.size
    namespace = Namespace(data[at : at + namespace_bytes].decode())
    record = RecoveredRecord(
        key_space=KeySpace(namespace, LayoutFingerprint(layout)),
        block=BlockRef(hash=BlockHash(hashed), parent=BlockHash(parent), stripe=StripeId(stripe), index=index),
        offset=offset,
        length=length,
        checksum=checksum,
        generation=generation,
        expires_at=expires_at,
        rung=RungCode(rung),
    )
    return record, at + namespace_bytes


def _mac(nonce: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, key=nonce, digest_size=_MAC_BYTES).digest()
