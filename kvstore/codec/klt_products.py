"""Products of integers for the klt rung, exact whatever the machine: 16-bit factors, 32-bit sums that cannot overflow.

The fixed factor is prepared once, the other one comes block by block. Where its numbers are too large for one product they are cut into
digits, a product is taken of each, and the products are put together in 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codec.klt_kernels import STRIP, multiply_pairs

_EXACT_IN_INT32 = 1 << 31
_WIDEST_DIGIT = 15
_TOKENS_AT_ONCE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """The fixed factor of products with coefficients."""

    entries: np.ndarray
    """int16 [components, width]."""
    strips: np.ndarray
    """int16 [width / STRIP, components / 2, 2 * STRIP]: STRIP columns together, in them two components' entries side by side."""
    limits: np.ndarray
    """float32 [components]: largest magnitude of each component's entries."""


@dataclass(frozen=True, slots=True, eq=False)
class WideFactor:
    """The fixed factor of products with numbers of any size."""

    strips: np.ndarray
    digit_bits: int
    """Digits of so many bits, with the sign, cannot overflow a sum."""


def factor(entries: np.ndarray) -> Factor:
    """Of int16 [components, width]."""
    return Factor(entries, _strips(entries), np.abs(entries.astype(np.float32)).max(axis=1))


def wide_factor(entries: np.ndarray) -> WideFactor:
    """Of int16 [components, width]."""
    longest = max(int(np.abs(entries.astype(np.int32)).sum(axis=0, dtype=np.int64).max()), 1)
    return WideFactor(_strips(entries), min((_EXACT_IN_INT32 - 1) // longest, 1 << _WIDEST_DIGIT - 1).bit_length())


def product(rows: np.ndarray, by: Factor) -> np.ndarray:
    """float32 [tokens, width]: rows.T @ entries for the first components, rows int16 [components, tokens]; summed exactly, rounded once."""
    used = len(rows)
    if (by.limits[:used] @ np.abs(rows.astype(np.float32))).max(initial=0.0) >= 0.99 * _EXACT_IN_INT32:
        wide: np.ndarray = rows.T.astype(np.int64) @ by.entries[:used].astype(np.int64)
        return wide.astype(np.float32)
    return _multiplied(rows.T, by.strips, by.entries.shape[1]).astype(np.float32)


def wide_product(numbers: np.ndarray, by: WideFactor, *, width: int) -> np.ndarray:
    """int64 [tokens, width]: numbers [tokens, components] int64 @ the first `width` columns of the entries. The result must fit."""
    digits: list[np.ndarray] = []
    half, rest = 1 << by.digit_bits - 1, numbers
    while not digits or rest.any():
        low = (rest + half & 2 * half - 1) - half
        digits.append(low)
        rest = rest - low >> by.digit_bits
    tokens = len(numbers)
    sums = _multiplied(np.concatenate(digits), by.strips, width)
    total = np.zeros((tokens, width), np.int64)
    for index in range(len(digits)):
        total += sums[index * tokens : (index + 1) * tokens].astype(np.int64) << by.digit_bits * index
    return total


def _multiplied(rows: np.ndarray, strips: np.ndarray, width: int) -> np.ndarray:
    """int32 [tokens, width] of rows [tokens, components] that fit 16 bits; no more components than the strips have."""
    tokens, used = rows.shape
    padded = np.zeros((-(-tokens // _TOKENS_AT_ONCE) * _TOKENS_AT_ONCE, used + used % 2), np.int16)
    padded[:tokens, :used] = rows
    sums = np.zeros((len(padded), -(-width // STRIP) * STRIP), np.int32)
    multiply_pairs(padded.view(np.int32), strips, sums)
    return sums[:tokens, :width]


def _strips(entries: np.ndarray) -> np.ndarray:
    rows, width = entries.shape
    whole = np.zeros((rows + rows % 2, -(-width // STRIP) * STRIP), np.int16)
    whole[:rows, :width] = entries
    pairs = whole.reshape(-1, 2, whole.shape[1] // STRIP, STRIP)
    return np.ascontiguousarray(pairs.transpose(2, 0, 3, 1)).reshape(pairs.shape[2], len(pairs), 2 * STRIP)
