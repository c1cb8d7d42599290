"""One child process of a local cluster: started from its own TOML, known to serve by its READY line, ended by its pid."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from kvstore.errors import LarderError
from kvstore.process import PARENT_VARIABLE
from kvstore.units import Nanos, to_seconds

LOG_LINES_SHOWN = 6
TELL_EVERY_S = 5.0


class ProcessFailed(LarderError):
    """A process of the cluster did not come up: its last log lines are in the message."""


class LocalProcess:
    """`python -m <module> --config <folder>/<name>.toml`. Blocking; its stderr goes to `<folder>/<name>.log`.

    The child gets a session of its own (Ctrl-C is for the supervisor) and ends with the thread that called `start`, also when that is
    killed. Start it from the main thread.
    """

    def __init__(self, *, name: str, role: str, module: str, settings: Mapping[str, object], folder: Path) -> None:
        self.name = name
        self.role = role
        self.log = folder / f"{name}.log"
        self.addresses: dict[str, str] = {}
        """What the READY line says: "rpc", "http", "metrics" -> host:port."""
        self._config = folder / f"{name}.toml"
        self._config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        self._argv = [sys.executable, "-m", module, "--config", str(self._config)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def ready(self) -> bool:
        return bool(self.addresses)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number when a signal ended it."""
        return None if self._process is None else self._process.poll()

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout

    def start(self) -> None:
        self.addresses = {}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=process_environment(),
                start_new_session=True,
            )

    def take_ready_line(self) -> None:
        """Read the line that the pipe has. Raises ProcessFailed when it is not the READY line: the process ended instead."""
        words = self.stdout.readline().decode(errors="replace").split()
        if words[:1] != ["READY"]:
            assert self._process is not None
            self._process.wait()
            raise ProcessFailed(self.failure())
        self.addresses = dict(word.split("=", 1) for word in words[3:])

    def failure(self) -> str:
        code = self.exit_code
        how = "does not answer" if code is None else f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join([f"{self.name} {how}; its log {self.log} ends with:", *(f"    {line}" for line in lines or ["(nothing)"])])

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: Nanos) -> bool:
        """True when it ended by itself within `timeout`; else it is killed."""
        if self._process is None:
            return True
        try:
            self._process.wait(to_seconds(timeout))
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._reap()
        return True

    def _reap(self) -> None:
        assert self._process is not None
        self._process.wait()
        self.stdout.close()


def wait_until_ready(
    processes: Sequence[LocalProcess],
    *,
    timeout: Nanos,
    on_ready: Callable[[LocalProcess], None] = lambda process: None,
    on_waiting: Callable[[Sequence[LocalProcess]], None] = lambda waiting: None,
) -> None:
    """Return when each has said READY. Raises ProcessFailed for the first that ended or took longer than `timeout`.

    `on_waiting` is called every TELL_EVERY_S with those that are not ready yet.
    """
    deadline = time.monotonic() + to_seconds(timeout)
    waiting = list(processes)
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process.stdout, selectors.EVENT_READ, process)
        while waiting:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ProcessFailed(f"{waiting[0].name} was not ready within {to_seconds(timeout):.0f} s; {waiting[0].failure()}")
            ready = selector.select(min(remaining, TELL_EVERY_S))
            if not ready:
                on_waiting(waiting)
            for key, _ in ready:
                said: LocalProcess = key.data
                said.take_ready_line()
                selector.unregister(key.fileobj)
                waiting.remove(said)
                on_ready(said)


def process_environment() -> dict[str, str]:
    """Ours, less the LARDER_* keys (they would win over the TOML of every process alike) and any proxy between loopback processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    return {**kept, "no_proxy": "localhost,127.0.0.1", "NO_PROXY": "localhost,127.0.0.1", PARENT_VARIABLE: str(os.getpid())}
