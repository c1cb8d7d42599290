"""The short form of `make failover`, and that its verdicts are right."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def verdict() -> ModuleType:
    spec = importlib.util.spec_from_file_location("failover_verdict", FOLDER / "verdict.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("got", "broken", "counts"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], None, (0, 0, 0)),
        ([1, 2, 3, 4, 5], None, (3, 0, 0)),
        ([1, 2, 3, 4, 5, 6, 7, 8], "503", (1, 0, 0)),
        ([], "503", (8, 0, 0)),
        ([1, 2, 3, 3, 4, 5, 6, 7], None, (0, 1, 0)),
        ([1, 2, 3, 3, 4, 5, 6, 7, 8], None, (0, 1, 0)),
        ([1, 2, 9, 4, 5, 6, 7, 8], None, (0, 0, 1)),
    ],
)
def test_a_stream_is_judged_by_what_the_client_had(
    verdict: ModuleType, got: list[int], broken: str | None, counts: tuple[int, int, int]
) -> None:
    tally = verdict.Tally(kills=1)
    tally.judge("s", expected=[1, 2, 3, 4, 5, 6, 7, 8], got=got, broken=broken)
    assert (tally.lost, tally.doubled, tally.wrong) == counts
    assert tally.clean == (counts == (0, 0, 0))
    assert len(tally.complaints) == (not tally.clean)


def test_a_run_without_a_kill_proves_nothing(verdict: ModuleType) -> None:
    assert not verdict.Tally().clean


@pytest.mark.timeout(180)
def test_no_kill_at_any_token_shows_in_the_tokens(tmp_path: Path, seed: int) -> None:
    root = FOLDER.parents[1]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), "--kills=24", "--blows=0", f"--seed={seed}", f"--report={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "proto"), str(root / "tests")])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert list(line) == ["kills", "lost", "doubled", "wrong", "gap_ms_p50", "gap_ms_p99"]
    assert (line["kills"], line["lost"], line["doubled"], line["wrong"]) == (24, 0, 0, 0)
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
