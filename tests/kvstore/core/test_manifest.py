from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import manifest
from kvstore.core.events.regions import RecoveredRecord
from kvstore.core.extent import ALIGNMENT
from kvstore.core.manifest import (
    HEADER_BYTES,
    RegionHeader,
    decode_footer,
    decode_record_header,
    decode_region_header,
    encode_footer,
    encode_record_header,
    encode_region_header,
    footer_bytes,
    footer_entry_bytes,
    footer_offset,
)
from kvstore.errors import UnsupportedFormat
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, RungCode, StripeId

NONCE = b"n" * 16
REGION_BYTES = 64 * ALIGNMENT
HEADER = RegionHeader(region=3, region_bytes=REGION_BYTES, sequence=77, nonce=NONCE)

hashes = st.binary(min_size=32, max_size=32)
records = st.builds(
    RecoveredRecord,
    key_space=st.builds(KeySpace, st.text(max_size=100).map(Namespace), hashes.map(LayoutFingerprint)),
    block=st.builds(
        BlockRef, hash=hashes.map(BlockHash), parent=hashes.map(BlockHash), stripe=hashes.map(StripeId), index=st.integers(0, 2**32 - 1)
    ),
    offset=st.integers(0, 2**40),
    length=st.integers(0, 2**40),
    checksum=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**63),
    expires_at=st.integers(0, 2**63),
    rung=st.integers(0, 2**16 - 1).map(RungCode),
)


@given(records, st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_record_header_reads_back_as_written(record: RecoveredRecord, erased: bool) -> None:
    block = encode_record_header(record, nonce=NONCE, erased=erased)
    assert len(block) == HEADER_BYTES
    decoded = decode_record_header(block, nonce=NONCE)
    assert decoded is not None
    assert (decoded.record, decoded.erased) == (record, erased)


@given(st.lists(records, max_size=12))
@settings(max_examples=40, deadline=None)
def test_a_footer_reads_back_as_written_and_takes_the_room_that_was_kept_for_it(found: list[RecoveredRecord]) -> None:
    offset, data = encode_footer(found, nonce=NONCE, region_bytes=REGION_BYTES)
    assert offset + len(data) == REGION_BYTES
    assert len(data) == footer_bytes(sum(footer_entry_bytes(record.key_space) for record in found))
    assert footer_offset(data[-ALIGNMENT:], region_bytes=REGION_BYTES) == offset
    assert decode_footer(data, nonce=NONCE) == tuple(found)


@given(records, st.integers(0, 250 * 8))
@settings(max_examples=100, deadline=None)
def test_one_flipped_bit_voids_a_record_header(record: RecoveredRecord, bit: int) -> None:
    block = bytearray(encode_record_header(record, nonce=NONCE))
    block[bit // 8] ^= 1 << bit % 8
    decoded = decode_record_header(bytes(block), nonce=NONCE)
    assert decoded is None or decoded.record == record  # the padding counts for nothing


def test_bytes_of_an_earlier_use_of_the_region_do_not_count(chain: Callable, space: KeySpace) -> None:
    record = RecoveredRecord(space, chain(1)[0], 8192, 100, 5, 1)
    assert decode_record_header(encode_record_header(record, nonce=b"o" * 16), nonce=NONCE) is None
    _, data = encode_footer([record], nonce=b"o" * 16, region_bytes=REGION_BYTES)
    assert decode_footer(data, nonce=NONCE) is None


def test_a_region_header_reads_back_and_zeros_or_a_tear_mean_free() -> None:
    block = encode_region_header(HEADER)
    assert decode_region_header(block) == HEADER
    assert decode_region_header(bytes(HEADER_BYTES)) is None
    assert decode_region_header(block[:40] + bytes(HEADER_BYTES - 40)) is None
    assert decode_region_header(b"") is None


def test_another_format_version_is_recognised_and_not_taken_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 9)
    block = encode_region_header(HEADER)
    monkeypatch.undo()
    with pytest.raises(UnsupportedFormat, match="format 9"):
        decode_region_header(block)


def test_a_declared_length_beyond_four_gib_is_carried_whole(chain: Callable, space: KeySpace) -> None:
    record = RecoveredRecord(space, chain(1)[0], 8192, (1 << 32) + 5, 5, 1)
    decoded = decode_record_header(encode_record_header(record, nonce=NONCE), nonce=NONCE)
    assert decoded is not None
    assert decoded.record.length == (1 << 32) + 5


def test_the_bytes_of_the_region_header_are_the_same_for_ever() -> None:
    assert encode_region_header(HEADER)[:80].hex() == (
        "4c41524452474e000300000000100000030000000000000000000400000000004d00000000000000"
        "6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ef2e05f565aaa7f6d73e787eff79773300000000000000000"
    )
