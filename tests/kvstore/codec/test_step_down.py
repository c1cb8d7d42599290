"""Stepping a payload down a rung in the coded domain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung, read_header
from kvstore.codec.bit_planes import dropped, stepped_down
from kvstore.codec.reference import narrow, scale_of, widen
from kvstore.core.layout import Layout
from kvstore.errors import CodecFailure, CorruptPayload

Make = Callable[..., BlockCodec]
Block = Callable[..., np.ndarray]


def decoded(codec: BlockCodec, payload: bytes) -> np.ndarray:
    out = codec.empty_block()
    codec.decode_into(payload, out)
    return widen(out, codec.layout.dtype)


@pytest.mark.parametrize("start_position", [0, 32])
@pytest.mark.parametrize(
    ("finer", "coarser"),
    [((Rung.INT8, 4), (Rung.INT4, 4)), ((Rung.INT6, 4), (Rung.INT5, 4)), ((Rung.KLT, 2), (Rung.KLT, 6)), ((Rung.KLT, 3), (Rung.KLT, 3))],
)
def test_a_payload_steps_down_within_the_error_that_it_states(
    make_codec: Make, make_block: Block, finer: tuple[Rung, int], coarser: tuple[Rung, int], start_position: int
) -> None:
    fine, coarse = make_codec(finer[0], step=finer[1]), make_codec(coarser[0], step=coarser[1])
    block = make_block(fine)
    payload = fine.encode(block, start_position=start_position)
    stepped = coarse.step_down(payload)
    header = read_header(stepped)
    assert (header.rung, header.start_position) == (coarser[0], start_position)
    error = np.abs(decoded(coarse, stepped) - widen(block, "bfloat16"))
    assert error.max() <= header.max_abs_error
    assert np.sqrt(np.square(error, dtype=np.float64).mean()) <= header.rms_error
    direct = read_header(coarse.encode(block, start_position=start_position))
    assert header.payload_bytes < 1.1 * direct.payload_bytes
    assert np.sqrt(np.square(error, dtype=np.float64).mean()) < 2 * direct.rms_error
    assert coarse.step_down(payload) == stepped


@pytest.mark.parametrize(
    ("layout", "finer", "coarser", "layer_rungs"),
    [
        ({}, Rung.INT8, Rung.INT4, {}),
        ({"head_dim": 20, "block_tokens": 24}, Rung.INT8, Rung.INT5, {0: Rung.INT6}),
        ({"head_dim": 72, "dtype": "float16"}, Rung.INT6, Rung.INT4, {1: Rung.INT5}),
        ({"dtype": "float32"}, Rung.INT6, Rung.INT5, {0: Rung.INT8, 1: Rung.INT5}),
    ],
)
def test_the_machine_code_drops_the_planes_that_the_definition_drops(
    layout: dict[str, Any], finer: Rung, coarser: Rung, layer_rungs: dict[int, Rung]
) -> None:
    shape = Layout(**{"layers": 2, "kv_heads": 3, "head_dim": 64, "dtype": "bfloat16", "block_tokens": 32} | layout)
    fine = BlockCodec(shape, model_digest=bytes(32), rung=finer, layer_rungs=layer_rungs, group=16, exact_tokens=3)
    coarse = BlockCodec(shape, model_digest=bytes(32), rung=coarser)
    rng = np.random.default_rng(7)
    block = fine.empty_block()
    numbers = rng.normal(0, 1, block.shape) * rng.choice([0.0, 1e-6, 1.0, 900.0], (*block.shape[:3], 1, 1)) + rng.choice(
        [0, 0, 40], block.shape
    )
    block[:] = narrow(numbers.astype(np.float32), shape.dtype)
    for start_position in (0, shape.block_tokens):
        payload = fine.encode(block, start_position=start_position)
        header, (exact, keys, values, side) = coarse.opened(payload)
        stepped = coarse.step_down(payload)
        after, sections = coarse.opened(stepped)
        expected = stepped_down(header, keys, values, side, widths=after.widths)
        assert tuple(section.tobytes() for section in sections) == (exact.tobytes(), *expected)
        moved = (decoded(coarse, payload) - decoded(coarse, stepped).astype(np.float64)).reshape(-1)
        rms = header.rms_error + math.sqrt(np.add.accumulate(moved * moved)[-1] / moved.size)
        assert (after.max_abs_error, after.rms_error) == tuple(
            float(np.float32(bound * (1 + 2.0**-22))) for bound in (header.max_abs_error + np.abs(moved).max(), rms)
        )


def test_a_scale_that_would_not_fit_its_code_is_refused(make_codec: Make) -> None:
    fine, coarse = make_codec(Rung.INT8), make_codec(Rung.INT4)
    block = fine.empty_block()
    block[...] = narrow(np.where(np.arange(block.shape[-1]) % 2, -16128, 16128).astype(np.float32), "bfloat16")
    with pytest.raises(CodecFailure) as failure:
        coarse.step_down(fine.encode(block, start_position=fine.layout.block_tokens))
    assert failure.value.reason == "out_of_range"


def test_dropped_planes_stay_within_half_a_step_of_the_new_scale() -> None:
    rng = np.random.default_rng(0)
    spread = rng.choice([2, 10, 40, 120], (3, 1, 5))
    steps = np.rint(rng.normal(0, 1, (3, 70, 5)) * spread).astype(np.int32) + rng.choice([0, 900], (3, 1, 5))
    scale_codes = rng.integers(0, 200, (3, 2, 5)).astype(np.uint8)
    scales, zeros, kept = dropped(scale_codes, steps, axis=1, group=64, bits=4)
    assert kept.max() <= 15
    old, new = (scale_of(part).repeat(64, axis=1)[:, :70] for part in (scale_codes, scales))
    moved = (kept.astype(float) + zeros.repeat(64, axis=1)[:, :70]) * new - steps * old
    assert (np.abs(moved) <= new / 2).all()


def test_steps_up_and_between_kinds_of_rungs_are_refused(make_codec: Make, make_block: Block) -> None:
    int4, klt = make_codec(Rung.INT4), make_codec(Rung.KLT, step=4)
    block = make_block(int4)
    for codec, payload in (
        (int4, int4.encode(block, start_position=0)),
        (make_codec(Rung.INT8), int4.encode(block, start_position=0)),
        (make_codec(Rung.KLT, step=6), klt.encode(block, start_position=0)),
        (make_codec(Rung.KLT, step=2), klt.encode(block, start_position=0)),
    ):
        with pytest.raises(CodecFailure) as failure:
            codec.step_down(payload)
        assert failure.value.reason == "no_step_down"


def test_a_damaged_payload_is_not_stepped_down(make_codec: Make, make_block: Block) -> None:
    fine, coarse = make_codec(Rung.INT8), make_codec(Rung.INT4)
    payload = bytearray(fine.encode(make_block(fine), start_position=0))
    payload[-1] ^= 1
    with pytest.raises(CorruptPayload):
        coarse.step_down(payload)
