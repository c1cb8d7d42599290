"""`python -m prefill_node.speed MODEL --cache-dir DIR`: prefill and decode speed of the engine beside transformers' own `generate`.

Both have the same weights, dtype and threads, and take turns within each round, so that a busy machine slows both. One JSON document
on stdout; one JSON object {"what", "done", "total"} a measurement on stderr.
"""

from __future__ import annotations

import prefill_node.model.offline  # noqa: F401  # sets the environment that torch reads when it is imported

# isort: split

import argparse
import json
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore.codec import BlockCodec, Rung, warm_up
from kvstore.errors import LarderError
from kvstore.ids import BlockHash, BlockRef
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.loop import Engine
from prefill_node.engine.request import EngineEvent, EngineRequest, FailedOut, FinishedOut, TokenOut
from prefill_node.model.load import LoadedModel, load_model
from prefill_node.model.resolve import resolve_model

ROOT = BlockHash(b"s" * 32)
DECODE_PROMPT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPlan:
    prefill_tokens: tuple[int, ...] = (512, 2000)
    batches: tuple[int, ...] = (1, 8, 32)
    decode_tokens: int = 48
    rounds: int = 3
    threads: int = 0
    seed: int = 1


class CanonicalSealer:
    """Makes each block canonical, as on a node, and hands the payload to nobody."""

    def __init__(self, model: LoadedModel) -> None:
        self._codec = BlockCodec(model.layout, model_digest=model.model_digest, rung=Rung.INT8)

    def seal(self, ref: BlockRef, block: Any, start_position: int, request_id: str, *, behind_recoded: bool) -> None:
        self._codec.encode_canonical(block, start_position=start_position)


class EngineSide:
    """The engine, with canonical KV as on a node."""

    name = "larder"

    def __init__(self, folder: Path, dtype: Any, plan: SpeedPlan) -> None:
        model = load_model(folder, dtype=dtype)
        longest = max(*plan.prefill_tokens, (DECODE_PROMPT + plan.decode_tokens) * max(plan.batches))
        config = EngineConfig(
            pool_blocks=2 * (longest // model.layout.block_tokens + max(plan.batches)),
            max_batch=max(plan.batches),
            step_tokens=512 + max(plan.batches),
            threads=plan.threads,
        )
        warm_up()
        self._engine = Engine(model, config, sealer=CanonicalSealer(model))
        self._engine.start()
        self._count = 0

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token."""
        began = time.perf_counter()
        (times,) = self._run([prompt], 1)
        return times[0] - began

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds a step, from the moment when all have their first token to the first one's end."""
        times = self._run(prompts, tokens)
        begin, end = max(own[0] for own in times), min(own[-1] for own in times)
        steps = sum(begin < at <= end for own in times for at in own) / len(times)
        return (end - begin) / max(steps, 1e-9)

    def close(self) -> None:
        self._engine.stop()

    def _run(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[float]]:
        """Instants of the tokens of each."""
        self._engine.forget_local()
        queues: list[queue.SimpleQueue[tuple[float, EngineEvent]]] = []
        for prompt in prompts:
            events: queue.SimpleQueue[tuple[float, EngineEvent]] = queue.SimpleQueue()
            self._count += 1
            request = EngineRequest(
                request_id=str(self._count), token_ids=prompt, first_output=len(prompt), chain_root=ROOT, max_new_tokens=tokens
            )
            self._engine.submit(request, lambda event, events=events: events.put((time.perf_counter(), event)))  # type: ignore[misc]
            queues.append(events)
        return [_instants(events) for events in queues]


class TransformersSide:
    """The same module as transformers runs it, with its own cache and `generate`."""

    name = "transformers"

    def __init__(self, folder: Path, dtype: Any, plan: SpeedPlan) -> None:
        self._module = load_model(folder, dtype=dtype).module
        self._threads = plan.threads or len(os.sched_getaffinity(0))

    def prefill(self, prompt: Sequence[int]) -> float:
        return self._generate([prompt], 1)

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds a step: what the tokens after the first one take."""
        return max(1e-9, self._generate(prompts, tokens) - self._generate(prompts, 1)) / (tokens - 1)

    def close(self) -> None:
        pass

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        torch.set_num_threads(self._threads)
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            self._module.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, eos_token_id=None
            )
        return time.perf_counter() - began


Side = EngineSide | TransformersSide


def _instants(events: queue.SimpleQueue[tuple[float, EngineEvent]]) -> list[float]:
    found = []
    while True:
        at, event = events.get()
        if isinstance(event, TokenOut):
            found.append(at)
        elif isinstance(event, FailedOut):
            raise LarderError(f"the engine failed: {event.message}")
        elif isinstance(event, FinishedOut):
            return found


def measure(sides: tuple[Side, Side], plan: SpeedPlan, *, vocabulary: int, say: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """One row for each size: {"what", "size", and by side its median tokens/s and those of the rounds}, and "ratio", ours over theirs,
    the median of the rounds' ratios."""
    draw = random.Random(plan.seed)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(vocabulary // 2) for _ in range(tokens)]

    cases: list[tuple[str, int]] = [*(("prefill", n) for n in plan.prefill_tokens), *(("decode", n) for n in plan.batches)]
    for side in sides:
        side.decode([prompt(DECODE_PROMPT)], 2)  # kernels are loaded and memory is touched
    rows = []
    for done, (what, size) in enumerate(cases):
        speeds: dict[str, list[float]] = {side.name: [] for side in sides}
        for _ in range(plan.rounds):
            prompts = [prompt(size)] if what == "prefill" else [prompt(DECODE_PROMPT) for _ in range(size)]
            for side in sides:
                seconds = side.prefill(prompts[0]) if what == "prefill" else side.decode(prompts, plan.decode_tokens)
                speeds[side.name].append(size / seconds)
        row: dict[str, Any] = {"what": what, "size": size}
        for name, values in speeds.items():
            row[name] = {"tokens_per_s": round(statistics.median(values), 1), "rounds": [round(value, 1) for value in values]}
        ours, theirs = speeds.values()
        row["ratio"] = round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
        rows.append(row)
        say(f"{what} {size}", done + 1, len(cases))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="prefill_node.speed")
    parser.add_argument("model")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=SpeedPlan().rounds)
    parser.add_argument("--prefill", default="512,2000")
    parser.add_argument("--batch", default="1,8,32")
    arguments = parser.parse_args()
    plan = SpeedPlan(
        prefill_tokens=tuple(int(n) for n in arguments.prefill.split(",")),
        batches=tuple(int(n) for n in arguments.batch.split(",")),
        rounds=arguments.rounds,
        threads=arguments.threads,
    )
    try:
        folder = resolve_model(arguments.model, cache_dir=arguments.cache_dir)
        vocabulary = load_model(folder, dtype=arguments.dtype).vocab_size
        sides = (EngineSide(folder, arguments.dtype, plan), TransformersSide(folder, arguments.dtype, plan))
        try:
            rows = measure(
                sides, plan, vocabulary=vocabulary, say=lambda *step: _say(dict(zip(("what", "done", "total"), step, strict=True)))
            )
        finally:
            for side in sides:
                side.close()
    except LarderError as error:
        _say({"error": str(error)})
        sys.exit(2)
    print(json.dumps({"dtype": arguments.dtype, "threads": plan.threads or len(os.sched_getaffinity(0)), "rows": rows}), flush=True)


def _say(record: dict[str, Any]) -> None:
    print(json.dumps(record), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
