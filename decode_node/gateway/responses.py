"""How an answer leaves: as one JSON object or as server-sent events, with the client watched while the work goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from decode_node.gateway.failures import HttpFailure
from decode_node.gateway.replies import DONE, event_data
from kvstore.errors import LarderError
from kvstore.units import Nanos, to_seconds

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed the connection, or has taken no bytes for too long."""


class Outlet:
    """The way out to one client. Every send is bounded: raises ClientGone."""

    def __init__(self, send: Send, *, send_timeout: Nanos) -> None:
        self._send = send
        self._send_timeout_s = to_seconds(send_timeout)
        self.started = False

    async def json(self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body, ensure_ascii=False).encode()
        await self._start(status, {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})})
        await self._bytes(data, more=False)

    async def begin_events(self) -> None:
        # X-Accel-Buffering: nginx would otherwise collect the tokens.
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, headers)

    async def event(self, data: str) -> None:
        await self._bytes(f"data: {data}\n\n".encode(), more=True)

    async def end_events(self) -> None:
        await self._bytes(f"data: {DONE}\n\n".encode(), more=False)

    async def failure(self, failure: HttpFailure) -> None:
        """The status and the error object; within a stream, which has its status already, an error event and the end."""
        if self.started:
            await self.event(event_data(failure.body))
            await self.end_events()
        else:
            await self.json(failure.status, failure.body, failure.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._bounded({"type": "http.response.start", "status": status, "headers": raw})

    async def _bytes(self, data: bytes, *, more: bool) -> None:
        await self._bounded({"type": "http.response.body", "body": data, "more_body": more})

    async def _bounded(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone("took no bytes in time") from None
        except OSError as error:
            raise ClientGone(str(error)) from None


class WorkResponse(Response):
    """Runs `work(outlet)` until it ends or the client goes away, whichever is first; then the work is cancelled.

    A HttpFailure or LarderError of the work becomes the error reply. The request's body must have been read.
    """

    def __init__(self, work: Callable[[Outlet], Awaitable[None]], *, send_timeout: Nanos) -> None:
        super().__init__()
        self._work = work
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(send, send_timeout=self._send_timeout)
        async with asyncio.TaskGroup() as group:
            work = group.create_task(self._run(outlet))
            watch = group.create_task(_disconnected(receive))
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()
            watch.cancel()

    async def _run(self, outlet: Outlet) -> None:
        try:
            try:
                await self._work(outlet)
            except HttpFailure as failure:
                await outlet.failure(failure)
            except LarderError as error:
                await outlet.failure(HttpFailure.of(error))
        except ClientGone as gone:
            logger.info("a client is gone: %s", gone)


class PartingResponse(JSONResponse):
    """To a client that still sends what nobody will read: the rest is taken and dropped for a moment after the answer.

    A socket that is closed over unread bytes resets its connection, and the client may lose the answer before it has read it.
    """

    _LINGER_S = 2.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if b"expect" not in dict(scope["headers"]):  # a client that waits for "100 Continue" sends nothing after this answer
            try:
                async with asyncio.timeout(self._LINGER_S):
                    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                        pass
            except TimeoutError:
                pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
