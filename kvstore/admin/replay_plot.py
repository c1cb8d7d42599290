"""Hit rate over capacity, one line a policy, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.admin.replay import OPTIMUM, Row
from kvstore.errors import ConfigError


def save_plot(rows: Sequence[Row], *, title: str, path: Path) -> None:
    """Raises ConfigError without matplotlib (the extra `report`), OSError when the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'larder[report]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted((row.capacity_tokens / 1e6, row.token_hit) for row in rows if row.policy == policy)
        style = "--" if policy == OPTIMUM else "-"
        axes.plot([x for x, _ in points], [y for _, y in points], style, marker="o", markersize=4, label=policy)
    axes.set_xlabel("capacity, million tokens")
    axes.set_ylabel("token hit rate")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130, format="png")
