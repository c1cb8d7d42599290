"""One clock for a whole simulated cluster, what will happen when, and processes that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any

from kvstore.units import Nanos


class Timeline:
    """Of things due at the same instant, those asked for first happen first. So one seed gives one order."""

    def __init__(self) -> None:
        self.now = Nanos(0)
        self._due: list[tuple[Nanos, int, Callable[[], None]]] = []
        self._asked = 0

    def after(self, delay: int, do: Callable[[], None]) -> None:
        self._asked += 1
        heappush(self._due, (Nanos(self.now + delay), self._asked, do))

    def run_until(self, end: Nanos) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, do = heappop(self._due)
            do()
        self.now = end


class Reply:
    """A value that comes once; later ones are dropped."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._waiting: list[Callable[[], None]] = []

    def set(self, value: Any) -> None:
        if self.done:
            return
        self.done, self.value = True, value
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def then(self, go_on: Callable[[], None]) -> None:
        if self.done:
            go_on()
        else:
            self._waiting.append(go_on)

    def __await__(self) -> Steps:
        return (yield self)


class Pause(int):
    """Awaited in a coroutine: that many nanoseconds."""

    def __await__(self) -> Steps:
        return (yield int(self))


class Bell:
    """Rings many times; whoever waits then goes on."""

    def __init__(self) -> None:
        self._next = Reply()

    def ring(self) -> None:
        rung, self._next = self._next, Reply()
        rung.set(None)

    def heard(self) -> Reply:
        return self._next


Steps = Generator[Any, Any, Any]
"""Yields what it waits for: a Reply (and gets its value) or a time in nanoseconds. Returns its result."""


class Processes:
    """The processes of one client or node. `kill` is kill -9: nothing of them runs any more, nothing is tidied up."""

    def __init__(self, timeline: Timeline, *, gate: Callable[[Callable[[], None]], None] = lambda go_on: go_on()) -> None:
        """`gate`: holds up whoever would go on, as long as their process is stopped."""
        self._timeline = timeline
        self._gate = gate
        self._running: dict[Steps | Coroutine[Any, Any, Any], None] = {}
        self.killed = False

    def __len__(self) -> int:
        return len(self._running)

    def spawn(self, steps: Steps | Coroutine[Any, Any, Any]) -> Reply:
        """Runs to its first wait now. The reply has its result."""
        ended = Reply()
        self._running[steps] = None
        self._go_on(steps, ended, None)
        return ended

    def kill(self) -> None:
        self.killed = True
        self._running.clear()  # whatever waits for something still waits; it never goes on

    def _go_on(self, steps: Steps | Coroutine[Any, Any, Any], ended: Reply, value: Any) -> None:
        if self.killed:
            return
        try:
            awaited = steps.send(value)
        except StopIteration as end:
            self._running.pop(steps, None)
            ended.set(end.value)
            return
        if isinstance(awaited, Reply):
            awaited.then(lambda: self._gate(lambda: self._go_on(steps, ended, awaited.value)))
        else:  # None: a coroutine lets others have their turn
            self._timeline.after(max(0, awaited or 0), lambda: self._gate(lambda: self._go_on(steps, ended, None)))
