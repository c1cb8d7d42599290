"""`python -m prefill_node.quality calibrate|report ...`: what `kvctl calibrate` and `kvctl codec-report` start.

One JSON document on stdout. On stderr one JSON object a line: {"what", "done", "total"} for progress, {"rows"} for a report so far,
{"error"} before an exit with code 2.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):  # read once, when numpy and torch are imported
    os.environ.setdefault(_name, "1")

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

import prefill_node.model.offline  # noqa: E402, F401  before transformers
from kvstore.codec import BlockCodec, Rung, warm_up  # noqa: E402
from kvstore.codec.klt_tables import load_tables, save_tables  # noqa: E402
from kvstore.codec.precision import DEFAULT_STEP  # noqa: E402
from kvstore.errors import ConfigError, LarderError  # noqa: E402
from prefill_node.model.load import load_model  # noqa: E402
from prefill_node.model.resolve import resolve_model  # noqa: E402
from prefill_node.model.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from prefill_node.quality.calibrate import CalibrationPlan, calibrate  # noqa: E402
from prefill_node.quality.journal import Journal  # noqa: E402
from prefill_node.quality.probe import Probe  # noqa: E402
from prefill_node.quality.report import ReportPlan, report  # noqa: E402


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        result = _calibrate(arguments) if arguments.command == "calibrate" else _report(arguments)
    except LarderError as error:
        _say({"error": str(error)})
        sys.exit(2)
    print(json.dumps(result), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefill_node.quality")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("calibrate", "report"):
        command = commands.add_parser(name)
        command.add_argument("model")
        command.add_argument("texts", nargs="+", type=Path)
        command.add_argument("--cache-dir", type=Path, required=True)
        command.add_argument("--threads", type=int, default=1)
        plan: Any = CalibrationPlan if name == "calibrate" else ReportPlan
        for key in dataclasses.fields(plan):
            command.add_argument("--" + key.name.replace("_", "-"), type=int, default=key.default)
        if name == "calibrate":
            command.add_argument("--output", type=Path, required=True)
        else:
            command.add_argument("--calibration", type=Path)
            command.add_argument("--rungs", required=True)
            command.add_argument("--resume", type=Path)
            command.add_argument("--block-tokens", type=int, default=32)
    return parser


def _calibrate(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = _plan(CalibrationPlan, arguments)
    _check_output(arguments.output)
    probe, tokenizer = _opened(arguments)
    tables = calibrate(probe, [_tokens(tokenizer, path) for path in arguments.texts], plan, _progress)
    digest = save_tables(tables, arguments.output)
    return {
        "file": str(arguments.output),
        "digest": digest.hex(),
        "bytes": arguments.output.stat().st_size,
        "model": probe.model.name,
        "tokens": plan.windows // len(arguments.texts) * len(arguments.texts) * plan.window_tokens,
        "components": [[len(basis) for basis in bases] for bases in tables.bases],
    }


def _check_output(path: Path) -> None:
    """Raises ConfigError where no file can be put: before the hours of work that it is for."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} is no folder to write to")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a file to write")


def _report(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = _plan(ReportPlan, arguments)
    calibration = load_tables(arguments.calibration) if arguments.calibration else None
    rungs = {name: _rung(name) for name in arguments.rungs.split(",")}
    if calibration is None and any(rung is Rung.KLT for rung, _ in rungs.values()):
        raise ConfigError("rung klt needs calibration tables: make them with `kvctl calibrate`")
    journal = Journal(arguments.resume)
    probe, tokenizer = _opened(arguments)
    layout = dataclasses.replace(probe.model.layout, dtype="bfloat16", block_tokens=arguments.block_tokens)
    codecs = {
        name: BlockCodec(layout, model_digest=probe.model.model_digest, rung=rung, calibration=calibration, step=step)
        for name, (rung, step) in rungs.items()
    }
    warm_up(*codecs.values())
    texts = {path.stem: _tokens(tokenizer, path) for path in arguments.texts}
    return report(probe, tokenizer, texts, codecs, plan, _progress, journal=journal, publish=lambda rows: _say({"rows": rows}))


def _rung(name: str) -> tuple[Rung, int]:
    """`int8`, or `klt:4` for rung klt at step 4."""
    rung, _, step = name.partition(":")
    if rung not in list(Rung) or (step and not step.isdecimal()):
        raise ConfigError(f"rungs are {', '.join(Rung)}, klt with a step such as klt:4; not {name!r}")
    return Rung(rung), int(step) if step else DEFAULT_STEP


def _opened(arguments: argparse.Namespace) -> tuple[Probe, Tokenizer]:
    path = resolve_model(arguments.model, cache_dir=arguments.cache_dir)
    return Probe(load_model(path, dtype="float32")), load_tokenizer(path)


def _tokens(tokenizer: Tokenizer, path: Path) -> list[int]:
    try:
        return tokenizer.encode(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text: cannot read {path}: {error}") from None


def _plan(kind: Any, arguments: argparse.Namespace) -> Any:
    return kind(**{key.name: getattr(arguments, key.name) for key in dataclasses.fields(kind)})


def _progress(what: str, done: int, total: int) -> None:
    _say({"what": what, "done": done, "total": total})


def _say(record: dict[str, Any]) -> None:
    print(json.dumps(record), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
