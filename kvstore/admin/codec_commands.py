"""kvctl calibrate and kvctl codec-report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin import quality_commands, quality_plot, render
from kvstore.admin.local_cluster import cache_dir_from_environment
from kvstore.admin.quality_commands import default_cache_dir
from kvstore.admin.terminal import JsonOption, progress_bars, show

ModelArgument = Annotated[str, typer.Argument(help='"default", a Hugging Face folder or a .gguf file.')]
TextsArgument = Annotated[list[Path], typer.Argument(help="UTF-8 text files.")]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Threads of the model.")]


def calibrate(
    model: ModelArgument,
    texts: TextsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    windows: Annotated[int, typer.Option(min=1, help="Stretches of 2,048 tokens to learn from.")] = 48,
    group_layers: Annotated[int, typer.Option(min=1, help="Layers that share a transform: more are better and slower.")] = 10,
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Make the tables of rung klt for a model from texts like those it will serve."""
    options = {"windows": windows, "group_layers": group_layers, "threads": threads}
    with progress_bars() as advance:
        record = quality_commands.calibrate(
            model, texts, output, cache_dir=cache_dir_from_environment() or default_cache_dir(), options=options, progress=advance
        )
    show(record, as_json, f"{record['file']}: {render.size_text(record['bytes'])}, digest {record['digest']}")


def codec_report(
    model: ModelArgument,
    texts: TextsArgument,
    calibration: Annotated[Path | None, typer.Option(help="Tables of `kvctl calibrate`; without them rung klt is left out.")] = None,
    rung: Annotated[list[str] | None, typer.Option(help="A rung to judge, klt with its step: klt:4. Repeat it for more.")] = None,
    scored_tokens: Annotated[int, typer.Option(min=1, help="Over all texts.")] = quality_commands.SCORED_TOKENS,
    resume: Annotated[Path | None, typer.Option(help="Keep judged windows in this file, and go on from those it has.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a rate-distortion plot here (.png, .svg, .pdf).")] = None,
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """What each rung costs in bits, quality and time, on texts that calibration did not see."""
    if plot is not None:
        quality_plot.check_plot(plot)
    options = {"scored_tokens": scored_tokens, "threads": threads}
    with progress_bars() as advance:
        record = quality_commands.codec_report(
            model,
            texts,
            calibration=calibration,
            rungs=rung or (),
            cache_dir=cache_dir_from_environment() or default_cache_dir(),
            options=options,
            progress=advance,
            resume=resume,
        )
    if plot is not None:
        quality_plot.write_plot(record["rows"], plot)
    show(record, as_json, render.codec_table(record))
