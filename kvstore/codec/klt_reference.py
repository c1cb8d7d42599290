"""The klt stream in plain Python: the definition that klt_kernels must equal word for word. One coefficient at a time, big integers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.codec.klt_kernels import CLASSES, ESCAPE, GAIN_ONE, LANES, LOWEST_STATE, MEAN_ONE, PROBABILITY_BITS

Operation = tuple[int, int, int, int]
"""(lane, start, frequency, bits): an interval of 2**bits, of which [start, start + frequency) is meant."""

_LONGEST_RAW = 12


def expected_class(mean: int, before: int, twice_before: int, gain: int, weights: Sequence[int]) -> int:
    """floor(4 * log2(expected magnitude)) with the logarithm linear between powers of two, counted from 2**-5."""
    scaled = (mean * gain) >> 12
    total = (weights[0] * mean + (weights[1] * before + weights[2] * twice_before) * MEAN_ONE + weights[3] * scaled) >> 8
    total = min(total, 0xFFFFFF)
    if total <= 0:
        return 0
    octave: int = total.bit_length() - 1
    quarter: int = math.floor((total / 2**octave - 1) * 4)
    return min(max(4 * (octave - 3) + quarter, 0), CLASSES - 1)


def operations(
    rows: np.ndarray, means: Sequence[int], weights: Sequence[int], frequencies: np.ndarray, shifts: Sequence[int]
) -> Iterator[Operation]:
    """What is coded for one part: coefficients [components, tokens], means of the components."""
    tokens = rows.shape[1]
    gains = [GAIN_ONE] * tokens
    for row, mean in zip(rows, means, strict=True):
        inverse = GAIN_ONE * 256 * MEAN_ONE // mean
        before = twice_before = (mean + MEAN_ONE // 2) // MEAN_ONE
        for t, q in enumerate(int(value) for value in row):
            index = expected_class(mean, before, twice_before, gains[t], weights)
            ratio = min((abs(q) * inverse) >> 8, GAIN_ONE * 8)
            gains[t] += (ratio - gains[t]) >> 5
            before, twice_before = abs(q), before
            shift = int(shifts[index])
            symbol = min(abs(q) >> shift, ESCAPE)
            start = int(frequencies[index][:symbol].sum())
            yield t % LANES, start, int(frequencies[index][symbol]), PROBABILITY_BITS
            if symbol == ESCAPE:
                rest = (abs(q) >> shift) - ESCAPE + 1
                length = rest.bit_length() - 1
                yield t % LANES, length, 1, 5
                yield from _raw(t % LANES, rest - (1 << length), length)
            yield from _raw(t % LANES, abs(q) & ((1 << shift) - 1), shift)
            if q:
                yield t % LANES, int(q < 0), 1, 1


def stream(coded: Sequence[Operation]) -> list[int]:
    """The words of a section: the states, low word first, then what a reader takes in."""
    states = [LOWEST_STATE] * LANES
    words: list[int] = []
    for lane, start, frequency, bits in reversed(coded):
        x = states[lane]
        if x >= frequency << (32 - bits):
            words.append(x & 0xFFFF)
            x >>= 16
        states[lane] = ((x // frequency) << bits) + x % frequency + start
    head = [word for state in states for word in (state & 0xFFFF, state >> 16)]
    return head + words[::-1]


def _raw(lane: int, value: int, bits: int) -> Iterator[Operation]:
    while bits > 0:
        piece = min(bits, _LONGEST_RAW)
        yield lane, value & ((1 << piece) - 1), 1, piece
        value >>= piece
        bits -= piece
