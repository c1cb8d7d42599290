"""Prefill beside decode, three ways on one machine under one load: first come first served, two queues in one process, two processes.

The load is made before anything runs: short chats and long prompts, both Poisson, from a seed. It goes through the gateway of a
cluster of its own for each way, and times are the client's.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvstore.admin.local_cluster import ClusterPlan, LocalCluster
from kvstore.admin.stream_client import Stream, stream_chat
from kvstore.errors import ConfigError, Unavailable

Record = dict[str, Any]
Tell = Callable[[str], None]

_WORDS = ("larder", "keeps", "what", "the", "kitchen", "has", "cooked", "and", "who", "comes", "back", "goes", "on", "from", "there")
_CLIENT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sizes in words and tokens; rates in requests a second. By default long prompts come often enough to meet chats that decode."""

    seconds: float = 60.0
    chats_per_s: float = 0.8
    chat_words: int = 40
    chat_tokens: int = 48
    longs_per_s: float = 0.15
    long_words: int = 900
    long_tokens: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        if self.seconds <= 0 or self.chats_per_s <= 0 or self.longs_per_s < 0:
            raise ConfigError(f"the load needs seconds and chats_per_s above 0, and longs_per_s not below: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    long: bool
    prompt: str
    max_tokens: int


def arrivals(load: Load) -> list[Arrival]:
    """In order of time; no two prompts share a beginning. The same load gives the same arrivals."""
    generator = random.Random(load.seed)
    found = []
    for long, rate, words, tokens in (
        (False, load.chats_per_s, load.chat_words, load.chat_tokens),
        (True, load.longs_per_s, load.long_words, load.long_tokens),
    ):
        at = generator.expovariate(rate) if rate else load.seconds
        while at < load.seconds:
            text = " ".join([f"{generator.getrandbits(48):x}", *generator.choices(_WORDS, k=words)])
            found.append(Arrival(at_s=at, long=long, prompt=text, max_tokens=tokens))
            at += generator.expovariate(rate)
    return sorted(found, key=lambda arrival: arrival.at_s)


def ways(*, folder: Path, model: str, cache_dir: Path | None, cores: int) -> Iterator[tuple[str, ClusterPlan]]:
    """(name, cluster) of each: the same store and as many compute threads in all."""

    def plan(name: str, *, apart: bool, **compute: object) -> tuple[str, ClusterPlan]:
        return name, ClusterPlan(
            folder=folder / name,
            model=model,
            cache_dir=cache_dir,
            store_nodes=1,
            replicas=1,
            prefill_nodes=int(apart),
            decode_nodes=int(apart),
            both_nodes=int(not apart),
            compute=tuple(compute.items()),
        )

    yield plan("first-come", apart=False, threads=cores, first_come=True)
    yield plan("two-queues", apart=False, threads=cores)
    yield plan("two-processes", apart=True, threads=max(1, cores // 2))


def compare(load: Load, *, model: str, cache_dir: Path | None, tell: Tell) -> list[Record]:
    """One record for each way. Blocking; leaves no process behind."""
    rows = []
    asked = arrivals(load)
    with tempfile.TemporaryDirectory(prefix="larder-pd-") as folder:
        for name, plan in ways(folder=Path(folder), model=model, cache_dir=cache_dir, cores=len(os.sched_getaffinity(0))):
            tell(f"{name}: starting")
            with LocalCluster(plan) as cluster:
                cluster.start()
                tell(f"{name}: {len(asked)} requests over {load.seconds:.0f} s")
                rows.append({"way": name, **asyncio.run(_drive(cluster.gateway_url, asked))})
    return rows


async def _drive(url: str, asked: Sequence[Arrival]) -> Record:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_CLIENT_TIMEOUT_S, trust_env=False, limits=limits) as client:
        model = str((await client.get("/v1/models")).json()["data"][0]["id"])
        # Kernels are compiled or loaded and pools touched before anything is measured.
        await _one(client, model, Arrival(at_s=0.0, long=True, prompt="warm up " * 150, max_tokens=8), time.monotonic())
        began = time.monotonic()
        answers = await asyncio.gather(*(_one(client, model, arrival, began) for arrival in asked))
    return summary([(arrival, answer) for arrival, answer in zip(asked, answers, strict=True)])


async def _one(client: httpx.AsyncClient, model: str, arrival: Arrival, began: float) -> Stream | None:
    """None: it failed."""
    await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
    message = {"role": "user", "content": arrival.prompt}
    body = {"model": model, "messages": [message], "max_tokens": arrival.max_tokens, "temperature": 0, "seed": 1, "ignore_eos": True}
    try:
        return await stream_chat(client, body)
    except Unavailable:
        return None


def summary(answers: Sequence[tuple[Arrival, Stream | None]]) -> Record:
    """Milliseconds, and tokens a second from the first request to the last token. `itl_ms`: all gaps of chats, sorted."""
    done = [(arrival, stream) for arrival, stream in answers if stream is not None]
    if not done:
        raise Unavailable("no request got an answer")
    chats = [stream for arrival, stream in done if not arrival.long]
    longs = [stream for arrival, stream in done if arrival.long]
    gaps = sorted((later - earlier) * 1e3 for stream in chats for earlier, later in itertools.pairwise(stream.arrivals))
    span = max(stream.arrivals[-1] for _, stream in done) - min(stream.sent_at for _, stream in done)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(done),
        "chat_ttft_ms": _percentiles([stream.ttft_ms for stream in chats]),
        "long_ttft_ms": _percentiles([stream.ttft_ms for stream in longs]),
        "chat_itl_ms": _percentiles(gaps),
        "tokens_per_s": round(sum(len(stream.token_ids) for _, stream in done) / span, 1),
        "itl_ms": [round(gap, 1) for gap in gaps],
    }


def _percentiles(values: Sequence[float]) -> Record:
    """Nearest rank; None without values."""
    ranked = sorted(values)
    at = {name: min(len(ranked) - 1, int(share * len(ranked))) for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {name: round(ranked[index], 1) if ranked else None for name, index in at.items()}


def save_plot(rows: Sequence[Record], path: Path) -> None:
    """How many of the gaps between two tokens of a chat are longer than x. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'larder[report]'") from None
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        gaps = row["itl_ms"]
        shares = [1 - index / len(gaps) for index in range(len(gaps))]
        axes.step(gaps, shares, where="post", label=f"{row['way']} (p99 {row['chat_itl_ms']['p99']} ms)")
    axes.set(xscale="log", yscale="log", xlabel="gap between two tokens of a chat, ms", ylabel="share of gaps that are longer")
    axes.axhline(0.01, color="grey", linewidth=0.5)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"plot: cannot write {path}: {str(error).splitlines()[0]}") from None
