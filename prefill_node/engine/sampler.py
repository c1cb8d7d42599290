"""One token from one row of logits. Depends on the row, the parameters, (seed, position), and with penalties on the tokens so far: never
on other rows or on what this process did before. So a successor that gets prompt and answer so far draws the same token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefill_node.engine.request import Logprobs, SamplingParams

_MASK = (1 << 64) - 1
_HEAD = 1024
"""Candidates sorted first for top_p: nearly always enough, and 20 times cheaper than sorting a whole vocabulary."""


def uniform(seed: int, position: int) -> float:
    """From [0, 1), 53 bits, the same on every machine: two SplitMix64 finalizers over seed and position.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    return (_mix(_mix(seed & _MASK) ^ (position * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def sample(logits: np.ndarray, params: SamplingParams, *, position: int, prompt: Sequence[int] = (), answer: Sequence[int] = ()) -> int:
    """`logits`: float32 [vocab], left as they are. `position`: of the token to draw, in the whole sequence, which is `prompt` and the
    `answer` so far.

    Ties go to the smaller id. Cost: one pass over the vocabulary; with top_k, top_p or min_p a partition more; with penalties a pass
    over the tokens so far.
    """
    if params.logit_bias or params.penalizes:
        logits = _adjusted(logits, params, prompt, answer)
    if params.temperature == 0.0 or params.top_k == 1:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    draw = uniform(params.seed, position)
    top_k = params.top_k if 0 < params.top_k < len(scaled) else 0
    top_p = params.top_p if 0.0 < params.top_p < 1.0 else 1.0
    weights = np.exp(scaled)
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0  # the likeliest weighs 1
    if not top_k and top_p == 1.0:
        return _pick(weights, draw)
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


def logprobs(logits: np.ndarray, token_id: int, *, top: int) -> Logprobs:
    """Of one token and of the `top` likeliest. `logits`: float32 [vocab], as the model gave them. Cost: one pass, a partition if `top`."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    wide -= highest + np.log(np.exp(wide - highest).sum())
    best = _largest(wide, min(top, len(wide))) if top else ()
    return Logprobs(float(wide[token_id]), tuple((int(i), float(wide[i])) for i in best))


def _adjusted(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """float32 [vocab]: bias, then the repetition penalty, then frequency and presence: vLLM's order and meaning."""
    logits = logits.copy()
    for token_id, bias in params.logit_bias:
        logits[token_id] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt, *answer], np.int64))
        values, factor = logits[seen], np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if answer and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
        seen, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        logits[seen] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)
    return logits


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
