"""What keeps a local cluster running: one per state folder, in the foreground or as a supervisor behind the command that started it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvstore.admin import saved_cluster
from kvstore.admin.local_cluster import START_TIMEOUT, STOP_TIMEOUT, ClusterPlan, LocalCluster
from kvstore.admin.local_process import ProcessFailed, wait_until_ready
from kvstore.admin.saved_cluster import SavedProcess
from kvstore.errors import ConfigError, Unavailable
from kvstore.units import seconds, to_seconds

Record = dict[str, Any]
Tell = Callable[[str], None]

RESTARTS_IN_A_MINUTE = 5
_SUPERVISOR_LOG = "supervisor.log"
_LOCK = "lock"


def start(cluster: LocalCluster, tell: Tell) -> None:
    """Start it and tell of each process that is ready."""
    began = time.monotonic()

    def tell_with_time(text: str) -> None:
        tell(f"  {time.monotonic() - began:5.1f} s  {text}")

    tell("starting redis, store, prefill and decode nodes and the gateway (the first start also converts the model and compiles kernels)")
    cluster.start(
        on_ready=lambda name: tell_with_time(f"{name} is ready"),
        on_waiting=lambda names: tell_with_time(f"still waiting for {', '.join(names)}"),
    )
    tell_with_time("the gateway has met them all")


def run_in_foreground(plan: ClusterPlan, tell: Tell, on_up: Callable[[Record], None]) -> None:
    """Keep the cluster until SIGINT or SIGTERM. A process that ends is started again; one that ends again and again is given up.

    Raises ConfigError when a cluster of this folder runs already, ProcessFailed when one does not start.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _only_supervisor(plan.folder), LocalCluster(plan) as cluster:
        try:
            start(cluster, tell)
            on_up(_save(cluster))
            _supervise(cluster, tell)
        except KeyboardInterrupt:
            tell("stopping")
        finally:
            cluster.stop()
            _clear(plan.folder)


def start_in_background(plan: ClusterPlan, tell: Tell) -> Record:
    """Start a supervisor and return when its cluster serves. Raises ConfigError or ProcessFailed with what the supervisor said."""
    running = saved_cluster.load(plan.folder)
    if running is not None and running.is_alive:
        raise ConfigError(_already(running.supervisor_pid))
    plan.folder.mkdir(parents=True, exist_ok=True)
    log = plan.folder / _SUPERVISOR_LOG
    counts = [f"--{role}-nodes={getattr(plan, f'{role}_nodes')}" for role in ("store", "prefill", "decode")]
    argv = [sys.executable, "-m", "kvstore.admin.kvctl", "local", "up", "--foreground", f"--state-dir={plan.folder}"]
    argv += [f"--port={plan.gateway_port}", f"--model={plan.model}", *counts]
    tell("starting (the first start also converts the model and compiles kernels)")
    with log.open("wb") as sink:
        supervisor = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    deadline = time.monotonic() + to_seconds(START_TIMEOUT) + 30
    try:
        while time.monotonic() < deadline:
            if supervisor.poll() is not None:
                raise ProcessFailed(_last_words(log))
            saved = saved_cluster.load(plan.folder)
            if saved is not None and saved.supervisor_pid == supervisor.pid:
                return _record(plan, redis_url=saved.redis_url, gateway_url=saved.gateway_url)
            time.sleep(0.05)
        raise ProcessFailed(f"the cluster did not come up in time; see {log}")
    except BaseException:
        supervisor.terminate()
        raise


