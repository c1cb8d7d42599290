"""Rung klt in plain Python and numpy: the definition that klt_kernels and klt_rotation must equal bit for bit.

The stream works one coefficient at a time with big integers; the block with one integer product and float32 operations in a stated order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvstore.codec.klt import ROUNDING, WEAKEST
from kvstore.codec.klt_kernels import (
    CLASSES,
    ESCAPE,
    GAIN_MEMORY,
    LANES,
    LARGEST,
    LARGEST_RATIO,
    LEAST_MEAN,
    LOWEST_STATE,
    PROBABILITY_BITS,
)
from kvstore.codec.klt_rotation import DUAL_BITS, rotations
from kvstore.codec.klt_tables import KltTables

Operation = tuple[int, int, int, int]
"""(lane, start, frequency, bits): an interval of 2**bits, of which [start, start + frequency) is meant."""

_LONGEST_RAW = 12


def expected_class(mean: np.float32, gain: np.float32, weights: np.ndarray) -> int:
    """floor(4 * log2(expected magnitude)) with the logarithm linear between powers of two, counted from 2**-5."""
    expected = mean * (weights[0] + weights[1] * gain)
    quarters = int(np.float32(expected).view(np.uint32) >> np.uint32(21))
    return min(max(quarters - 4 * (127 - 5), 0), CLASSES - 1)


def operations(
    rows: np.ndarray, means: np.ndarray, weights: np.ndarray, frequencies: np.ndarray, shifts: Sequence[int]
) -> Iterator[Operation]:
    """What is coded for one part: coefficients [components, tokens]; means [components] and weights float32."""
    gains = np.ones(rows.shape[1], np.float32)
    for row, mean in zip(rows, means, strict=True):
        inverse = np.float32(1) / mean
        for t, q in enumerate(int(value) for value in row):
            index = expected_class(mean, gains[t], weights)
            ratio = min(np.float32(abs(q)) * inverse, np.float32(LARGEST_RATIO))
            gains[t] = gains[t] + (ratio - gains[t]) * np.float32(GAIN_MEMORY)
            shift = int(shifts[index])
            high = abs(q) >> shift
            symbol = ESCAPE if high > LARGEST else 0 if not high else 2 * high - (q > 0)
            if not frequencies[index][symbol]:
                symbol = ESCAPE
            start = int(frequencies[index][:symbol].sum())
            yield t % LANES, start, int(frequencies[index][symbol]), PROBABILITY_BITS
            if symbol == ESCAPE:
                length = (high + 1).bit_length() - 1
                yield t % LANES, length, 1, 5
                yield from _raw(t % LANES, high + 1 - (1 << length), length)
            yield from _raw(t % LANES, abs(q) & ((1 << shift) - 1), shift)
            if q and symbol in (0, ESCAPE):
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


def duals(block: np.ndarray, tables: KltTables, *, start_position: int) -> np.ndarray:
    """int64 [2, tokens, dimensions]: what klt_rotation.duals gives of a float32 block [layers, 2, heads, tokens, head_dim]."""
    tokens, width = block.shape[3], tables.head_dim
    half = width // 2
    cosine, sine = rotations(np.arange(start_position, start_position + tokens), tables.inverse_frequencies)
    shape = (tables.layers, tables.kv_heads, 1, width)
    first, second = block[:, 0, ..., :half], block[:, 0, ..., half:]
    keys = np.concatenate([first * cosine + second * sine, second * cosine - first * sine], axis=-1) - tables.means[0].reshape(shape)
    values = block[:, 1] - tables.means[1].reshape(shape)
    metric = tables.value_metric.reshape(*shape[:2], width, width)
    sums = np.zeros_like(values)
    for channel in range(width):
        sums = sums + values[..., channel : channel + 1] * metric[:, :, None, channel]
    one = np.float32(1 << DUAL_BITS)
    both = [(keys * tables.key_metric.reshape(shape) * one), sums * one]
    return np.stack([np.rint(part.astype(np.float64)).astype(np.int64).transpose(2, 0, 1, 3).reshape(tokens, -1) for part in both])


def coefficients(block: np.ndarray, tables: KltTables, *, start_position: int, step: int) -> list[list[np.ndarray]]:
    """Of K and of V, for each group: what of a float32 block [layers, 2, heads, tokens, head_dim] is coded, int64 [components, tokens].

    Components too weak to be coded at `step`, and the last ones whose coefficients are all 0, are left out.
    """
    numbers = duals(block, tables, start_position=start_position)
    means = iter(_split(tables))
    kinds = []
    for kind, bases in enumerate(tables.bases):
        first, groups = 0, []
        for basis in bases:
            part = numbers[kind, :, first : first + basis.shape[1]]
            first += basis.shape[1]
            live = int((next(means) >= np.float32(WEAKEST * step)).sum())
            wide = basis[:live].astype(np.int64) @ part.T
            magnitude = np.floor(np.abs(wide) / float(step << DUAL_BITS) + ROUNDING).astype(np.int64)
            rows = np.where(wide < 0, -magnitude, magnitude)
            while len(rows) and not rows[-1].any():
                rows = rows[:-1]
            groups.append(rows)
        kinds.append(groups)
    return kinds


def sections(block: np.ndarray, tables: KltTables, *, start_position: int, step: int) -> list[bytes]:
    """The sections K and V of the block's payload."""
    means = iter(_split(tables))
    encoded = []
    for kind, groups in enumerate(coefficients(block, tables, start_position=start_position, step=step)):
        coded: list[Operation] = []
        for rows in groups:
            expected = np.maximum(next(means) / np.float32(step), np.float32(LEAST_MEAN))[: len(rows)]
            weights = (tables.weights[kind] / 256).astype(np.float32)
            coded += operations(rows, expected, weights, tables.frequencies[kind], tables.shifts[kind].tolist())
        encoded.append(np.array([*map(len, groups), *stream(coded)], "<u2").tobytes())
    return encoded


def _split(tables: KltTables) -> list[np.ndarray]:
    """The mean magnitudes at step 1 of each part: groups of K, then of V."""
    ends = [0, *np.cumsum([len(basis) for bases in tables.bases for basis in bases])]
    return [tables.magnitudes[first:stop] for first, stop in pairwise(ends)]


def block(parts: Sequence[Sequence[np.ndarray]], tables: KltTables, *, start_position: int, step: int) -> np.ndarray:
    """float32 [layers, 2, heads, tokens, head_dim] of coefficients [components, tokens] for K and V, one array a group."""
    tokens, width = parts[0][0].shape[1], tables.head_dim
    half = width // 2
    cosine, sine = rotations(np.arange(start_position, start_position + tokens), tables.inverse_frequencies)
    moved = []
    for kind, (rows, bases) in enumerate(zip(parts, tables.bases, strict=True)):
        products = [own.T.astype(np.int64) @ basis[: len(own)].astype(np.int64) for own, basis in zip(rows, bases, strict=True)]
        rounded = np.concatenate(products, axis=1).astype(np.float32)
        numbers = rounded * (tables.scales[kind] * np.float32(step)) + tables.means[kind]
        moved.append(numbers.reshape(tokens, tables.layers, tables.kv_heads, width).transpose(1, 2, 0, 3))
    first, second = moved[0][..., :half], moved[0][..., half:]
    keys = np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return np.stack([keys, moved[1]], axis=1)


def _raw(lane: int, value: int, bits: int) -> Iterator[Operation]:
    while bits > 0:
        piece = min(bits, _LONGEST_RAW)
        yield lane, value & ((1 << piece) - 1), 1, piece
        value >>= piece
        bits -= piece
