"""The requests a node is working on, so that a drain can end them: stop computing, publish what is sealed, let go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvstore.errors import LarderError, Unavailable
from kvstore.units import Nanos, seconds, to_seconds


class Flushes(Protocol):
    """The part of a Publisher that a drain needs."""

    async def flush(self, *, timeout: Nanos) -> bool: ...


class Session(Protocol):
    def halt(self) -> None:
        """Compute no more; go on answering (heartbeats) until `end`."""
        ...

    def end(self, error: LarderError) -> None:
        """Fail the call with `error` at once."""
        ...


class LiveSessions:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._sessions: set[Session] = set()
        self._draining = False
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def draining(self) -> bool:
        return self._draining

    @contextmanager
    def entered(self, session: Session) -> Iterator[None]:
        """The life of one session. Raises Unavailable when the node takes no more work."""
        if self._draining:
            raise Unavailable("this node is draining: use another one")
        self._sessions.add(session)
        self._tell()
        try:
            yield
        finally:
            self._sessions.discard(session)
            self._tell()

    async def changed(self, count: int) -> None:
        """Wait until there are not `count` sessions."""
        while len(self._sessions) == count:
            await self._changed.wait()

    async def all_left(self, *, timeout: Nanos) -> bool:
        """Wait until none is left; False when `timeout` came first."""
        try:
            async with asyncio.timeout(to_seconds(timeout)):
                while self._sessions:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, publisher: Flushes, *, flush: Nanos, leave: Nanos = seconds(2)) -> None:
        """End every session with Unavailable, after what they sealed is published or `flush` has passed.

        Whoever held the session goes on elsewhere and finds the blocks there. `leave` bounds the wait for the calls to end.
        """
        self._draining = True
        for session in tuple(self._sessions):
            session.halt()
        await publisher.flush(timeout=flush)
        for session in tuple(self._sessions):
            session.end(Unavailable("this node is draining: go on on another one"))
        await self.all_left(timeout=leave)  # a client that reads nothing keeps its call open; the server's stop closes it

    def _tell(self) -> None:
        told, self._changed = self._changed, asyncio.Event()
        told.set()
