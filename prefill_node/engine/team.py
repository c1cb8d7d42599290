"""The threads that share the CPU kernels' work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from prefill_node.engine.kernels import ARGUMENTS, CONTROL_LENGTH, EXIT, OPERATION, help_out, share


class Team:
    """The calling thread and `threads` - 1 helpers. The helpers spin, giving way to others, while the team is `awake`; between steps
    they sleep. One thread calls; not reentrant."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._control = np.zeros(CONTROL_LENGTH, np.int64)
        self._control[EXIT] = 1
        self._wanted = threading.Semaphore(0)
        self._closed = False
        self._helpers = [threading.Thread(target=self._help, name=f"engine-helper-{i}", daemon=True) for i in range(threads - 1)]
        for helper in self._helpers:
            helper.start()

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._control[EXIT] = 0
        for _ in self._helpers:
            self._wanted.release()
        try:
            yield
        finally:
            self._control[EXIT] = 1

    def run(self, operation: int, arguments: tuple[int, ...], *, items: int) -> None:
        """All items of one kernel operation; the arguments' memory stays alive until it returns."""
        self._control[OPERATION] = operation
        self._control[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments
        share(self._control, items)

    def close(self) -> None:
        self._closed = True
        self._control[EXIT] = 1
        for _ in self._helpers:
            self._wanted.release()
        for helper in self._helpers:
            helper.join()

    def _help(self) -> None:
        while True:
            self._wanted.acquire()
            if self._closed:
                return
            help_out(self._control)
