"""The codec report: every rung judged on the same windows, one row each, with bootstrap intervals."""

from __future__ import annotations

import itertools
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
from prefill_node.quality.journal import Journal, JudgedWindow, RungOnWindow, window_key
from prefill_node.quality.judge import Speed, open_window, score
from prefill_node.quality.probe import Probe
from prefill_node.quality.retrieval import make_set, share_found

Row = dict[str, Any]

_WHAT = "rungs on windows"
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
    *,
    journal: Journal | None = None,
    publish: Callable[[list[Row]], None] = lambda rows: None,
) -> Row:
    """The record that `kvctl codec-report --json` prints; `publish` gets the rows so far after each window. Windows that `journal` has
    are not judged again.

    Cost: a prefill of a window, and for each rung its codec and a prefill of the scored tokens.
    """
    journal = journal or Journal(None)
    windows = []
    for number, (name, ids) in enumerate(texts.items()):
        share = plan.windows * (number + 1) // len(texts) - plan.windows * number // len(texts)
        windows += [(name, list(ids[start : start + plan.window_tokens])) for start in window_starts(len(ids), share, plan.window_tokens)]
    items = make_set(probe, tokenizer, seed=plan.seed)
    found = {None: share_found(probe, items, None)} | {rung: share_found(probe, items, codec) for rung, codec in codecs.items()}
    depends = {rung: [codec.layout.fingerprint.hex(), codec.header_of(0).calibration.hex()] for rung, codec in codecs.items()}
    total = len(windows) * len(codecs)
    judged: list[JudgedWindow] = []
    for number, (name, ids) in enumerate(windows):
        greedy = plan.greedy_tokens if number < plan.greedy_windows else 0
        key = window_key(ids, plan.prefix_tokens, greedy, probe.model.model_digest.hex(), depends)
        window = journal.get(key)
        if window is None:
            done = itertools.count(number * len(codecs) + 1)
            window = _judge(probe, name, ids, codecs, plan, greedy, lambda done=done: progress(_WHAT, next(done), total))  # type: ignore[misc]
            journal.add(key, window)
        judged.append(window)
        progress(_WHAT, (number + 1) * len(codecs), total)
        publish([_row(rung, codec, judged, found[rung], plan) for rung, codec in codecs.items()])
    return {
        "rows": [_row(rung, codec, judged, found[rung], plan) for rung, codec in codecs.items()],
        "scored_tokens": len(windows) * (plan.window_tokens - plan.prefix_tokens),
        "prefix_tokens": plan.prefix_tokens,
        "perplexity": math.exp(statistics.fmean(window.loss for window in judged)),
        "prefill_ms_a_token": 1e3 * min(window.prefill_s for window in judged),
        "retrieval": found[None],
        "model": probe.model.name,
    }


def _judge(
    probe: Probe, text: str, token_ids: list[int], codecs: Mapping[str, BlockCodec], plan: ReportPlan, greedy: int, done: Callable[[], None]
) -> JudgedWindow:
    """Every rung on one window, behind one forward pass on unencoded KV that all share; `done` is called after each rung."""
    window = open_window(probe, token_ids, prefix_tokens=plan.prefix_tokens, greedy_tokens=greedy)
    truth = np.array(window.token_ids[1:])
    rungs = {}
    for rung, codec in codecs.items():
        speed = Speed()
        scores = score(probe, window, codec, speed)
        rungs[rung] = RungOnWindow(
            payload_bytes=scores.payload_bytes,
            elements=scores.elements,
            kl=float(scores.divergences.mean()),
            loss=float(scores.losses.mean()),
            agreement=float(scores.agreements.mean()),
            first_divergence=scores.first_divergence,
            encode_s=min(speed.encode),
            decode_s=min(speed.decode),
        )
        done()
    return JudgedWindow(
        text=text,
        loss=float(-window.log_probabilities[:-1].numpy()[np.arange(len(truth)), truth].mean()),
        prefill_s=window.prefill_s,
        rungs=rungs,
    )


def _row(rung: str, codec: BlockCodec, judged: Sequence[JudgedWindow], found: float, plan: ReportPlan) -> Row:
    scored = [(window.text, window.rungs[rung]) for window in judged]
    everything = [one for _, one in scored]
    encode_s, decode_s = min(one.encode_s for one in everything), min(one.decode_s for one in everything)
    prefill_s = min(window.prefill_s for window in judged) * codec.layout.block_tokens
    tried = [one.first_divergence for one in everything[: plan.greedy_windows]]
    return {
        "rung": rung,
        "bits": 8 * sum(one.payload_bytes for one in everything) / sum(one.elements for one in everything),
        **_quality(everything, plan.seed),
        "top1_agreement": statistics.fmean(one.agreement for one in everything),
        "first_greedy_divergence": [plan.greedy_tokens if first is None else first for first in tried],
        "retrieval": found,
        "encode_gb_s": codec.layout.block_bytes / encode_s / 1e9,
        "decode_gb_s": codec.layout.block_bytes / decode_s / 1e9,
        "decode_times_faster_than_prefill": prefill_s / decode_s,
        "by_text": {
            text: _quality([one for name, one in scored if name == text], plan.seed) for text in sorted({name for name, _ in scored})
        },
    }


def _quality(scored: Sequence[RungOnWindow], seed: int) -> Row:
    divergences, losses = np.array([one.kl for one in scored]), np.array([one.loss for one in scored])
    return {
        "kl": float(divergences.mean()),
        "kl_interval": _interval(divergences, seed),
        "perplexity_change": math.expm1(losses.mean()),
        "perplexity_change_interval": [math.expm1(bound) for bound in _interval(losses, seed)],
        "scored_windows": len(scored),
    }


def _interval(by_window: np.ndarray, seed: int) -> list[float]:
    """95 % bootstrap interval of the mean; whole windows are drawn, since the tokens of one hang together."""
    rng = np.random.default_rng(seed)
    means = by_window[rng.integers(0, len(by_window), (_RESAMPLES, len(by_window)))].mean(axis=1)
    return [float(bound) for bound in np.percentile(means, _INTERVAL)]
