"""Calibration, the codec report and the engine's speed. The model runs in a process of its own, `python -m prefill_node.quality` or
`prefill_node.speed`: kvctl needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kvstore.errors import ConfigError, LarderError

Record = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""(what, done, total)."""

DEFAULT_RUNGS = ("raw", "lossless", "int8", "fp8", "int6", "int5", "int4")
KLT_RUNGS = ("klt:2", "klt:3", "klt:6", "klt:8")
"""Judged besides when there are calibration tables."""

SCORED_TOKENS = 20_480


def default_cache_dir() -> Path:
    """Where the nodes keep converted models unless told otherwise."""
    return Path.home() / ".cache" / "larder"


def calibrate(
    model: str, texts: Sequence[Path], output: Path, *, cache_dir: Path, options: Mapping[str, int], progress: Progress
) -> Record:
    """Fit tables to the texts, write them to `output`, and return what the process says about them."""
    _check_texts(texts)
    return _run(["calibrate", model, *map(str, texts), "--cache-dir", str(cache_dir), "--output", str(output), *_flags(options)], progress)


def codec_report(
    model: str,
    texts: Sequence[Path],
    *,
    calibration: Path | None,
    rungs: Sequence[str],
    cache_dir: Path,
    options: Mapping[str, int],
    progress: Progress,
    resume: Path | None = None,
) -> Record:
    """Judge rungs on the texts; `rungs` empty: all those that the calibration, or its absence, allows. Judged windows go to the file
    `resume`, and those it has are not judged again."""
    _check_texts(texts)
    judged = rungs or [*DEFAULT_RUNGS, *(KLT_RUNGS if calibration else ())]
    command = ["report", model, *map(str, texts), "--cache-dir", str(cache_dir), "--rungs", ",".join(judged), *_flags(options)]
    if calibration is not None:
        command += ["--calibration", str(calibration)]
    if resume is not None:
        command += ["--resume", str(resume)]
    return _run(command, progress)


def engine_speed(model: str, *, cache_dir: Path, options: Mapping[str, object], progress: Progress) -> Record:
    """Prefill and decode speed of the engine beside transformers, as rows."""
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    return _run([model, "--cache-dir", str(cache_dir), *flags], progress, module="prefill_node.speed")


def _check_texts(texts: Sequence[Path]) -> None:
    for path in texts:
        if not path.is_file():
            raise ConfigError(f"text: {path} is no file")


def _flags(options: Mapping[str, int]) -> list[str]:
    return [part for key, value in options.items() for part in ("--" + key.replace("_", "-"), str(value))]


def _run(arguments: Sequence[str], progress: Progress, *, module: str = "prefill_node.quality") -> Record:
    """What the process prints, as JSON. Raises ConfigError for what it calls the operator's fault, LarderError when it breaks."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=output, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            last = _follow(process.stderr, progress)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if code == 2 and "error" in last:
            raise ConfigError(str(last["error"]))
        if code:
            raise LarderError(f"{module} ended with {code}: {last.get('text', 'without a word')}")
        output.seek(0)
        record: Record = json.load(output)
        return record


def _follow(lines: IO[str], progress: Progress) -> Record:
    """Reads to the end; returns the error, or the last line that was no record."""
    last: Record = {}
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            last = {"text": line.strip()} if line.strip() else last
        elif "done" in said:
            progress(said["what"], said["done"], said["total"])
        elif "error" in said:
            last = said
    return last
