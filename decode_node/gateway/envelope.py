"""Around every request: its id, its count by route and status, and a limit for its body."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_node.gateway.metrics import GatewayMetrics

REQUEST_ID_HEADER = "x-larder-request-id"
CLIENT_GONE = 499
"""Counted, never sent: nginx's status for a client that left before the answer began."""


class Envelope:
    """ASGI middleware. The id is 96 random bits in hex, in scope["state"]["request_id"] and in the reply's header."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID_HEADER.encode(), request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            # The route's pattern, never the path: a label of the client's choosing would grow without bound.
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(route=route, status=str(status)).inc()
