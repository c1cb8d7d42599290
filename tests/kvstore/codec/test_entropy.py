from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from kvstore.codec import BlockCodec, Rung, entropy, read_header
from kvstore.codec.block_format import HEADER_BYTES, write_header
from kvstore.errors import CorruptPayload

Make = Callable[..., BlockCodec]
Block = Callable[..., np.ndarray]


def noise(size: int, *, levels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, levels, size, dtype=np.uint8)


def test_a_section_without_redundancy_stays_plain() -> None:
    assert entropy.pack(noise(100_000, levels=256), body_bytes=100_000) is None


def test_a_section_that_gains_less_than_the_threshold_stays_plain() -> None:
    gains_six_percent = np.clip(np.random.default_rng(0).normal(128, 45, 100_000), 0, 255).astype(np.uint8)
    packed = zstandard.ZstdCompressor(level=1).compress(gains_six_percent.tobytes())
    assert 0.03 < 1 - len(packed) / 100_000 < entropy.MIN_GAIN
    assert entropy.pack(gains_six_percent, body_bytes=100_000) is None


def test_a_section_that_gains_is_packed_and_comes_back() -> None:
    section = noise(100_000, levels=20)
    packed = entropy.pack(section, body_bytes=100_000)
    assert packed is not None
    assert len(packed) < 70_000
    assert entropy.unpack(memoryview(packed), size=100_000) == section.tobytes()


def test_a_section_too_small_to_matter_is_not_tried() -> None:
    section = np.zeros(1000, np.uint8)
    assert entropy.pack(section, body_bytes=100_000) is None
    assert entropy.pack(section, body_bytes=10_000) is not None
    assert entropy.pack(np.empty(0, np.uint8), body_bytes=0) is None


def test_a_frame_that_is_not_exactly_the_announced_size_is_corrupt() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    for packed in (frame[:-1], frame + b"\0", b"", b"no frame at all", frame + frame):
        with pytest.raises(CorruptPayload):
            entropy.unpack(memoryview(packed), size=1000)
    for size in (0, 999, 1001):
        with pytest.raises(CorruptPayload, match="announces 1000 bytes"):
            entropy.unpack(memoryview(frame), size=size)


def test_a_frame_that_announces_an_absurd_size_is_refused_before_it_is_unpacked() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    bomb = frame[:4] + bytes([0xE0]) + struct.pack("<Q", 1 << 60) + frame[9:]
    with pytest.raises(CorruptPayload, match="announces"):
        entropy.unpack(memoryview(bomb), size=1 << 20)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_byte_planes_come_back(dtype: type) -> None:
    elements = np.arange(1000).astype(dtype)
    planes = entropy.to_planes(elements)
    assert entropy.from_planes(planes, width=elements.itemsize).tobytes() == elements.tobytes()


def test_byte_planes_start_with_the_most_significant_byte() -> None:
    assert entropy.to_planes(np.array([0x0102, 0x0304], np.uint16)).tolist() == [1, 3, 2, 4]


def test_lossless_saves_a_fifth_of_bfloat16_and_raw_is_left_alone(make_codec: Make, make_block: Block) -> None:
    raw, lossless = make_codec(Rung.RAW), make_codec(Rung.LOSSLESS)
    block = make_block(raw)
    plain = raw.encode(block, start_position=0)
    packed = lossless.encode(block, start_position=0)
    assert len(plain) == HEADER_BYTES + block.nbytes
    assert len(packed) < 0.8 * len(plain)
    out = np.empty_like(block)
    lossless.decode_into(packed, out)
    assert (out == block).all()


@pytest.mark.parametrize("rung", [Rung.INT8, Rung.INT4])
def test_packing_changes_the_bytes_and_never_the_numbers(make_codec: Make, rung: Rung) -> None:
    plain, packing = make_codec(rung, entropy=False), make_codec(rung)
    block = np.zeros((3, 2, 2, 32, 64), np.uint16)
    block[..., ::5] = 0x3F80
    payloads = [codec.encode(block, start_position=0) for codec in (plain, packing)]
    assert len(payloads[1]) < 0.9 * len(payloads[0])
    assert read_header(payloads[1]).packed != 0
    blocks = [np.empty_like(block), np.empty_like(block)]
    for payload, out in zip(payloads, blocks, strict=True):
        plain.decode_into(payload, out)
    assert blocks[0].tobytes() == blocks[1].tobytes()


def test_a_payload_whose_checksum_fits_but_whose_section_does_not_unpack_is_corrupt(make_codec: Make, make_block: Block) -> None:
    codec = make_codec(Rung.LOSSLESS)
    payload = codec.encode(make_block(codec), start_position=0)
    header = read_header(payload)
    garbage = payload[HEADER_BYTES : HEADER_BYTES + 20] + bytes(header.section_bytes[0] - 20)
    forged = write_header(header, garbage) + garbage
    out = np.full((3, 2, 2, 32, 64), 7, np.uint16)
    with pytest.raises(CorruptPayload, match="does not unpack"):
        codec.decode_into(forged, out)
    assert (out == 7).all()
