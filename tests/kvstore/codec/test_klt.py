"""Rung klt from block to payload and back, with tables fitted to synthetic KV."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung, klt_reference, klt_rotation, read_header
from kvstore.codec.klt import KltTransform
from kvstore.codec.klt_products import factor, product
from kvstore.codec.klt_rotation import rotations, unrotated
from kvstore.codec.klt_tables import KltTables, load_tables, save_tables, tables_from_bytes
from kvstore.codec.reference import widen
from kvstore.core.layout import Layout
from kvstore.errors import CodecFailure, ConfigError, CorruptPayload, UnsupportedFormat

Make = Callable[..., BlockCodec]
Block = Callable[..., np.ndarray]
Tables = Callable[..., KltTables]

LAYOUT = Layout(layers=3, kv_heads=2, head_dim=16, dtype="float32", block_tokens=16)
MODEL = bytes(range(32))


def correlated(layout: Layout, seed: int = 9) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    common = rng.normal(0, 1, (1, 2, 1, layout.block_tokens, layout.head_dim))
    return ((common + rng.normal(0, 1, shape)).cumsum(-1) / 8).astype(np.float32)


def test_rotations_are_those_of_the_c_library_to_single_precision() -> None:
    positions = np.array([0, 1, 2, 3, 100, 8191, 131071, 1 << 20])
    frequencies = np.array([1.0, 0.3, 0.01, 1e-5])
    cosine, sine = rotations(positions, frequencies)
    angles = positions[:, None] * frequencies
    assert np.abs(cosine - np.cos(angles)).max() < 1e-7
    assert np.abs(sine - np.sin(angles)).max() < 1e-7


def test_unrotated_keys_do_not_depend_on_where_they_stood() -> None:
    rng = np.random.default_rng(0)
    keys, frequencies = rng.normal(0, 1, (4, 16)).astype(np.float32), 100.0 ** -np.arange(0, 1, 1 / 8)
    for start in (0, 17, 5000):
        angles = np.arange(start, start + 4)[:, None] * frequencies
        first, second = keys[:, :8], keys[:, 8:]
        rotated = np.concatenate(
            [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
        ).astype(np.float32)
        assert np.abs(unrotated(rotated, frequencies, start_position=start) - keys).max() < 1e-5


def test_the_error_shrinks_with_the_step_and_so_do_the_bytes_grow(make_tables: Tables) -> None:
    block, errors, sizes = correlated(LAYOUT), [], []
    for step in (1, 2, 4, 8, 16):
        codec = BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(LAYOUT), step=step)
        payload = codec.encode(block, start_position=48)
        out = np.empty_like(block)
        header = codec.decode_into(payload, out)
        assert (header.step, header.calibration) == (step, make_tables(LAYOUT).digest)
        assert np.abs(out - block).max() == np.float32(header.max_abs_error)
        assert math.sqrt(np.square(out - block, dtype=np.float64).mean()) == pytest.approx(header.rms_error, rel=1e-4)
        errors.append(header.rms_error)
        sizes.append(len(payload))
    assert errors == sorted(errors)
    assert sizes == sorted(sizes, reverse=True)
    assert errors[0] < 0.04 * block.std()


def test_the_weighted_error_of_each_coefficient_is_about_a_step(make_tables: Tables) -> None:
    """With a complete basis the transform loses nothing but the rounding: the inverse of the forward transform is the identity."""
    transform = KltTransform(make_tables(LAYOUT))
    block = correlated(LAYOUT)
    for step in (1, 3):
        quantized = transform.coefficients(block, start_position=16, step=step)
        again = transform.coefficients(
            transform.block(transform.parts(quantized), start_position=16, step=step), start_position=16, step=step
        )
        assert all(np.abs(a - b).max() <= 1 for a, b in zip(quantized, again, strict=True))
        assert all((a != b).mean() < 0.02 for a, b in zip(quantized, again, strict=True))


@pytest.mark.parametrize("largest", [1, 2000, 32767])
def test_a_product_is_exact_and_rounded_once_however_large(make_tables: Tables, largest: int) -> None:
    basis = make_tables(LAYOUT).bases[0][0]
    rows = np.random.default_rng(largest).integers(-largest, largest + 1, (len(basis), 16), dtype=np.int16)
    rows[:, 0] = np.where(basis[:, 0] < 0, -largest, largest)
    exact = rows.T.astype(np.int64) @ basis.astype(np.int64)
    assert largest < 32767 or np.abs(exact).max() > 1 << 24
    for limits in (factor(basis).limits, np.full(len(basis), 1e9, np.float32)):  # by 32-bit and by 64-bit sums
        assert (product(rows, dataclasses.replace(factor(basis), limits=limits)) == exact.astype(np.float32)).all()


@pytest.mark.parametrize("start_position", [0, 48, 1 << 19])
def test_duals_and_decoded_blocks_equal_the_numpy_reference_bit_for_bit(make_tables: Tables, start_position: int) -> None:
    tables = make_tables(LAYOUT)
    transform = KltTransform(tables)
    block = correlated(LAYOUT)
    assert (
        klt_rotation.duals(block, tables, start_position=start_position)
        == klt_reference.duals(block, tables, start_position=start_position)
    ).all()
    for step in (1, 6):
        parts = transform.parts(transform.coefficients(block, start_position=start_position, step=step))
        wanted = klt_reference.block(parts, tables, start_position=start_position, step=step)
        assert transform.block(parts, start_position=start_position, step=step).tobytes() == wanted.astype(np.float32).tobytes()


@pytest.mark.parametrize(("start_position", "step"), [(0, 1), (48, 6)])
def test_encoded_sections_equal_the_numpy_reference_byte_for_byte(make_tables: Tables, start_position: int, step: int) -> None:
    tables = make_tables(LAYOUT)
    transform = KltTransform(tables)
    where = {"start_position": start_position, "step": step}
    ours = transform.write(transform.coefficients(correlated(LAYOUT), **where), step=step)
    assert list(ours) == klt_reference.sections(correlated(LAYOUT), tables, **where)


def test_a_reader_without_the_tables_says_which_it_needs(make_tables: Tables) -> None:
    codec = BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(LAYOUT))
    payload = codec.encode(correlated(LAYOUT), start_position=0)
    out = np.full((3, 2, 2, 16, 16), 7, np.float32)
    with pytest.raises(UnsupportedFormat, match=f"needs calibration {make_tables(LAYOUT).digest.hex()[:12]}, this reader has none"):
        BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.INT8).decode_into(payload, out)
    other = make_tables(LAYOUT, group_layers=3)
    with pytest.raises(UnsupportedFormat, match=f"this reader has {other.digest.hex()[:12]}"):
        BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.INT8, calibration=other).decode_into(payload, out)
    assert (out == 7).all()


def test_writing_without_tables_or_with_those_of_another_model_is_a_configuration_error(make_tables: Tables) -> None:
    with pytest.raises(ConfigError, match="kvctl calibrate"):
        BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT)
    with pytest.raises(ConfigError, match="another model"):
        BlockCodec(LAYOUT, model_digest=b"x" * 32, rung=Rung.KLT, calibration=make_tables(LAYOUT))
    with pytest.raises(ConfigError, match="step must be"):
        BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(LAYOUT), step=0)


@pytest.mark.parametrize(("number", "reason"), [(np.nan, "not_finite"), (np.inf, "not_finite"), (20000.0, "out_of_range")])
def test_a_block_that_cannot_be_coded_is_refused_and_left_alone(make_tables: Tables, number: float, reason: str) -> None:
    codec = BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(LAYOUT))
    block = correlated(LAYOUT)
    block[1, 1, 0, 9, 3] = number
    before = block.copy()
    with pytest.raises(CodecFailure) as failure:
        codec.encode_canonical(block, start_position=0)
    assert failure.value.reason == reason
    assert block.tobytes() == before.tobytes()


def test_numbers_far_beyond_the_calibration_round_trip_or_are_refused(make_tables: Tables) -> None:
    codec = BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(LAYOUT), step=1)
    for times in (10.0, 100.0, 1000.0, 10000.0):
        block = np.clip(correlated(LAYOUT) * np.float32(times), -16000, 16000)
        try:
            payload = codec.encode(block, start_position=16)
        except CodecFailure:
            continue
        out = np.empty_like(block)
        header = codec.decode_into(payload, out)
        assert np.abs(out - block).max() == np.float32(header.max_abs_error)
        assert header.rms_error < 0.1


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 33])
def test_blocks_of_few_and_of_odd_numbers_of_tokens_round_trip(make_tables: Tables, tokens: int) -> None:
    layout = dataclasses.replace(LAYOUT, block_tokens=tokens)
    codec = BlockCodec(layout, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(LAYOUT))
    block = correlated(layout)
    for start_position in (0, tokens * 7):
        payload = codec.encode(block, start_position=start_position)
        assert len(payload) <= codec.max_payload_bytes
        out = np.empty_like(block)
        header = codec.decode_into(payload, out, start_position=start_position)
        assert np.abs(out - block).max() == np.float32(header.max_abs_error)
        assert (out[..., : header.exact_tokens, :] == block[..., : header.exact_tokens, :]).all()


def test_correlated_channels_cost_fewer_bits_than_int4_at_a_smaller_error(make_codec: Make, make_tables: Tables) -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=64, block_tokens=32, dtype="bfloat16")
    klt = BlockCodec(layout, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(layout), step=3)
    int4 = BlockCodec(layout, model_digest=MODEL, rung=Rung.INT4)
    block = (correlated(layout).view(np.uint32) >> 16).astype(np.uint16)
    ours, theirs = (read_header(codec.encode(block, start_position=32)) for codec in (klt, int4))
    assert ours.payload_bytes < 0.85 * theirs.payload_bytes
    assert ours.rms_error < theirs.rms_error
    assert np.isfinite(widen(block, "bfloat16")).all()


def test_a_file_of_tables_reads_back_and_its_digest_is_its_address(make_tables: Tables, tmp_path: Path) -> None:
    tables = make_tables(LAYOUT)
    first, second = tmp_path / "a.klt", tmp_path / "b.klt"
    assert save_tables(tables, first) == save_tables(load_tables(first), second) == tables.digest
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.klt", "b.klt"]


def test_a_file_that_is_no_whole_table_is_a_configuration_error(make_tables: Tables, tmp_path: Path) -> None:
    path = tmp_path / "a.klt"
    save_tables(make_tables(LAYOUT), path)
    raw = path.read_bytes()
    with pytest.raises(ConfigError, match="cannot read"):
        load_tables(tmp_path / "none.klt")
    for name, data in {
        "is no calibration file": b"GGUF" + raw[4:],
        "has version 9": raw[:4] + b"\x09\0" + raw[6:],
        "its digest does not fit": raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:],
    }.items():
        with pytest.raises(ConfigError, match=name):
            tables_from_bytes(data, name="x")
    for length in (0, 10, len(raw) // 2, len(raw) - 1):
        with pytest.raises(ConfigError):
            tables_from_bytes(raw[:length], name="x")


def test_sections_that_no_writer_made_are_corrupt(make_tables: Tables) -> None:
    transform = KltTransform(make_tables(LAYOUT))
    good = transform.write(transform.coefficients(correlated(LAYOUT), start_position=0, step=4), step=4)
    assert transform.read((memoryview(good[0]), memoryview(good[1])), tokens=16, step=4)
    for bad in (b"", b"\0", good[0][:-1], good[0][:-2], good[0] + b"\0\0", b"\xff\xff" + good[0][2:]):
        with pytest.raises(CorruptPayload):
            transform.read((memoryview(bad), memoryview(good[1])), tokens=16, step=4)


def test_a_block_of_an_engine_s_pool_becomes_what_its_payload_decodes_to(make_tables: Tables) -> None:
    """A pool hands out int16 views; a codec with tables and another rung of its own reads the payload."""
    layout = dataclasses.replace(LAYOUT, dtype="bfloat16")
    writer = BlockCodec(layout, model_digest=MODEL, rung=Rung.KLT, calibration=make_tables(layout))
    reader = BlockCodec(layout, model_digest=MODEL, rung=Rung.INT8, calibration=make_tables(layout))
    for start_position in (0, 160):
        block = (correlated(layout).view(np.uint32) >> 16).astype(np.int16)
        payload = writer.encode_canonical(block, start_position=start_position)
        out = reader.empty_block()
        reader.decode_into(payload, out, start_position=start_position)
        assert out.tobytes() == block.tobytes()
