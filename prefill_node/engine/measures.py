"""What the engine measures about itself."""

from __future__ import annotations

import time

from prometheus_client import Histogram

from kvstore import telemetry
from prefill_node.engine.scheduler import StepPlan

BATCH_SIZE = Histogram(telemetry.BATCH_SIZE, "Sequences computed in one step", buckets=(1, 2, 4, 8, 16, 32, 64, 128))
ITL_SECONDS = Histogram(
    telemetry.ITL_SECONDS,
    "Time between two tokens of a sequence",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5),
)
_WEIGHT = 0.1
"""Of the newest value in a moving mean: about the last 20 count."""


class Measures:
    """Written by the engine thread; single fields may be read from any thread."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.itl_ms = 0.0

    def step(self, plan: StepPlan) -> None:
        BATCH_SIZE.observe(len(plan.rows) + len(plan.chunks))

    def prefilled(self, tokens: int, *, seconds: float) -> None:
        self.prefill_tokens_per_s = _moved(self.prefill_tokens_per_s, tokens / max(seconds, 1e-9))

    def token(self, last_ns: int | None) -> int:
        """A token came out now; `last_ns`: the one before it. Returns now."""
        now = time.monotonic_ns()
        if last_ns is not None:
            ITL_SECONDS.observe((now - last_ns) / 1e9)
            self.itl_ms = _moved(self.itl_ms, (now - last_ns) / 1e6)
        return now


def _moved(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _WEIGHT * (value - mean)
