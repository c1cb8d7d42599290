"""What an operator gets wrong: one line on stderr, a non-zero exit, no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.registry.redis_server import EmbeddedRedis

PROCESSES = ("kvstore.node", "prefill_node", "decode_node", "decode_node.gateway")
NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def start(module: str, *flags: str) -> str:
    """The one line that a process that cannot start leaves behind."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    done = subprocess.run([sys.executable, "-m", module, *flags], capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("20")]  # log lines begin with the date
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"{module}: ")
    return lines[0]


def model_flags(module: str, model: Path) -> list[str]:
    return [] if module == "kvstore.node" else [f"--model={model}"]


@pytest.mark.parametrize("module", PROCESSES)
def test_an_unknown_flag_is_refused_with_the_known_ones(module: str) -> None:
    line = start(module, "--redis_ulr=x")
    assert "flag --redis_ulr is not known; did you mean 'redis_url'? (known: " in line


@pytest.mark.parametrize("module", PROCESSES)
def test_a_bad_toml_is_refused_with_its_line(module: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('node_id = "a"\nhost = = "b"\n')
    assert "line 2" in start(module, f"--config={file}")
    file.write_text('node_idd = "a"\n')
    assert "did you mean 'node_id'" in start(module, f"--config={file}")


@pytest.mark.parametrize("module", PROCESSES)
def test_a_redis_that_is_not_there_is_named(module: str, tiny_model: Path) -> None:
    assert NOWHERE in start(module, f"--redis_url={NOWHERE}", *model_flags(module, tiny_model))


@pytest.mark.parametrize("module", PROCESSES)
def test_a_port_in_use_is_named(module: str, redis: EmbeddedRedis, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        key = "http_port" if module == "decode_node.gateway" else "port"
        line = start(module, f"--{key}={port}", f"--redis_url={redis.url}", *model_flags(module, tiny_model))
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


@pytest.mark.parametrize("module", ["prefill_node", "decode_node", "decode_node.gateway"])
def test_a_model_folder_without_weights_or_none_at_all_is_named(module: str, redis: EmbeddedRedis, tmp_path: Path) -> None:
    absent = tmp_path / "no-such-model"
    assert str(absent) in start(module, f"--model={absent}", f"--redis_url={redis.url}")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in start(module, f"--model={empty}", f"--redis_url={redis.url}")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["stauts"], "stauts"),
        (["status", "--jsno"], "--jsno"),
        (["nodes", "--redis", NOWHERE], "cannot be reached"),
        (["nodes", "--redis", "what"], "redis_url is no Redis URL"),
        (["locate", "x", "--redis", NOWHERE, "--gateway", "http://127.0.0.1:1"], "the gateway at http://127.0.0.1:1 does not answer"),
        (["evict"], "exactly one of --all, --namespace NAME and --prompt TEXT"),
        (["status", "--state-dir"], "--state-dir"),
        (["local", "up", "--decode-nodes", "none"], "--decode-nodes"),
    ],
)
def test_kvctl_says_what_is_wrong_on_one_line(words: list[str], part: str, tmp_path: Path) -> None:
    environment = {**os.environ, "LARDER_STATE_DIR": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.admin.kvctl", *words], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("kvctl: ")
    assert part in done.stderr


def test_a_cluster_that_cannot_start_says_which_process_and_why_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.admin.kvctl", "local", "up", "--port=0", f"--model={tmp_path}", f"--state-dir={folder}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "ended with exit code 2" in done.stderr
    assert str(tmp_path) in done.stderr
