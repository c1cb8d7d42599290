"""The HTTP door: routes, authentication, bodies in, replies out."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from decode_node.gateway.answer import Delta
from decode_node.gateway.api import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_chat_completion,
    parse_completion,
    parse_tokenize,
)
from decode_node.gateway.choices import Choices
from decode_node.gateway.envelope import CLIENT_GONE, Envelope
from decode_node.gateway.failures import HttpFailure
from decode_node.gateway.replies import ChatFormat, CompletionFormat, ReplyFormat, WholeChoice, event_data
from decode_node.gateway.responses import Outlet, PartingResponse, WorkResponse
from decode_node.gateway.service import GatewayService
from kvstore.errors import LarderError
from kvstore.ids import Namespace
from kvstore.units import Bytes, Nanos, to_seconds


def create_app(service: GatewayService) -> FastAPI:
    app = FastAPI(title="Larder", docs_url=None, redoc_url=None, openapi_url=None)
    door = _Door(service)
    app.add_middleware(Envelope, metrics=service.metrics)
    app.add_api_route("/v1/completions", door.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", door.chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", door.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", door.model, methods=["GET"])
    app.add_api_route("/tokenize", door.tokenize, methods=["POST"])
    app.add_api_route("/health", door.ready, methods=["GET"])
    app.add_api_route("/health/ready", door.ready, methods=["GET"])
    app.add_api_route("/health/live", door.live, methods=["GET"])
    app.add_api_route("/metrics", door.metrics, methods=["GET"])
    app.add_api_route("/larder/sessions", door.sessions, methods=["GET"])
    app.add_exception_handler(HttpFailure, _on_http_failure)
    app.add_exception_handler(LarderError, _on_larder_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    return app


class _Door:
    """One method a route."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._started_at = int(time.time())
        # By digest, so that a lookup's time tells nothing about how much of a key was right.
        self._namespaces = {_digest(key): Namespace(namespace) for key, namespace in service.config.api_keys.items()}

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion, CompletionFormat, "cmpl-")

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, parse_chat_completion, ChatFormat, "chatcmpl-")

    async def models(self, request: Request) -> Response:
        self._namespace(request)
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request, name: str) -> Response:
        self._namespace(request)
        self._service.check_model(name)
        return JSONResponse(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        namespace = self._namespace(request)
        parsed = parse_tokenize(await self._body(request))
        if parsed.model is not None:
            self._service.check_model(parsed.model)
        prompt = await self._service.tokenize(parsed, namespace=namespace)
        blocks = [
            {"hash": ref.hash.hex(), "parent": ref.parent.hex(), "stripe": ref.stripe.hex(), "index": ref.index} for ref in prompt.chain
        ]
        return JSONResponse(
            {
                "tokens": list(prompt.token_ids),
                "block_tokens": prompt.served.block_tokens,
                "namespace": namespace,
                "layout_fingerprint": prompt.served.identity.layout.hex(),
                "blocks": blocks,
            }
        )

    async def live(self) -> Response:
        """The process runs; whatever is missing elsewhere is no reason to restart it."""
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        health = self._service.fleet.health()
        status = "unavailable" if not health.ready else "degraded" if health.degraded else "ok"
        return JSONResponse({"status": status, "degraded": list(health.degraded)}, status_code=200 if health.ready else 503)

    async def metrics(self) -> Response:
        """With API keys there are tenants, and the counts are nobody's business but the operator's: then only on the metrics port."""
        if self._namespaces:
            raise HttpFailure(404, "with api_keys configured, metrics are served on the metrics port only")
        return Response(generate_latest(self._service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def sessions(self, request: Request) -> Response:
        """The live sessions of the caller's namespace."""
        namespace = self._namespace(request)
        sessions = [
            {
                "request_id": session.request.request_id,
                "state": session.state.value,
                "decode_node": session.decode_node,
                "prompt_tokens": len(session.request.prompt_token_ids),
                "generated_tokens": len(session.transcript.generated_token_ids),
                "failovers": session.story.failovers,
            }
            for session in self._service.sessions
            if session.request.namespace == namespace
        ]
        return JSONResponse({"sessions": sessions})

    async def _generate(
        self,
        request: Request,
        parse: Callable[[dict[str, Any]], CompletionRequest | ChatCompletionRequest],
        format_class: type[ReplyFormat],
        id_prefix: str,
    ) -> Response:
        namespace = self._namespace(request)
        parsed = parse(await self._body(request))
        request_id: str = request.state.request_id

        async def work(outlet: Outlet) -> None:
            choices = await self._service.open(parsed, namespace=namespace, request_id=request_id)
            reply = format_class(
                id=id_prefix + request_id,
                model=self._service.model_name,
                created=int(time.time()),
                return_token_ids=parsed.return_token_ids,
                token_bytes=self._service.token_bytes,
                echo=self._service.echo_of(parsed),
            )
            async with aclosing(choices.deltas()) as deltas:
                if parsed.stream:
                    await _stream(choices, deltas, reply, outlet, include_usage=parsed.include_usage)
                else:
                    await _whole(choices, deltas, reply, outlet, count=parsed.choices)

        return WorkResponse(work, send_timeout=self._service.config.timeouts.send)

    def _namespace(self, request: Request) -> Namespace:
        """Of the caller's API key. Raises HttpFailure 401."""
        if not self._namespaces:
            return Namespace(self._service.config.default_namespace)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        namespace = self._namespaces.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if namespace is None:
            message = "this API key is not known here" if key else "an API key is required: Authorization: Bearer <key>"
            raise HttpFailure(401, message, code="invalid_api_key")
        return namespace

    async def _body(self, request: Request) -> dict[str, Any]:
        config = self._service.config
        return _json_object(await _read_body(request, limit=config.limits.body, timeout=config.timeouts.body))

    def _model_card(self) -> dict[str, Any]:
        served = self._service.fleet.served
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "larder",
            "max_model_len": None if served is None else served.max_positions,
        }


Deltas = AsyncGenerator[tuple[int, Delta], None]


async def _whole(choices: Choices, deltas: Deltas, reply: ReplyFormat, outlet: Outlet, *, count: int) -> None:
    whole = [WholeChoice() for _ in range(count)]
    async for index, delta in deltas:
        whole[index].take(delta)
    await outlet.json(200, reply.whole(whole, usage=choices.usage()))


async def _stream(choices: Choices, deltas: Deltas, reply: ReplyFormat, outlet: Outlet, *, include_usage: bool) -> None:
    """The status line waits for the first token: until then a failure still gets its own status."""
    opened: set[int] = set()
    async for index, delta in deltas:
        if not outlet.started:
            await outlet.begin_events()
        if index not in opened:
            opened.add(index)
            opening = reply.opening(index)
            if opening is not None:
                await outlet.event(event_data(opening))
        piece = reply.piece(index, delta)
        if piece is not None:
            await outlet.event(event_data(piece))
    if include_usage:
        await outlet.event(event_data(reply.usage_piece(choices.usage())))
    await outlet.end_events()


async def _read_body(request: Request, *, limit: Bytes, timeout: Nanos) -> bytes:
    """Raises HttpFailure 413 or 408, ClientDisconnect when the client leaves in the middle."""
    too_large = HttpFailure(413, f"the request body may have {limit} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(to_seconds(timeout)):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        raise HttpFailure(408, f"the request body did not arrive within {to_seconds(timeout):.0f} s", code="request_timeout") from None
    return bytes(body)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        parsed = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpFailure.bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise HttpFailure.bad_request("the body must be a JSON object", code="invalid_json")
    return parsed


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _failure_response(failure: HttpFailure) -> JSONResponse:
    # The body was not read to its end: the connection cannot be used for another request then.
    close = {"connection": "close"} if failure.status in (408, 413) else {}
    response_class = PartingResponse if failure.status == 413 else JSONResponse
    return response_class(failure.body, status_code=failure.status, headers={**failure.headers, **close})


async def _on_http_failure(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpFailure)
    return _failure_response(error)


async def _on_larder_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LarderError)
    return _failure_response(HttpFailure.of(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        failure = HttpFailure(404, f"there is nothing at {request.url.path[:200]!r}", code="unknown_url")
    elif error.status_code == 405:
        failure = HttpFailure(405, f"{request.method} is not allowed here", code="method_not_allowed")
    else:
        failure = HttpFailure(error.status_code, str(error.detail))
    response = _failure_response(failure)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Nobody reads this; the status is for the count."""
    return Response(status_code=CLIENT_GONE)


async def _on_bug(_: Request, __: Exception) -> Response:
    return _failure_response(HttpFailure(500, "something went wrong here; the operator's log has the details", code="internal_error"))
