"""Calibration: what texts and model say about KV, as the tables of rung klt.

Three passes over the texts' windows, as many of each text. The first gathers moments of K and V, the queries' second moments, and some
whole blocks. The second measures how much an error costs in each stretch of layers, K and V apart, by finite differences: noise that is
white in the metric goes into the KV of a prefix, and the KL divergence of what follows, divided by the noise's power, is the cost; of
several texts the highest counts, since a layer that one language hardly uses may carry another. The third counts symbols of the
sampled blocks. Without the second pass the metric has no common unit, and the rung needs nearly twice the bits (LOG.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.codec import klt_kernels
from kvstore.codec.klt import KltTransform
from kvstore.codec.klt_fit import Moments, fit_bases, fitted_frequencies
from kvstore.codec.klt_tables import KltTables
from kvstore.codec.precision import FIRST_EXACT_TOKENS
from kvstore.errors import ConfigError
from prefill_node.model.load import LoadedModel
from prefill_node.quality.probe import Probe

Progress = Callable[[str, int, int], None]
"""(what, done, total)."""

STEPS_COUNTED = (2, 3, 4, 6, 8, 12, 16)
"""The symbol tables are fitted to these steps together."""

KL_OF_ONE = 0.00075
"""Step 1 is the noise that would cost this KL divergence if it were uniform in all coefficients."""

_KEEP_ABOVE = 1.2
_GAIN_SEGMENTS = 10
_GAIN_PREFIX = 1024
_GAIN_SCORED = 256
_NOISE_SHARE = 0.02
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    windows: int = 48
    """Of all texts together; rounded down to as many of each."""
    window_tokens: int = 2048
    group_layers: int = 10
    """Layers that share a transform: more are better and slower to decode."""
    sample_blocks: int = 48
    block_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.windows, self.group_layers, self.sample_blocks) < 1 or self.window_tokens < 4 * self.block_tokens:
            raise ConfigError(
                f"calibration needs at least one window of {4 * self.block_tokens} tokens, one layer a group, one block: {self}"
            )


def calibrate(probe: Probe, texts: Sequence[Sequence[int]], plan: CalibrationPlan, progress: Progress) -> KltTables:
    """Tables (without a digest) for the probed model, from the tokens of the calibration texts, which count equally.

    Raises ConfigError for a text too short for its share of windows and one more, and for fewer windows than texts. Cost: `windows`
    prefills and 22 short ones a text, one eigendecomposition for each group of layers, K and V; memory for the covariances, 8 bytes x
    (width of a group)**2 x groups.
    """
    model = probe.model
    windows, held_out = _windows(texts, plan)
    layout = model.layout
    moments = Moments(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        group_layers=min(plan.group_layers, layout.layers),
        inverse_frequencies=inverse_frequencies(model),
    )
    rng = np.random.default_rng(plan.seed)
    queries = torch.zeros(layout.layers, model.query_heads, layout.head_dim, dtype=torch.float64)
    samples: list[tuple[np.ndarray, int]] = []
    for index, window in enumerate(windows):
        seen = probe.observe(window)
        kv = seen.kv.float().numpy()
        queries += seen.query_squares
        moments.add(kv[..., FIRST_EXACT_TOKENS:, :], start_position=FIRST_EXACT_TOKENS)
        wanted = plan.sample_blocks * (index + 1) // len(windows) - len(samples)
        for block in rng.integers(1, plan.window_tokens // plan.block_tokens, wanted) * plan.block_tokens:
            samples.append((kv[..., block : block + plan.block_tokens, :].copy(), int(block)))
        progress("windows", index + 1, len(windows))
    key_metric = _key_metric(model, queries.numpy() / (len(windows) * plan.window_tokens))
    value_metric = _value_metric(model)
    costs = np.max([_costs(probe, window, key_metric, value_metric, plan.seed, progress) for window in held_out], axis=0)
    progress("transform", 0, 1)
    tables = fit_bases(
        moments,
        key_metric=(key_metric * costs[0][:, None, None]).reshape(-1),
        value_metric=(value_metric * costs[1][:, None, None, None]).reshape(-1, layout.head_dim, layout.head_dim),
        base_step=math.sqrt(KL_OF_ONE / layout.layers),
        keep_above=_KEEP_ABOVE,
        model_digest=model.model_digest,
    )
    progress("transform", 1, 1)
    return _with_statistics(tables, samples, progress)


def _windows(texts: Sequence[Sequence[int]], plan: CalibrationPlan) -> tuple[list[list[int]], list[list[int]]]:
    """Windows to fit to, the texts' by turns, and one more of each text to measure costs on."""
    share = plan.windows // len(texts)
    if not share:
        raise ConfigError(f"{len(texts)} texts need as many windows at least, not {plan.windows}")
    spread = [
        [list(ids[start : start + plan.window_tokens]) for start in window_starts(len(ids), share + 1, plan.window_tokens)] for ids in texts
    ]
    return [windows[index] for index in range(share) for windows in spread], [windows[-1] for windows in spread]


def window_starts(tokens: int, windows: int, window_tokens: int) -> list[int]:
    """First tokens of windows spread evenly over a text. Raises ConfigError when they would overlap."""
    if windows * window_tokens > tokens:
        raise ConfigError(f"the text has {tokens} tokens; {windows} windows of {window_tokens} need {windows * window_tokens}")
    return [int(start) for start in np.linspace(0, tokens - window_tokens, windows)]


