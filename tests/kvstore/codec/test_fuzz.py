"""Whatever is done to a payload: a clean refusal with the target untouched, or the right block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import BlockCodec, Rung, read_header
from kvstore.codec.block_format import HEADER_BYTES, write_header
from kvstore.codec.klt_fit import Moments, fit_bases
from kvstore.codec.klt_tables import KltTables
from kvstore.core.layout import Layout
from kvstore.errors import CorruptPayload, UnsupportedFormat


def tables() -> KltTables:
    moments = Moments(layers=1, kv_heads=1, head_dim=16, group_layers=1, inverse_frequencies=0.1 ** np.arange(8.0))
    moments.add(np.random.default_rng(5).normal(0.9, 0.2, (1, 2, 1, 200, 16)).astype(np.float32), start_position=0)
    fitted = fit_bases(
        moments,
        key_metric=np.ones(16),
        value_metric=np.eye(16)[None],
        base_step=0.01,
        keep_above=0.0,
        model_digest=bytes(32),
    )
    return dataclasses.replace(fitted, digest=b"t" * 32)


LAYOUT = Layout(layers=1, kv_heads=1, head_dim=16, dtype="bfloat16", block_tokens=16)
TABLES = tables()
CODECS = {rung: BlockCodec(LAYOUT, model_digest=bytes(32), rung=rung, calibration=TABLES) for rung in Rung}
UNTOUCHED = 0x7FFF


def sample(rung: Rung, start_position: int) -> tuple[bytes, np.ndarray]:
    block = (0x3F00 + np.arange(512) * 37 % 255).astype(np.uint16).reshape(1, 2, 1, 16, 16)
    return CODECS[rung].encode_canonical(block, start_position=start_position), block


SAMPLES = [sample(rung, start_position) for rung in Rung for start_position in (0, 16)]

Mutation = Callable[[bytes], bytes]


def replaced(at: int, data: bytes) -> Mutation:
    return lambda payload: payload[: at % len(payload)] + data + payload[at % len(payload) + len(data) :]


def inserted(at: int, data: bytes) -> Mutation:
    return lambda payload: payload[: at % len(payload)] + data + payload[at % len(payload) :]


def cut(start: int, length: int) -> Mutation:
    return lambda payload: payload[: start % len(payload)] + payload[start % len(payload) + length :]


def copied(source: int, target: int, length: int) -> Mutation:
    return lambda payload: replaced(target, payload[source % len(payload) :][:length])(payload)


POSITION = st.one_of(st.integers(0, HEADER_BYTES), st.integers(0, 2000))
MUTATIONS = st.lists(
    st.one_of(
        st.builds(replaced, POSITION, st.binary(min_size=1, max_size=8)),
        st.builds(inserted, POSITION, st.binary(min_size=1, max_size=8)),
        st.builds(cut, POSITION, st.integers(1, 300)),
        st.builds(copied, POSITION, POSITION, st.integers(1, 64)),
    ),
    min_size=1,
    max_size=4,
)


def check(payload: bytes, original: bytes, block: np.ndarray) -> None:
    out = np.full(block.shape, UNTOUCHED, np.uint16)
    try:
        CODECS[Rung.RAW].decode_into(payload, out)
    except (CorruptPayload, UnsupportedFormat):
        refused = True
    else:
        refused = False
    if refused:
        assert (out == UNTOUCHED).all()
    else:
        assert payload == original
        assert (out == block).all()


@settings(max_examples=600)
@given(st.sampled_from(SAMPLES), MUTATIONS)
def test_a_mutated_payload_is_refused_or_right(sampled: tuple[bytes, np.ndarray], mutations: list[Mutation]) -> None:
    payload, block = sampled
    mutated = payload
    for mutation in mutations:
        mutated = mutation(mutated) or b"\0"
    check(mutated, payload, block)


@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_random_bytes_are_no_payload(data: bytes) -> None:
    with pytest.raises((CorruptPayload, UnsupportedFormat)):
        read_header(data)


@settings(max_examples=300)
@given(st.sampled_from(SAMPLES), st.data())
def test_a_forged_body_under_a_fitting_checksum_never_crashes_the_decoder(sampled: tuple[bytes, np.ndarray], data: st.DataObject) -> None:
    payload, block = sampled
    header = read_header(payload)
    sections = []
    start = header.header_bytes
    for size in header.section_bytes:
        section = bytearray(payload[start : start + size])
        start += size
        for at in data.draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=4 if size else 0)):
            section[at] = data.draw(st.integers(0, 255))
        sections.append(bytes(section))
    body = b"".join(sections)
    forged = write_header(header, body) + body
    out = np.empty(block.shape, np.uint16)
    try:
        CODECS[Rung.RAW].decode_into(forged, out)
    except CorruptPayload:
        assert header.packed or header.rung is Rung.KLT
