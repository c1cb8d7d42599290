"""`kvctl local`: up, status, down, and what remains when its supervisor is killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstore.admin import saved_cluster

pytestmark = pytest.mark.timeout(180)
SMALL = ("--port=0", "--store-nodes=1", "--prefill-nodes=0", "--decode-nodes=1")


def command(*words: str, state: Path) -> list[str]:
    return [sys.executable, "-m", "kvstore.admin.kvctl", "local", *words, f"--state-dir={state}", "--json"]


def kvctl(*words: str, state: Path, code: int = 0) -> Any:
    done = subprocess.run(command(*words, state=state), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_up_serves_until_down_and_then_nothing_is_left(tiny_model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    up = kvctl("up", f"--model={tiny_model}", *SMALL, state=state)
    try:
        assert httpx.get(f"{up['gateway_url']}/health", timeout=5, trust_env=False).status_code == 200
        status = kvctl("status", state=state)
        pids = [process["pid"] for process in status["processes"]]
        assert {process["name"] for process in status["processes"]} == {"redis", "store-1", "decode-1", "gateway"}
        assert all(process["alive"] for process in status["processes"])
        assert "running already" in kvctl("up", f"--model={tiny_model}", *SMALL, state=state, code=2)
        environment = {**os.environ, "LARDER_STATE_DIR": str(state)}
        nodes = subprocess.run(
            [sys.executable, "-m", "kvstore.admin.kvctl", "nodes", "--json"], capture_output=True, text=True, env=environment, check=True
        )
        assert len(json.loads(nodes.stdout)["nodes"]) == 2, "kvctl finds the local cluster by itself"
    finally:
        assert kvctl("down", state=state) == {"stopped": True}
    assert [saved_cluster.started_at(pid) for pid in pids] == [None] * len(pids)
    assert list(state.iterdir()) == []
    assert kvctl("down", state=state) == {"stopped": False}
    assert kvctl("status", state=state, code=1) == {"running": False, "processes": []}


def test_processes_killed_together_are_started_again_and_a_killed_supervisor_takes_all_with_it(tiny_model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    supervisor = subprocess.Popen(
        command("up", "--foreground", f"--model={tiny_model}", *SMALL, state=state),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout is not None
    assert supervisor.stderr is not None
    try:
        json.loads(supervisor.stdout.readline())
        saved = saved_cluster.load(state)
        assert saved is not None
        killed = {process.name: process.pid for process in saved.processes if process.name in ("store-1", "decode-1")}
        for pid in killed.values():
            os.kill(pid, 9)
        while any(process.pid == killed.get(process.name) for process in saved.processes):
            assert supervisor.poll() is None, supervisor.stderr.read()
            time.sleep(0.05)
            saved = saved_cluster.load(state)
            assert saved is not None
        assert all(saved_cluster.started_at(process.pid) is not None for process in saved.processes)
        watched = [os.pidfd_open(process.pid) for process in saved.processes]
    finally:
        supervisor.kill()
        supervisor.communicate()
    for pidfd in watched:
        assert select.select([pidfd], [], [], 30)[0], "a process outlived its supervisor"
        os.close(pidfd)
