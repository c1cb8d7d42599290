from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kvstore.admin.kvctl import app


def test_bench_core_measures_memory_puts_acquires_and_the_disk(tmp_path: Path) -> None:
    arguments = ["bench", "core", "--blocks", "2K", "--ssd-path", str(tmp_path), "--ssd-mib", "64", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    [cost] = record["core"]
    assert cost["blocks"] == 2000
    assert cost["events_per_second"] > 100
    assert 0 < cost["acquire_ms"] < 1000
    assert record["ssd"]["write_share"] > 0
    assert record["ssd"]["read_share"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
