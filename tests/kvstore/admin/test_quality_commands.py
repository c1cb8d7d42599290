"""`kvctl calibrate` and `kvctl codec-report` as an operator runs them, on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin import quality_commands
from kvstore.admin.quality_plot import check_plot, write_plot
from kvstore.errors import ConfigError

TESTS = Path(__file__).parents[2]


def kvctl(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LARDER_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "kvstore.admin.kvctl", *arguments], capture_output=True, text=True, env=environment, timeout=200
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in `model`, a text in `text.txt`."""
    spec = importlib.util.spec_from_file_location("tiny_model", TESTS / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = tmp_path_factory.mktemp("quality")
    module.build_tiny_model(made / "model")
    (made / "text.txt").write_text("".join(f"{number}: {line}\n" for number in range(120) for line in module.TEXTS))
    return made


@pytest.mark.timeout(240)
def test_tables_are_made_judged_and_drawn(folder: Path) -> None:
    model, text, tables, plot = (str(folder / name) for name in ("model", "text.txt", "tiny.klt", "curve.svg"))
    made = kvctl("calibrate", model, text, "-o", tables, "--windows", "1", "--group-layers", "2", "--json", cache=folder)
    assert made.returncode == 0, made.stderr
    record = json.loads(made.stdout)
    assert (record["file"], record["bytes"], len(record["digest"])) == (tables, Path(tables).stat().st_size, 64)
    rungs = ("--rung", "int8", "--rung", "klt:8", "--scored-tokens", "512")
    judged = kvctl("codec-report", model, text, "--calibration", tables, *rungs, "--plot", plot, "--json", cache=folder)
    assert judged.returncode == 0, judged.stderr
    rows: list[dict[str, Any]] = json.loads(judged.stdout)["rows"]
    assert [row["rung"] for row in rows] == ["int8", "klt:8"]
    for row in rows:
        assert {"rung", "bits", "kl", "perplexity_change", "encode_gb_s", "decode_gb_s"} <= set(row)
    assert rows[1]["bits"] < rows[0]["bits"]
    assert not Path(plot).exists() or b"svg" in Path(plot).read_bytes()


@pytest.mark.timeout(240)
def test_a_rung_that_cannot_be_judged_is_refused_in_one_line(folder: Path) -> None:
    result = kvctl("codec-report", str(folder / "model"), str(folder / "text.txt"), "--rung", "klt:4", cache=folder)
    assert result.returncode == 2
    assert result.stderr.strip() == "kvctl: rung klt needs calibration tables: make them with `kvctl calibrate`"


def test_a_plot_has_a_point_for_each_rung_with_an_error(tmp_path: Path) -> None:
    rows = [
        {"rung": rung, "bits": bits, "kl": kl, "kl_interval": [kl / 2, kl * 2]}
        for rung, bits, kl in (("raw", 16.0, 0.0), ("int4", 4.3, 0.004), ("klt:4", 1.7, 0.002), ("klt:8", 1.1, 0.005))
    ]
    write_plot(rows, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text()
    assert "klt:4" in drawn
    assert "int4" in drawn
    with pytest.raises(ConfigError, match="cannot write"):
        write_plot(rows, tmp_path / "curve.xyz")
    for unusable in (tmp_path / "curve.xyz", tmp_path / "none" / "curve.svg"):
        with pytest.raises(ConfigError, match="cannot write"):
            check_plot(unusable)


def test_calibration_without_a_file_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file"):
        quality_commands.calibrate(
            "default", [tmp_path / "none"], tmp_path / "out", cache_dir=tmp_path, options={}, progress=lambda *_: None
        )
