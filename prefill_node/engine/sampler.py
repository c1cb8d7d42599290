"""One token from one row of logits. Depends on the row, the parameters and (seed, position): never on other rows or on history."""

from __future__ import annotations

import numpy as np

from prefill_node.engine.request import SamplingParams

_MASK = (1 << 64) - 1
_HEAD = 1024
"""Candidates sorted first for top_p: nearly always enough, and 20 times cheaper than sorting a whole vocabulary."""


def uniform(seed: int, position: int) -> float:
    """From [0, 1), 53 bits, the same on every machine: two SplitMix64 finalizers over seed and position.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    return (_mix(_mix(seed & _MASK) ^ (position * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def sample(logits: np.ndarray, params: SamplingParams, *, position: int) -> int:
    """`logits`: float32 [vocab], left as they are. `position`: of the token to draw, in the whole sequence.

    Ties go to the smaller id. Cost: one pass over the vocabulary; with top_k or top_p a partition more.
    """
    if params.temperature == 0.0 or params.top_k == 1:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    draw = uniform(params.seed, position)
    top_k = params.top_k if 0 < params.top_k < len(scaled) else 0
    top_p = params.top_p if 0.0 < params.top_p < 1.0 else 1.0
    if not top_k and top_p == 1.0:
        return _pick(np.exp(scaled), draw)
    weights = np.exp(scaled)
    ids = _largest(weights, top_k or (_HEAD if top_p < 1.0 else len(weights)))
    if not top_k and weights[ids].sum() < top_p * weights.sum():
        ids = _largest(weights, len(weights))
    kept = weights[ids]
    if top_p < 1.0:
        before = np.cumsum(kept) - kept
        whole = kept.sum() if top_k else weights.sum()
        ids = ids[before < top_p * whole]  # the token that crosses the line is in
    ids = np.sort(ids)
    return int(ids[_pick(weights[ids], draw)])


def _largest(weights: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest, largest first, equals by id; equals at the edge are all decided by id too."""
    if count < len(weights):
        edge = np.partition(weights, len(weights) - count)[len(weights) - count]
        candidates = np.flatnonzero(weights >= edge)
    else:
        candidates = np.arange(len(weights))
    return candidates[np.argsort(-weights[candidates], kind="stable")][:count]


def _pick(weights: np.ndarray, draw: float) -> int:
    cumulative = np.cumsum(weights)
    return min(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")), int(np.flatnonzero(weights)[-1]))


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
