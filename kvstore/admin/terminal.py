"""What the commands of kvctl share: the two ways out, one for results and one for everything else, and options that several have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

RedisOption = Annotated[str | None, typer.Option("--redis", envvar="LARDER_REDIS_URL", help="URL of the cluster's Redis.")]
ModelOption = Annotated[str, typer.Option(envvar="LARDER_MODEL", help='"default", a Hugging Face folder or a .gguf file.')]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else.")]

_WIDTH_OF_A_PIPE = 160
"""Columns of a table that goes into a file or another program: wide enough that no cell breaks."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)
err = Console(stderr=True, highlight=False)


def show(record: Mapping[str, Any], as_json: bool, *parts: str | Table) -> None:
    if as_json:
        print(json.dumps(record), flush=True)
        return
    for part in parts:
        # A line of text is for copying: a command that was broken at the terminal's width is another command.
        out.print(part, soft_wrap=isinstance(part, str), markup=False)


def tell(text: str) -> None:
    err.print(text, style="dim", soft_wrap=True, markup=False)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each thing that is counted; where nothing is, not even an empty line before the error."""
    bars = Progress(console=err)
    tasks: dict[str, TaskID] = {}

    def advance(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
            bars.start()
        bars.update(tasks[what], completed=done)

    try:
        yield advance
    finally:
        if tasks:
            bars.stop()
