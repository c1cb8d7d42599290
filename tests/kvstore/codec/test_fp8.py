from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung, fp8
from kvstore.codec.reference import narrow, widen
from kvstore.core.layout import KvDtype, Layout

NO_HALF = np.empty(0, np.uint16)


def nearest(number: float) -> float:
    """The e4m3 number nearest to a finite one, ties to even, from its definition."""
    magnitude = abs(number)
    exponent = max(math.floor(math.log2(magnitude)), -6) if magnitude else -6
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(magnitude / step) * step, fp8.MAX_E4M3), number)


def encoded(block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    layers, _, heads, tokens, width = block.shape
    exponents, keys, values = np.empty((2, layers * heads), np.int8), *(np.empty(block.size // 2, np.uint8) for _ in range(2))
    fp8.encode(NO_HALF, block.reshape(-1), 2, (layers, heads, tokens, width), 0, False, exponents, keys, values)
    return exponents, keys, values


def decoded(exponents: np.ndarray, keys: np.ndarray, values: np.ndarray, shape: tuple[int, int, int, int, int]) -> np.ndarray:
    out = np.empty(shape, np.float32)
    fp8.decode(NO_HALF, out.reshape(-1), 2, (shape[0], *shape[2:]), 0, exponents, keys, values)
    return out


def test_the_values_of_all_codes_are_those_of_the_format() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = decoded(np.zeros((2, 1), np.int8), codes, codes, (1, 2, 1, 1, 256))[0, 0, 0, 0]
    assert [values[code] for code in (0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x81)] == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -(2**-9)]
    assert (np.diff(values[:128]) > 0).all()
    assert (values[128:] == -values[:128]).all()


@pytest.mark.parametrize("power", [-60, -9, 0, 13])
def test_every_number_is_rounded_to_the_nearest_code_under_its_head_s_exponent(power: int) -> None:
    rng = np.random.default_rng(power + 100)
    block = (rng.normal(0, 1, (2, 2, 3, 5, 15)) * np.exp(rng.normal(0, 3, (2, 2, 3, 5, 15))) * 2.0**power).astype(np.float32)
    block[0, 0, 0, 0, :4] = 0.0, -0.0, block[0, 0, 0].max(), 2.0 ** (power - 12)
    exponents, keys, values = encoded(block)
    back = decoded(exponents, keys, values, (2, 2, 3, 5, 15))
    scale = np.ldexp(1.0, exponents.astype(int)).reshape(2, 2, 3).transpose(1, 0, 2)[..., None, None]
    scaled = block / scale
    largest = np.abs(scaled).max(axis=(3, 4))
    assert 224 < largest.min() <= largest.max() <= 448
    assert (back / scale == np.vectorize(nearest)(scaled.astype(float))).all()


def test_a_head_of_zeros_stays_zero() -> None:
    block = np.zeros((1, 2, 1, 3, 4), np.float32)
    assert (decoded(*encoded(block), (1, 2, 1, 3, 4)) == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_payload_decodes_to_what_the_pool_holds_and_states_its_error(dtype: KvDtype) -> None:
    layout = Layout(layers=2, kv_heads=2, head_dim=12, dtype=dtype, block_tokens=8)
    codec = BlockCodec(layout, model_digest=bytes(32), rung=Rung.FP8)
    block: np.ndarray[Any, Any] = narrow(np.random.default_rng(3).normal(0, 2, (2, 2, 2, 8, 12)).astype(np.float32), dtype)
    for position in (0, 8):
        canonical, out = block.copy(), codec.empty_block()
        payload = codec.encode_canonical(canonical, start_position=position)
        assert payload == codec.encode(block, start_position=position)
        header = codec.decode_into(payload, out)
        assert out.tobytes() == canonical.tobytes()
        error = widen(out, dtype)[..., header.exact_tokens :, :] - widen(block, dtype)[..., header.exact_tokens :, :]
        assert header.max_abs_error == np.abs(error).max()
        assert header.rms_error == pytest.approx(np.sqrt(np.square(error, dtype=np.float64).sum() / block.size), rel=1e-5)
