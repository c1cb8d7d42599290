"""PYTHONPATH=tests python tests/failover/run.py: decode nodes are killed and stopped under streams, and every token is compared.

Progress on stderr; the last line on stdout is one JSON object. Exit code 0 only if no token was lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from in_process import run_in_process
from plot import save_gaps
from processes import run_processes
from tiny_model import build_tiny_model
from verdict import Tally, percentile


class Progress:
    """A line whenever another tenth is done."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._shown = what, total, 0

    def __call__(self, done: int) -> None:
        if done * 10 // self._total > self._shown or done == 1:
            self._shown = done * 10 // self._total
            print(f"{self._what}: {done} of {self._total}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1_000, help="in process, at every token index in turn; 0: none")
    parser.add_argument("--blows", type=int, default=60, help="kill -9 and SIGSTOP on real processes; 0: none")
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--report", type=Path, default=Path(".larder/failover"), help="folder of gaps.png")
    options = parser.parse_args()
    logging.getLogger("decode_node.gateway.sessions").setLevel(logging.ERROR)  # it has a line for each kill
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="larder-failover-") as scratch:
        model = build_tiny_model(Path(scratch) / "model")
        if options.kills:
            tell = Progress("kills in process", options.kills)
            asyncio.run(run_in_process(tally, model, kills=options.kills, seed=options.seed, tell=tell))
        if options.blows:
            tell = Progress("blows to processes", options.blows)
            asyncio.run(run_processes(tally, model, Path(scratch) / "cluster", blows=options.blows, seed=options.seed, tell=tell))
    options.report.mkdir(parents=True, exist_ok=True)
    save_gaps(tally, options.report / "gaps.png")
    for complaint in tally.complaints:
        print(complaint)
    print(f"{tally.streams} streams, {tally.failovers} failovers, seed {options.seed}; gaps: {options.report / 'gaps.png'}")
    for kind, gaps in sorted(tally.gaps_ms.items()):
        print(f"{kind}: {len(gaps)} gaps, p50 {percentile(sorted(gaps), 50)} ms, p99 {percentile(sorted(gaps), 99)} ms")
    print(tally.line())
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
