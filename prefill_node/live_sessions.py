"""The requests a node is working on, so that a drain can end them: stop computing, publish what is sealed, let go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvstore.errors import LarderError, Unavailable
from kvstore.units import Nanos


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
        self._none_left = asyncio.Event()
        self._none_left.set()

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
        self._none_left.clear()
        try:
            yield
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._none_left.set()

    async def drain(self, publisher: Flushes, *, flush: Nanos, leave: float = 2.0) -> None:
        """End every session with Unavailable, after what they sealed is published or `flush` has passed.

        Whoever held the session goes on elsewhere and finds the blocks there. `leave` seconds bound the wait for the calls to end.
        """
        self._draining = True
        for session in tuple(self._sessions):
            session.halt()
        await publisher.flush(timeout=flush)
        for session in tuple(self._sessions):
            session.end(Unavailable("this node is draining: go on on another one"))
        try:
            async with asyncio.timeout(leave):
                await self._none_left.wait()
        except TimeoutError:
            pass  # a client that reads nothing keeps its call open; the server's stop closes it
