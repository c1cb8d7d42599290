"""Payloads of the format's version 3, and calibration tables, as files.

They must be read as the same numbers, and written as the same bytes, on every machine. A change of format or arithmetic moves the
version; these files then follow.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung, read_header
from kvstore.codec.klt_tables import load_tables
from kvstore.core.layout import Layout

GOLDEN = Path(__file__).parents[2] / "golden"
LAYOUT = Layout(layers=2, kv_heads=1, head_dim=10, dtype="bfloat16", block_tokens=8, rope=(("theta", "10000"),))
MODEL = hashlib.sha256(b"golden").digest()


def block_of(layout: Layout) -> np.ndarray:
    """bfloat16 patterns of both signs and magnitudes from 2**-4 to 2**3, from integer arithmetic alone."""
    shape = (layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    noise = (np.arange(np.prod(shape), dtype=np.uint64) * 2654435761 >> 7) % (1 << 16)
    return ((noise & 0x8000) + ((123 + noise % 7) << 7) + (noise >> 3 & 0x7F)).astype(np.uint16).reshape(shape)


DIGESTS = {
    "raw-0": "a650d48524f515cf57cc8838d1497322b1f5672bffe4281238f85defc73d0ef7",
    "int8-0": "410e4f2b306af8839992ba9615b87b3e6e094ffe1b971a4da8c0e0f6ba86edcf",
    "int8-16": "7725a72acfb19caa254414c7de8b85b344c2b43522424a27330d1a821a9e948f",
    "int4-0": "ccc7234e955f0c9aa06c0514f09f77dc1b9463465f40780e3b58f5b06f4ffc3f",
    "int4-16": "d321697839dd0b85860611a28e22a5652925a16ceb27459685b6c6481caad952",
    "lossless-16": "67d75a56d66d04570dd6f0b4f3ad07851d38e9b1fcffd41924f7bda67f705af2",
}

KLT_DIGESTS = {
    0: "f70ca424accb7974e9ca6fac6a9f0995e50daba0d16d98221ae3eb49da454c5c",
    16: "d3443d5d63a8dee03077cd54fa2da2ece714c6bb23c907d6ca3379fd8c103bab",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_a_golden_payload_is_read_as_the_same_numbers(name: str) -> None:
    payload = (GOLDEN / f"block-v3-{name}.bin").read_bytes()
    rung, start_position = name.split("-")
    layout = large() if rung == "lossless" else LAYOUT
    out = np.empty((layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim), np.uint16)
    header = BlockCodec(layout, model_digest=MODEL, rung=Rung.RAW).decode_into(payload, out)
    assert (header.rung, header.start_position) == (rung, int(start_position))
    assert hashlib.sha256(out.tobytes()).hexdigest() == DIGESTS[name]
    if rung in ("raw", "lossless"):
        assert (out == block_of(layout)).all()


@pytest.mark.parametrize("name", [name for name in DIGESTS if not name.startswith("lossless")])  # its bytes are libzstd's
def test_the_same_block_is_written_as_the_golden_bytes(name: str) -> None:
    rung, start_position = name.split("-")
    codec = BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung(rung), entropy=False)
    payload = codec.encode(block_of(LAYOUT), start_position=int(start_position))
    assert payload == (GOLDEN / f"block-v3-{name}.bin").read_bytes()


def test_the_golden_lossless_payload_went_through_the_entropy_stage() -> None:
    assert read_header((GOLDEN / "block-v3-lossless-16.bin").read_bytes()).packed == 1


@pytest.mark.parametrize("start_position", [0, 16])
def test_golden_tables_write_and_read_the_golden_payloads_of_rung_klt(start_position: int) -> None:
    tables = load_tables(GOLDEN / "tables-v2.klt")
    codec = BlockCodec(LAYOUT, model_digest=MODEL, rung=Rung.KLT, entropy=False, calibration=tables, step=3)
    golden = (GOLDEN / f"block-v3-klt-{start_position}.bin").read_bytes()
    block = block_of(LAYOUT)
    assert codec.encode_canonical(block, start_position=start_position) == golden
    out = np.empty_like(block)
    header = codec.decode_into(golden, out)
    assert (header.step, header.calibration) == (3, tables.digest)
    assert (out == block).all()
    assert hashlib.sha256(out.tobytes()).hexdigest() == KLT_DIGESTS[start_position]


def large() -> Layout:
    return Layout(layers=2, kv_heads=1, head_dim=64, dtype="bfloat16", block_tokens=16)
