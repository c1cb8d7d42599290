from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys

import pytest

from kvstore.codec.block_format import HEADER_BYTES, MAGIC, VERSION, BlockHeader, Rung, read_header, verify, write_header
from kvstore.errors import CorruptPayload, UnsupportedFormat
from kvstore.ids import LayoutFingerprint

SMALL = BlockHeader(
    rung=Rung.INT8,
    dtype="bfloat16",
    layers=2,
    kv_heads=1,
    block_tokens=8,
    head_dim=4,
    group=64,
    exact_tokens=4,
    start_position=0,
    max_abs_error=0.5,
    rms_error=0.25,
    packed=0,
    section_bytes=(128, 32, 28, 24),
    model_digest=b"m" * 32,
    layout_fingerprint=LayoutFingerprint(b"l" * 32),
    widths=((8, 7), (8, 7)),
)

OFFSETS = {
    "version": (4, "<H"),
    "header_bytes": (6, "<H"),
    "rung": (8, "<B"),
    "dtype": (9, "<B"),
    "packed": (10, "<B"),
    "reserved": (11, "<B"),
    "layers": (12, "<H"),
    "kv_heads": (14, "<H"),
    "block_tokens": (16, "<H"),
    "head_dim": (18, "<H"),
    "group": (20, "<H"),
    "exact_tokens": (22, "<H"),
    "start_position": (24, "<Q"),
    "max_abs_error": (32, "<f"),
    "rms_error": (36, "<f"),
    "body_bytes": (40, "<Q"),
    "unpacked_bytes": (48, "<Q"),
    "keys_bytes": (64, "<Q"),
    "step": (152, "<I"),
    "calibration": (156, "<Q"),
    "bits": (188, "<B"),
}


def payload_of(header: BlockHeader) -> bytearray:
    body = b"".join(bytes([index] * size) for index, size in enumerate(header.section_bytes))
    return bytearray(write_header(header, body) + body)


def with_field(name: str, value: float) -> bytearray:
    payload = payload_of(SMALL)
    offset, kind = OFFSETS[name]
    struct.pack_into(kind, payload, offset, value)
    return payload


def test_a_header_reads_back_as_it_was_written() -> None:
    payload = payload_of(SMALL)
    header = read_header(payload)
    assert dataclasses.replace(header, checksum=0) == SMALL
    assert header.payload_bytes == len(payload)
    verify(payload, header)


def test_a_header_costs_few_bytes() -> None:
    assert HEADER_BYTES == 196


def test_a_newer_version_is_refused_and_the_known_one_is_named() -> None:
    with pytest.raises(UnsupportedFormat, match=f"version {VERSION + 1} is not known here; known: {VERSION}"):
        read_header(with_field("version", VERSION + 1))


@pytest.mark.parametrize("name", ["rung", "dtype"])
def test_an_unknown_code_is_refused_and_the_known_ones_are_named(name: str) -> None:
    with pytest.raises(UnsupportedFormat, match=r"code 200 is not known here; known: 1 \("):
        read_header(with_field(name, 200))


@pytest.mark.parametrize("bits", [3, 9])
def test_codes_of_a_width_that_no_kernel_knows_are_refused(bits: int) -> None:
    with pytest.raises(UnsupportedFormat, match="4 to 8 bits"):
        read_header(with_field("bits", bits))


@pytest.mark.parametrize(("name", "value"), [("reserved", 1), ("packed", 16)])
def test_unknown_flags_are_refused(name: str, value: int) -> None:
    with pytest.raises(UnsupportedFormat, match="flags"):
        read_header(with_field(name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("header_bytes", 8),
        ("layers", 0),
        ("layers", 65535),
        ("kv_heads", 0),
        ("block_tokens", 0),
        ("head_dim", 65535),
        ("group", 0),
        ("group", 65535),
        ("group", 60),
        ("step", 1),
        ("calibration", 1),
        ("bits", 4),
        ("exact_tokens", 9),
        ("start_position", 1),
        ("start_position", 2**64 - 8),
        ("max_abs_error", float("nan")),
        ("max_abs_error", -1.0),
        ("rms_error", float("inf")),
        ("body_bytes", 2**32 + 208),
        ("unpacked_bytes", 2**63),
        ("keys_bytes", 2**33),
        ("packed", 2),
    ],
)
def test_a_field_that_cannot_be_is_a_corrupt_payload(name: str, value: float) -> None:
    with pytest.raises(CorruptPayload):
        read_header(with_field(name, value))


def test_a_block_of_more_than_four_gibibytes_is_refused_before_anything_is_allocated() -> None:
    payload = payload_of(dataclasses.replace(SMALL, rung=Rung.RAW, widths=(), group=0, exact_tokens=8, section_bytes=(256, 0, 0, 0)))
    for name, value in (("layers", 4096), ("kv_heads", 4096), ("block_tokens", 4096), ("head_dim", 4096), ("exact_tokens", 4096)):
        struct.pack_into(OFFSETS[name][1], payload, OFFSETS[name][0], value)
    with pytest.raises(CorruptPayload, match="allowed are 1073741824"):
        read_header(payload)


def test_every_truncation_is_a_corrupt_payload() -> None:
    payload = payload_of(SMALL)
    for length in range(len(payload)):
        with pytest.raises(CorruptPayload):
            read_header(payload[:length])
    with pytest.raises(CorruptPayload, match="announces"):
        read_header(payload + b"\0")


def test_something_else_is_no_payload() -> None:
    with pytest.raises(CorruptPayload, match="starts with"):
        read_header(b"GGUF" + bytes(500))
    assert payload_of(SMALL).startswith(MAGIC)


def test_every_flipped_bit_of_header_and_body_is_found() -> None:
    payload = payload_of(SMALL)
    for bit in range(len(payload) * 8):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptPayload, UnsupportedFormat)):
            verify(payload, read_header(payload))
        payload[bit // 8] ^= 1 << bit % 8


def test_a_store_node_reads_headers_without_numba_or_numpy() -> None:
    program = "import sys, kvstore.codec.block_format; print(sorted({'numba', 'numpy', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
