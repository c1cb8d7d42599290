"""The rate-distortion plot of a codec report. Needs matplotlib (the extra `report`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raises ConfigError for what `write_plot` could not write: before the hours of work that the plot is of."""
    if path.suffix not in _FORMATS or not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"plot: cannot write {path}: it must be a {', '.join(_FORMATS)} in a folder that is there and may be written to")


def write_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """KL divergence over bits an element, both logarithmic; the suffix of `path` decides the format.

    Rungs without error have no place on the scale and are left out. Raises ConfigError without matplotlib, or for a suffix it cannot write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'larder[report]'") from None
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    lossy = sorted((row for row in rows if row["kl"] > 0), key=lambda row: float(row["bits"]))
    for name, marker in (("klt", "o-"), ("", "s")):
        points = [row for row in lossy if row["rung"].startswith("klt") == bool(name)]
        if not points:
            continue
        errors = [
            [max(row["kl"] - row["kl_interval"][0], 0) for row in points],
            [max(row["kl_interval"][1] - row["kl"], 0) for row in points],
        ]
        axes.errorbar([row["bits"] for row in points], [row["kl"] for row in points], yerr=errors, fmt=marker, capsize=3)
        for row in points:
            axes.annotate(row["rung"], (row["bits"], row["kl"]), textcoords="offset points", xytext=(6, 6))
    axes.set(xscale="log", yscale="log", xlabel="bits an element, all counted", ylabel="KL divergence a token, nats")
    axes.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"plot: cannot write {path}: {str(error).splitlines()[0]}") from None
