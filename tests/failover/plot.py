"""The gaps of a run as a PNG: one column of points a kind of blow, on a logarithmic axis."""

from __future__ import annotations

import random
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from verdict import Tally, percentile


def save_gaps(tally: Tally, path: Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    scatter = random.Random(0)
    for column, (kind, gaps) in enumerate(sorted(tally.gaps_ms.items())):
        label = f"{kind}: n={len(gaps)}, p50 {percentile(sorted(gaps), 50)} ms, p99 {percentile(sorted(gaps), 99)} ms"
        axes.plot([column + scatter.uniform(-0.3, 0.3) for _ in gaps], gaps, ".", markersize=4, alpha=0.5, label=label)
    axes.set_xticks(range(len(tally.gaps_ms)), sorted(tally.gaps_ms))
    axes.set_yscale("log")
    axes.set_ylabel("longest wait for a token, ms")
    axes.set_title(f"{tally.kills} kills, {tally.streams} streams: {tally.lost} lost, {tally.doubled} doubled, {tally.wrong} wrong")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, format="png")
