from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import load_config
from kvstore.process import PARENT_VARIABLE, listening_socket, operator_line, parse_flags

PROGRAM = '''
import asyncio, sys
from dataclasses import dataclass
from kvstore.errors import ConfigError, Unavailable
from kvstore.process import announce_ready, listening_socket, run_process
from kvstore.telemetry import start_metrics_server

@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    mode: str = "serve"
    """What to do."""
    port: int = 0
    metrics_port: int = 0
    log_level: str = "info"

async def main(config):
    if config.mode == "refuse":
        raise ConfigError("mode is\\nno good")
    if config.mode == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    if config.mode == "bug":
        assert False, "a bug"
    with listening_socket("127.0.0.1", config.port) as listener:
        metrics = start_metrics_server("127.0.0.1", config.metrics_port)
        announce_ready("toy-1", "toy", rpc=f"127.0.0.1:{listener.getsockname()[1]}", metrics=f"127.0.0.1:{metrics}")
        try:
            await asyncio.Event().wait()
        finally:
            print("closed", flush=True)

async def fail():
    raise Unavailable("nobody there")

run_process(main, Config, "toy")
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "toy.py"
    file.write_text(PROGRAM)
    return file


def run(program: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, program, *flags], capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def serving(program: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_graceful_stop(serving: subprocess.Popen[str], number: signal.Signals) -> None:
    words = ready_line(serving).split()
    assert words[:3] == ["READY", "toy-1", "toy"]
    assert words[3].startswith("rpc=127.0.0.1:")
    serving.send_signal(number)
    out, err = serving.communicate(timeout=20)
    assert (out, err, serving.returncode) == ("closed\n", "", 0)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--mode=refuse"], "toy: mode is no good"),
        (["--mode=group"], "toy: nobody there"),
        (["--mood=x"], "toy: flag --mood is not known; did you mean 'mode'? (known: config, log_level, metrics_port, mode, port)"),
        (["--port=many"], "toy: --port: 'many' is not a whole number"),
        (["--port"], "toy: --port needs a value: --port=..."),
        (["port"], "toy: 'port' is not a flag; write --key=value, or --help for all keys"),
        (["--config=/nowhere.toml"], "toy: cannot read the config file /nowhere.toml: No such file or directory"),
        (["--log_level=loud"], "toy: log_level: 'loud' is not one of debug, info, warning, error"),
    ],
)
def test_what_the_operator_can_mend_is_one_line_and_exit_code_2(program: Path, flags: list[str], line: str) -> None:
    done = run(program, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line + "\n")


@pytest.mark.parametrize("key", ["port", "metrics_port"])
def test_a_port_in_use_is_named_with_its_key(program: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(program, f"--{key}={port}")
    expected = f"toy: cannot listen on 127.0.0.1:{port}: address already in use; choose another --{key}, or 0 for any free one\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_a_bug_shows_its_traceback_and_exits_with_1(program: Path) -> None:
    done = run(program, "--mode=bug")
    assert done.returncode == 1
    assert "AssertionError: a bug" in done.stderr


def test_help_lists_every_key_and_the_example_loads(program: Path, tmp_path: Path) -> None:
    text = run(program, "--help").stdout
    assert "--mode" in text
    assert "LARDER_MODE" in text
    assert "What to do." in text
    example = run(program, "--example").stdout
    assert '#mode = "serve"' in example
    (tmp_path / "toy.toml").write_text(example)
    assert run(program, f"--config={tmp_path / 'toy.toml'}", "--mode=refuse").stderr == "toy: mode is no good\n"


def test_a_child_ends_with_its_parent_even_when_that_is_killed(program: Path, tmp_path: Path) -> None:
    parent_text = (
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, {PARENT_VARIABLE!r}: str(os.getpid())}}\n"
        f"child = subprocess.Popen([sys.executable, {str(program)!r}], stdout=subprocess.PIPE, env=env)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watched = os.pidfd_open(child)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    ended = False
    while not ended and time.monotonic() < deadline:
        # A pidfd becomes readable when the process ends, whoever its parent is by then.
        import select

        ended = bool(select.select([watched], [], [], 1)[0])
    os.close(watched)
    assert ended


def test_a_listening_socket_on_port_0_has_a_port() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_flags_may_be_written_apart_and_with_dashes(tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        max_batch: int = 1
        loud: bool = False
        quiet: bool = True

    file, flags = parse_flags(Config, ["--max-batch", "3", "--loud", "--quiet", "off", "--config", "x.toml"], program="toy")
    assert file == Path("x.toml")
    assert load_config(Config, file=None, flags=flags, env={}) == Config(max_batch=3, loud=True, quiet=False)


def test_an_error_of_ours_inside_a_group_is_still_one_line() -> None:
    from kvstore.errors import Unavailable

    group = ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("more", [Unavailable("two\nlines")])])
    assert operator_line(group) == "two lines"
    assert operator_line(ValueError("x")) is None
