"""The generated protocol code is what the .proto files give. `make check` runs this file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "proto" / "kvpb" / "v1"


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "proto" / "generate.sh", tmp_path],
        check=True,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        timeout=60,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "kvpb" / "v1").glob("*_pb2*")}
    kept = {path.name: path.read_text() for path in GENERATED.glob("*_pb2*")}
    assert fresh.keys() == kept.keys()
    stale = [name for name in fresh if fresh[name] != kept[name]]
    assert not stale, f"run `make proto`: {stale}"
