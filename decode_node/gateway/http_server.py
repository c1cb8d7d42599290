"""uvicorn inside our process: our socket, our signals, and a bound on how long a connection may take to say what it wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.units import Nanos, to_seconds


class HttpServer:
    """Serves an ASGI app on a listening socket."""

    def __init__(self, app: Any, sock: socket.socket, *, head_timeout: Nanos, stop_grace: Nanos) -> None:
        self._sock = sock
        config = uvicorn.Config(
            app,
            http=_protocol(head_timeout),
            loop="asyncio",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(to_seconds(stop_grace))),
        )
        self._server = _Server(config)

    async def serve(self) -> None:
        """Serve until cancelled; then no new connection is taken and answers in progress get `stop_grace` to end."""
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._sock]))
        try:
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are run_process's: it cancels us."""
        yield


def _protocol(head_timeout: Nanos) -> type[H11Protocol]:
    class HeadBoundProtocol(H11Protocol):
        """Closes a connection whose request head does not come in time; uvicorn itself waits for ever once a byte has come."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_head_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._awaits_head:
                self._stop_head_timer()
            elif self._head_timer is None:
                self._start_head_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_head_timer()
            super().connection_lost(exc)

        @property
        def _awaits_head(self) -> bool:
            """Also while the unread rest of an answered request's body still comes."""
            return self.cycle is None or self.cycle.response_complete

        def _start_head_timer(self) -> None:
            self._head_timer = self.loop.call_later(to_seconds(head_timeout), self._head_is_late)

        def _stop_head_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_is_late(self) -> None:
            self._head_timer = None
            if self._awaits_head and not self.transport.is_closing():
                self.transport.close()

    return HeadBoundProtocol
