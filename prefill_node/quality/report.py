"""The codec report: every rung judged on the same windows, one row each, with bootstrap intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.codec import BlockCodec
from kvstore.errors import ConfigError
from prefill_node.model.tokenizer import Tokenizer
from prefill_node.quality.calibrate import Progress, window_starts
from prefill_node.quality.judge import Scores, Speed, open_window, score
from prefill_node.quality.probe import Probe
from prefill_node.quality.retrieval import make_set, share_found

Row = dict[str, Any]

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPlan:
    scored_tokens: int = 20_480
    """Over all texts together; rounded up to whole windows."""
    window_tokens: int = 2048
    prefix_tokens: int = 1536
    greedy_windows: int = 4
    """Windows on which the first greedy divergence is looked for."""
    greedy_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.prefix_tokens < self.window_tokens - 1 or self.scored_tokens < 1:
            raise ConfigError(f"a window needs a prefix and at least two tokens behind it: {self}")

    @property
    def windows(self) -> int:
        return math.ceil(self.scored_tokens / (self.window_tokens - self.prefix_tokens))


def report(
    probe: Probe,
    tokenizer: Tokenizer,
    texts: Mapping[str, Sequence[int]],
    codecs: Mapping[str, BlockCodec],
    plan: ReportPlan,
    progress: Progress,
    publish: Callable[[list[Row]], None] = lambda rows: None,
) -> Row:
    """The record that `kvctl codec-report --json` prints; `publish` gets the rows so far after each window.

    Cost: two prefills of a window, and for each rung its codec and a prefill of the scored tokens.
    """
    windows = []
    for number, (name, ids) in enumerate(texts.items()):
        share = plan.windows * (number + 1) // len(texts) - plan.windows * number // len(texts)
        windows += [(name, list(ids[start : start + plan.window_tokens])) for start in window_starts(len(ids), share, plan.window_tokens)]
    items = make_set(probe, tokenizer, seed=plan.seed)
    found = {None: share_found(probe, items, None)} | {rung: share_found(probe, items, codec) for rung, codec in codecs.items()}
    scores: dict[str, list[tuple[str, Scores]]] = {rung: [] for rung in codecs}
    speeds = {rung: Speed() for rung in codecs}
    perplexities: list[float] = []
    for number, (name, ids) in enumerate(windows):
        greedy = plan.greedy_tokens if number < plan.greedy_windows else 0
        window = open_window(probe, ids, prefix_tokens=plan.prefix_tokens, greedy_tokens=greedy)
        truth = np.array(window.token_ids[1:])
        perplexities.append(float(-window.log_probabilities[:-1].numpy()[np.arange(len(truth)), truth].mean()))
        for done, (rung, codec) in enumerate(codecs.items()):
            scores[rung].append((name, score(probe, window, codec, speeds[rung])))
            progress("rungs on windows", number * len(codecs) + done + 1, len(windows) * len(codecs))
        publish([_row(rung, scores[rung], speeds[rung], found[rung], plan) for rung in codecs])
    return {
        "rows": [_row(rung, scores[rung], speeds[rung], found[rung], plan) for rung in codecs],
        "scored_tokens": len(windows) * (plan.window_tokens - plan.prefix_tokens),
        "prefix_tokens": plan.prefix_tokens,
        "perplexity": math.exp(statistics.fmean(perplexities)),
        "retrieval": found[None],
        "model": probe.model.name,
    }


def _row(rung: str, scored: Sequence[tuple[str, Scores]], speed: Speed, found: float, plan: ReportPlan) -> Row:
    everything = [one for _, one in scored]
    encode, decode = speed.gigabytes_per_second()
    divergences = np.array([one.divergences.mean() for one in everything])
    losses = np.array([one.losses.mean() for one in everything])
    tried = [one.first_divergence for one in everything[: plan.greedy_windows]]
    texts = sorted({name for name, _ in scored})
    return {
        "rung": rung,
        "bits": 8 * sum(one.payload_bytes for one in everything) / sum(one.elements for one in everything),
        "kl": float(divergences.mean()),
        "kl_interval": _interval(divergences, plan.seed),
        "perplexity_change": math.expm1(losses.mean()),
        "perplexity_change_interval": [math.expm1(bound) for bound in _interval(losses, plan.seed)],
        "top1_agreement": float(np.mean([one.agreements.mean() for one in everything])),
        "first_greedy_divergence": [plan.greedy_tokens if first is None else first for first in tried],
        "retrieval": found,
        "encode_gb_s": encode,
        "decode_gb_s": decode,
        "by_text": {
            text: {
                "kl": float(np.mean([one.divergences.mean() for name, one in scored if name == text])),
                "perplexity_change": math.expm1(float(np.mean([one.losses.mean() for name, one in scored if name == text]))),
            }
            for text in texts
        },
    }


def _interval(by_window: np.ndarray, seed: int) -> list[float]:
    """95 % bootstrap interval of the mean; whole windows are drawn, since the tokens of one hang together."""
    rng = np.random.default_rng(seed)
    means = by_window[rng.integers(0, len(by_window), (_RESAMPLES, len(by_window)))].mean(axis=1)
    return [float(bound) for bound in np.percentile(means, _INTERVAL)]
