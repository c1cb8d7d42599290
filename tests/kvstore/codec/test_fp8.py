from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore.codec import fp8


def nearest(number: float) -> float:
    """The e4m3 number nearest to a finite one, ties to even, from its definition."""
    magnitude = abs(number)
    exponent = max(math.floor(math.log2(magnitude)), -6) if magnitude else -6
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(magnitude / step) * step, fp8.MAX_E4M3), number)


def test_the_values_of_all_codes_are_those_of_the_format() -> None:
    assert [fp8.VALUES[code] for code in (0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0x81)] == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 448, -(2**-9)]
    assert (np.diff(fp8.VALUES[:127]) > 0).all()
    assert (fp8.VALUES[128:] == -fp8.VALUES[:128]).all()


@pytest.mark.parametrize("power", [-60, -9, 0, 13])
def test_every_number_is_rounded_to_the_nearest_code_under_its_head_s_exponent(power: int) -> None:
    rng = np.random.default_rng(power + 100)
    block = (rng.normal(0, 1, (2, 2, 3, 5, 7)) * np.exp(rng.normal(0, 3, (2, 2, 3, 5, 7))) * 2.0**power).astype(np.float32)
    block[0, 0, 0, 0, :4] = 0.0, -0.0, block[0, 0, 0].max(), 2.0 ** (power - 12)
    exponents, keys, values = fp8.encoded(block)
    decoded = fp8.decoded(exponents, keys, values, shape=(2, 2, 3, 5, 7))
    scale = np.ldexp(1.0, exponents.astype(int)).reshape(2, 2, 3).transpose(1, 0, 2)[..., None, None]
    scaled = block / scale
    assert 224 <= np.abs(scaled).max(axis=(3, 4)).min() <= np.abs(scaled).max() <= 448
    assert (decoded / scale == np.vectorize(nearest)(scaled.astype(float))).all()


def test_a_head_of_zeros_stays_zero() -> None:
    block = np.zeros((1, 2, 1, 3, 4), np.float32)
    assert (fp8.decoded(*fp8.encoded(block), shape=(1, 2, 1, 3, 4)) == 0).all()
