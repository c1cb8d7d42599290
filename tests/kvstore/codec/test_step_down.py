"""Stepping a payload down a rung in the coded domain."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung, read_header
from kvstore.codec.bit_planes import dropped
from kvstore.codec.reference import scale_of, widen
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
