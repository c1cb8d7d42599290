"""The threads that share the CPU kernels' work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from prefill_node.engine.operations import operations
from prefill_node.engine.team_kernels import CONTROL_LENGTH, EXIT


class Team:
    """The calling thread and `threads` - 1 helpers. The helpers spin, giving way to others, while the team is `awake`; between steps
    they sleep. One thread calls; not reentrant."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._run_all, self._help_out = operations().run_all, operations().help_out
        self._control = np.zeros(CONTROL_LENGTH, np.int64)
        self._address = self._control.ctypes.data
        self._sleep(True)
        self._wanted = threading.Semaphore(0)
        self._closed = False
        self._helpers = [threading.Thread(target=self._help, name=f"engine-helper-{i}", daemon=True) for i in range(threads - 1)]
        for helper in self._helpers:
            helper.start()

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._sleep(False)
        for _ in self._helpers:
            self._wanted.release()
        try:
            yield
        finally:
            self._sleep(True)

    def run(self, records: np.ndarray) -> None:
        """The operations of `records` (int64 [n, RECORD], contiguous) one after the other, without the GIL; the memory that they name
        stays alive until it returns."""
        self._run_all(self._address, records.ctypes.data, len(records))

    def close(self) -> None:
        self._closed = True
        self._sleep(True)
        for _ in self._helpers:
            self._wanted.release()
        for helper in self._helpers:
            helper.join()

    def _sleep(self, wanted: bool) -> None:
        self._control[EXIT // 8] = wanted

    def _help(self) -> None:
        while True:
            self._wanted.acquire()
            if self._closed:
                return
            self._help_out(self._address)
