"""The entropy coder of rung klt: equal to its plain definition, and never outside its input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import klt_kernels, klt_reference
from kvstore.codec.klt import _entries
from kvstore.codec.klt_fit import default_statistics, fitted_frequencies
from kvstore.codec.klt_products import factor, product, wide_factor, wide_product

WEIGHTS = np.array([24, 232], np.float32) / np.float32(256)


def tables(frequencies: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    starts = np.cumsum(frequencies, axis=1) - frequencies
    entries = np.stack([_entries(*rows) for rows in zip(starts, frequencies, shifts, strict=True)])
    return starts, frequencies, shifts.astype(np.int64), entries


STARTS, FREQUENCIES, SHIFTS, ENTRIES = tables(*(part[0] for part in default_statistics()))


def written(rows: np.ndarray, parts: np.ndarray, used: np.ndarray, means: np.ndarray) -> np.ndarray:
    words = np.empty(rows.size * 4 + 64, np.uint16)
    start = klt_kernels.write_stream(rows, parts, used, means, WEIGHTS, STARTS, FREQUENCIES, SHIFTS, words)
    assert start >= 0
    return words[start:]


def read(words: np.ndarray, parts: np.ndarray, used: np.ndarray, means: np.ndarray, tokens: int) -> np.ndarray | None:
    out = np.zeros((int(parts[-1]), tokens), np.int16)
    fine = klt_kernels.read_stream(words, parts, used, means, WEIGHTS, ENTRIES, SHIFTS, out)
    return out if fine else None


def sample(seed: int, *, tokens: int, spread: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    parts = np.array([0, 9, 23])
    scale = np.exp(rng.normal(0, spread, 23)) * np.repeat([30.0, 1.0], [9, 14])
    rows = np.clip(np.rint(rng.laplace(0, scale[:, None], (23, tokens))), -32767, 32767).astype(np.int16)
    means = np.maximum(scale, klt_kernels.LEAST_MEAN).astype(np.float32)
    return rows, parts, np.array([9, 11]), means


@pytest.mark.parametrize("tokens", [1, 3, 28, 32])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_a_stream_has_the_words_of_its_definition_and_reads_back(tokens: int, spread: float) -> None:
    rows, parts, used, means = sample(tokens, tokens=tokens, spread=spread)
    words = written(rows, parts, used, means)
    coded = [
        operation
        for first, count in zip(parts, used, strict=False)
        for operation in klt_reference.operations(
            rows[first : first + count], means[first : first + count], WEIGHTS, FREQUENCIES, SHIFTS.tolist()
        )
    ]
    assert words.tolist() == klt_reference.stream(coded)
    back = read(words, parts, used, means, tokens)
    assert back is not None
    rows[20:] = 0
    assert (back == rows).all()


@pytest.mark.parametrize("value", [-32767, -1000, -1, 0, 1, 15, 16, 32767])
@pytest.mark.parametrize("mean", [klt_kernels.LEAST_MEAN, 1.0, 256.0, klt_kernels.MAX_MEAN])
def test_any_coefficient_can_follow_any_expectation(value: int, mean: float) -> None:
    rows = np.full((6, 5), value, np.int16)
    parts, used, means = np.array([0, 6]), np.array([6]), np.full(6, mean, np.float32)
    back = read(written(rows, parts, used, means), parts, used, means, 5)
    assert back is not None
    assert (back == rows).all()


def test_no_room_is_told_and_nothing_is_written_before_the_buffer() -> None:
    rows, parts, used, means = sample(0, tokens=32, spread=1.0)
    whole = written(rows, parts, used, means).size
    for size in (0, 15, whole // 2, whole - 1):
        buffer = np.full(size + 4, 7, np.uint16)
        assert klt_kernels.write_stream(rows, parts, used, means, WEIGHTS, STARTS, FREQUENCIES, SHIFTS, buffer[4:]) == -1
        assert (buffer[:4] == 7).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_words_that_were_tampered_with_are_no_stream_or_another_one(data: st.DataObject) -> None:
    rows, parts, used, means = sample(1, tokens=8, spread=1.0)
    words = written(rows, parts, used, means).copy()
    for at in data.draw(st.lists(st.integers(0, words.size - 1), min_size=1, max_size=4)):
        words[at] = data.draw(st.integers(0, 0xFFFF))
    length = data.draw(st.integers(0, words.size))
    back = read(words[:length], parts, used, means, 8)
    assert back is None or np.abs(back).max() <= klt_kernels.MAX_MAGNITUDE


def test_a_stream_that_is_cut_short_or_goes_on_is_none() -> None:
    rows, parts, used, means = sample(2, tokens=8, spread=1.0)
    words = written(rows, parts, used, means)
    for length in range(words.size):
        assert read(words[:length], parts, used, means, 8) is None
    assert read(np.append(words, np.uint16(0)), parts, used, means, 8) is None


def test_fitted_tables_cost_no_more_than_the_default_ones_on_what_they_were_fitted_to() -> None:
    rows, parts, used, means = sample(3, tokens=512, spread=1.0)
    rows = (rows // 3 * 3).astype(np.int16)  # magnitudes that no geometric distribution expects
    histogram = np.zeros((klt_kernels.CLASSES, 4096), np.int64)
    klt_kernels.classify(rows, parts, used, means, WEIGHTS, histogram)
    assert histogram.sum() == used.sum() * 512
    starts, frequencies, shifts, _ = tables(*(part[0] for part in fitted_frequencies([histogram, histogram])))
    assert (frequencies.sum(axis=1) == klt_kernels.TOTAL).all()
    assert (frequencies[:, klt_kernels.ESCAPE] >= 1).all()
    assert (frequencies[:, 1 : klt_kernels.ESCAPE : 2] - frequencies[:, 2 : klt_kernels.ESCAPE : 2] <= 1).all()
    words = np.empty(rows.size * 4 + 64, np.uint16)
    start = klt_kernels.write_stream(rows, parts, used, means, WEIGHTS, starts, frequencies, shifts, words)
    assert words.size - start < 0.95 * written(rows, parts, used, means).size


@pytest.mark.parametrize(("tokens", "components", "width"), [(1, 1, 1), (3, 5, 16), (32, 600, 40), (28, 513, 15)])
def test_a_product_of_pairs_is_the_product_of_integers(tokens: int, components: int, width: int) -> None:
    rng = np.random.default_rng(width)
    rows = rng.integers(-900, 900, (components, tokens), dtype=np.int16)
    basis = rng.integers(-2047, 2048, (components + 3, width), dtype=np.int16)
    wanted = rows.T.astype(np.int64) @ basis[:components].astype(np.int64)
    assert (product(rows, factor(basis)) == wanted.astype(np.float32)).all()


@pytest.mark.parametrize("bits", [3, 11, 26, 40])
def test_a_product_of_numbers_of_any_size_is_exact(bits: int) -> None:
    rng = np.random.default_rng(bits)
    numbers = rng.integers(-(1 << bits), 1 << bits, (5, 301))
    numbers[0, :2] = -(1 << bits), (1 << bits) - 1
    entries = rng.integers(-2047, 2048, (301, 40), dtype=np.int16)
    entries[:, 0] = np.where(numbers[0] < 0, -2047, 2047)  # the longest sums there can be
    for width in (40, 17, 0):
        assert (wide_product(numbers, wide_factor(entries), width=width) == numbers @ entries[:, :width].astype(np.int64)).all()