def stop(folder: Path) -> Record:
    """Stop the cluster of `folder` and wait for its end. Raises Unavailable when it does not end."""
    saved = saved_cluster.load(folder)
    if saved is None or not saved.is_alive:
        _clear(folder)
        return {"stopped": False}
    os.kill(saved.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + 3 * to_seconds(STOP_TIMEOUT)
    while saved.is_alive:
        if time.monotonic() > deadline:
            raise Unavailable(f"the supervisor (pid {saved.supervisor_pid}) does not end; see {folder / _SUPERVISOR_LOG}")
        time.sleep(0.05)
    for name in (_SUPERVISOR_LOG, _LOCK):
        (folder / name).unlink(missing_ok=True)
    return {"stopped": True}


def status(folder: Path) -> Record:
    saved = saved_cluster.load(folder)
    if saved is None or not saved.is_alive:
        return {"running": False, "processes": []}
    processes = [
        {
            "name": process.name,
            "role": process.role,
            "pid": process.pid,
            "alive": saved_cluster.started_at(process.pid) is not None,
            "addresses": process.addresses,
            "log": process.log,
        }
        for process in saved.processes
    ]
    return {"running": True, "gateway_url": saved.gateway_url, "redis_url": saved.redis_url, "processes": processes}


def _supervise(cluster: LocalCluster, tell: Tell) -> None:
    """Start again what ended, all of it at once: several may be killed together, or killed again while they start.

    Raises ProcessFailed after RESTARTS_IN_A_MINUTE of one process, or when one runs but does not become ready.
    """
    restarts: defaultdict[str, deque[float]] = defaultdict(deque)
    while True:
        for process in cluster.processes.values():
            if process.exit_code is None:
                continue
            now, recent = time.monotonic(), restarts[process.name]
            while recent and recent[0] < now - 60:
                recent.popleft()
            if len(recent) >= RESTARTS_IN_A_MINUTE:
                raise ProcessFailed(f"gave up after {RESTARTS_IN_A_MINUTE} restarts in a minute; {process.failure()}")
            recent.append(now)
            tell(f"{process.name} ended with {process.exit_code}; starting it again")
            process.start()
        starting = [process for process in cluster.processes.values() if not process.ready]
        if starting:
            try:
                wait_until_ready(starting, timeout=START_TIMEOUT)
            except ProcessFailed as failed:
                if all(process.exit_code is None for process in starting):
                    raise
                tell(str(failed))
                continue
            _save(cluster)
        time.sleep(0.25)


def _save(cluster: LocalCluster) -> Record:
    processes = [
        SavedProcess(name=process.name, role=process.role, pid=process.pid, addresses=process.addresses, log=str(process.log))
        for process in cluster.processes.values()
    ]
    redis = SavedProcess(name="redis", role="redis", pid=cluster.redis_pid, addresses={}, log="")
    saved_cluster.save(cluster.plan.folder, redis_url=cluster.redis_url, gateway_url=cluster.gateway_url, processes=[redis, *processes])
    return _record(cluster.plan, redis_url=cluster.redis_url, gateway_url=cluster.gateway_url)


def _record(plan: ClusterPlan, *, redis_url: str, gateway_url: str) -> Record:
    return {"gateway_url": gateway_url, "redis_url": redis_url, "model": _served_model(gateway_url), "folder": str(plan.folder)}


def _served_model(gateway_url: str) -> str:
    try:
        with httpx.Client(timeout=to_seconds(seconds(5)), trust_env=False) as client:
            return str(client.get(f"{gateway_url}/v1/models").json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"the gateway at {gateway_url} does not list its model: {error!r}") from None


@contextmanager
def _only_supervisor(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the kernel drops it with the process. Raises ConfigError when another one has it."""
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            saved = saved_cluster.load(folder)
            raise ConfigError(_already(saved.supervisor_pid if saved else None)) from None
        yield


def _already(pid: int | None) -> str:
    which = "" if pid is None else f" (supervisor pid {pid})"
    return f"a local cluster is running already{which}: stop it with `kvctl local down`, or give another --state-dir"


def _clear(folder: Path) -> None:
    """Remove what a cluster wrote, and the folder if nothing else is in it. A missing folder is fine."""
    saved_cluster.forget(folder)
    for path in folder.glob("*"):
        if path.suffix in (".toml", ".log") and path.name != _SUPERVISOR_LOG:
            path.unlink(missing_ok=True)
        elif path.suffix == ".ssd":
            shutil.rmtree(path, ignore_errors=True)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    start_of_error = next((number for number, line in enumerate(lines) if line.startswith("kvctl: ")), max(0, len(lines) - 3))
    return "\n".join(lines[start_of_error:]).removeprefix("kvctl: ") or "the supervisor ended without a word"
