"""The entropy coder of rung klt: equal to its plain definition, and never outside its input."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import klt_kernels, klt_reference
from kvstore.codec.klt_fit import default_statistics, fitted_frequencies

WEIGHTS = np.array([16, 24, 12, 204])


def tables(frequencies: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    starts = np.cumsum(frequencies, axis=1) - frequencies
    slots = np.stack([np.repeat(np.arange(klt_kernels.SYMBOLS, dtype=np.uint8), row) for row in frequencies])
    return starts, frequencies, shifts.astype(np.int64), slots


STARTS, FREQUENCIES, SHIFTS, SLOTS = tables(*(part[0] for part in default_statistics()))


def written(rows: np.ndarray, parts: np.ndarray, used: np.ndarray, means: np.ndarray) -> np.ndarray:
    words = np.empty(rows.size * 4 + 64, np.uint16)
    start = klt_kernels.write_stream(rows, parts, used, means, WEIGHTS, STARTS, FREQUENCIES, SHIFTS, words)
    assert start >= 0
    return words[start:]


def read(words: np.ndarray, parts: np.ndarray, used: np.ndarray, means: np.ndarray, tokens: int) -> np.ndarray | None:
    out = np.zeros((int(parts[-1]), tokens), np.float32)
    fine = klt_kernels.read_stream(words, parts, used, means, WEIGHTS, STARTS, FREQUENCIES, SHIFTS, SLOTS, out)
    return out if fine else None


def sample(seed: int, *, tokens: int, spread: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    parts = np.array([0, 9, 23])
    scale = np.exp(rng.normal(0, spread, 23)) * np.repeat([30.0, 1.0], [9, 14])
    rows = np.clip(np.rint(rng.laplace(0, scale[:, None], (23, tokens))), -32767, 32767).astype(np.int16)
    means = np.clip(np.rint(scale * 256), 1, klt_kernels.MAX_MEAN).astype(np.int64)
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
            rows[first : first + count], means[first : first + count].tolist(), WEIGHTS.tolist(), FREQUENCIES, SHIFTS.tolist()
        )
    ]
    assert words.tolist() == klt_reference.stream(coded)
    back = read(words, parts, used, means, tokens)
    assert back is not None
    rows[20:] = 0
    assert (back == rows).all()


@pytest.mark.parametrize("value", [-32767, -1000, -1, 0, 1, 15, 16, 32767])
@pytest.mark.parametrize("mean", [1, 256, 1 << 16, klt_kernels.MAX_MEAN])
def test_any_coefficient_can_follow_any_expectation(value: int, mean: int) -> None:
    rows = np.full((6, 5), value, np.int16)
    parts, used, means = np.array([0, 6]), np.array([6]), np.full(6, mean)
    back = read(written(rows, parts, used, means), parts, used, means, 5)
    assert back is not None
    assert (back == rows).all()


def test_no_room_is_told_and_nothing_is_written_before_the_buffer() -> None:
    rows, parts, used, means = sample(0, tokens=32, spread=1.0)
    whole = written(rows, parts, used, means).size
    for size in (0, 7, whole // 2, whole - 1):
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
    assert (frequencies >= 1).all()
    words = np.empty(rows.size * 4 + 64, np.uint16)
    start = klt_kernels.write_stream(rows, parts, used, means, WEIGHTS, starts, frequencies, shifts, words)
    assert words.size - start < 0.95 * written(rows, parts, used, means).size