def inverse_frequencies(model: LoadedModel) -> np.ndarray:
    """float64 [head_dim / 2]: radians a token of each pair of channels."""
    found: np.ndarray = model.module.model.rotary_emb.inv_freq.double().numpy()
    if found.shape != (model.layout.head_dim // 2,):
        raise ConfigError(f"rung klt needs rotary positions over the whole head; this model rotates {2 * len(found)} channels")
    return found


def _key_metric(model: LoadedModel, query_squares: np.ndarray) -> np.ndarray:
    """[layers, kv_heads, head_dim]: second moment of the queries that read a key, averaged over each pair that RoPE turns."""
    layout = model.layout
    heads = query_squares.reshape(layout.layers, layout.kv_heads, -1, layout.head_dim).sum(2)
    half = layout.head_dim // 2
    pairs = (heads[..., :half] + heads[..., half:]) / 2
    pairs += _RIDGE * pairs.mean(-1, keepdims=True)
    return np.concatenate([pairs, pairs], axis=-1)


def _value_metric(model: LoadedModel) -> np.ndarray:
    """[layers, kv_heads, head_dim, head_dim]: what the output projection makes of an error in a value."""
    layout = model.layout
    blocks = []
    for layer in model.module.model.layers:
        weight = layer.self_attn.o_proj.weight.double().numpy().reshape(-1, model.query_heads, layout.head_dim)
        squares = np.einsum("ohi,ohj->hij", weight, weight, optimize=True)
        blocks.append(squares.reshape(layout.kv_heads, -1, layout.head_dim, layout.head_dim).sum(1))
    metric = np.stack(blocks)
    ridge = _RIDGE * np.trace(metric, axis1=-2, axis2=-1)[..., None, None] / layout.head_dim
    return np.asarray(metric + ridge * np.eye(layout.head_dim))


def _costs(
    probe: Probe, token_ids: list[int], key_metric: np.ndarray, value_metric: np.ndarray, seed: int, progress: Progress
) -> np.ndarray:
    """[2, layers]: KL divergence for noise of power 1 in the metric, of a layer's keys and of its values. The same noise for every text."""
    rng = np.random.default_rng(seed)
    layers = probe.model.layout.layers
    split = min(_GAIN_PREFIX, len(token_ids) * 4 // 5)
    prefix = probe.observe(token_ids[:split]).kv
    scored = token_ids[split : split + _GAIN_SCORED]
    base = probe.observe(scored, prefix=prefix, score=True).log_probabilities
    assert base is not None
    segment = math.ceil(layers / _GAIN_SEGMENTS)
    firsts = range(0, layers, segment)
    eigenvalues, vectors = np.linalg.eigh(value_metric)
    inverse_root = (vectors / np.sqrt(eigenvalues)[..., None, :]) @ np.swapaxes(vectors, -1, -2)
    logs = np.empty((2, len(firsts)))
    for kind in range(2):
        for index, first in enumerate(firsts):
            span = slice(first, first + segment)
            clean = prefix[span, kind, :, FIRST_EXACT_TOKENS:].double().numpy()
            centred = clean - clean.mean(axis=2, keepdims=True)
            if kind == 0:
                power = _NOISE_SHARE * float((centred**2 * key_metric[span][:, :, None]).mean())
                noise = rng.normal(0, math.sqrt(power), clean.shape) / np.sqrt(key_metric[span])[:, :, None]
            else:
                weighted = np.einsum("lhti,lhij->lhtj", centred, value_metric[span], optimize=True)
                power = _NOISE_SHARE * float((weighted * centred).mean())
                noise = np.einsum("lhti,lhij->lhtj", rng.normal(0, math.sqrt(power), clean.shape), inverse_root[span], optimize=True)
            noisy = prefix.clone()
            noisy[span, kind, :, FIRST_EXACT_TOKENS:] += torch.from_numpy(noise).to(noisy.dtype)
            got = probe.observe(scored, prefix=noisy, score=True).log_probabilities
            assert got is not None
            divergence = float((base.exp() * (base - got)).sum(-1).mean())
            logs[kind, index] = math.log(max(divergence, 1e-9) / power / len(range(layers)[span]))
            progress("cost of errors", kind * len(firsts) + index + 1, 2 * len(firsts))
    centres = [first + (min(segment, layers - first) - 1) / 2 for first in firsts]
    return np.exp(np.stack([np.interp(np.arange(layers), centres, row) for row in logs]))


def _with_statistics(tables: KltTables, samples: Sequence[tuple[np.ndarray, int]], progress: Progress) -> KltTables:
    transform = KltTransform(tables)
    histograms = [np.zeros((klt_kernels.CLASSES, 1 << 12), np.int64) for _ in range(2)]
    for index, (block, start) in enumerate(samples):
        for step in STEPS_COUNTED:
            transform.count_symbols(block, histograms, start_position=start, step=step)
        progress("symbols", index + 1, len(samples))
    frequencies, shifts = fitted_frequencies(histograms)
    return dataclasses.replace(tables, frequencies=frequencies, shifts=shifts)
