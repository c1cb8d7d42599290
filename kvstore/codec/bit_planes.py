"""Stepping codes of 8 bits down to 4 without decoding them: low bit planes are dropped, group by group, no more than it takes."""

from __future__ import annotations

import numpy as np

from kvstore.codec.reference import I8, U8

_LEVELS = 15
_CODES_AN_OCTAVE = 8
"""Of the scale codes: one plane less is one octave more."""


def dropped(scale_codes: U8, codes: U8, *, axis: int, group: int) -> tuple[U8, I8, U8]:
    """(scale codes, zeros, codes of 4 bits) for codes of 8 bits whose zero is -128; groups of up to `group` along `axis`.

    A group keeps its planes from the lowest one with which its codes span at most 15 steps. Halves are rounded up. The numbers of a
    group stay within half a step of the new scale.
    """
    scales, zeros, kept = [], [], []
    for index, start in enumerate(range(0, codes.shape[axis], group)):
        steps = codes.take(range(start, min(start + group, codes.shape[axis])), axis).astype(np.int32) - 128
        low, high = steps.min(axis, keepdims=True), steps.max(axis, keepdims=True)
        planes = np.full_like(low, 5)
        for count in (4, 3, 2, 1, 0):
            planes = np.where(_rounded(high, count) - _rounded(low, count) <= _LEVELS, count, planes)
        zero = _rounded(low, planes)
        scales.append((scale_codes.take([index], axis).astype(np.int32) + _CODES_AN_OCTAVE * planes).astype(np.uint8))
        zeros.append(zero.astype(np.int8))
        kept.append((_rounded(steps, planes) - zero).astype(np.uint8))
    return np.concatenate(scales, axis), np.concatenate(zeros, axis), np.concatenate(kept, axis)


def _rounded(steps: np.ndarray, planes: np.ndarray | int) -> np.ndarray:
    halves = np.left_shift(1, planes) >> 1
    result: np.ndarray = (steps + halves) >> planes
    return result
