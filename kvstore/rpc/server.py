"""Construction of a gRPC server, and the one place where our errors become status codes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.errors import ConfigError, LarderError
from kvstore.process import listening_socket
from kvstore.rpc.convert import MAX_BATCH_ITEMS
from kvstore.rpc.errors import status_code_of
from kvstore.units import MIB, Nanos, seconds, to_milliseconds

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")

MAX_MESSAGE_BYTES = 8 * MIB
"""A chunk of 1 MiB and a batch of 4,096 block references (about 140 bytes each) both fit with room; more is refused by gRPC."""

MAX_CONCURRENT_CALLS = 1024
"""More are refused with RESOURCE_EXHAUSTED, so that a herd of clients gets an answer and not a hang."""

MAX_CONNECTIONS = 1024
"""More are closed as they come: whoever collects connections does not collect this process's memory and descriptors."""

IDLE_CONNECTION: Nanos = seconds(600)
"""A connection without a call for so long is told to go, and closed. A stream is a call, however silent. Channels leave by themselves after
half of it (rpc/channel.py)."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this a second process on the same port would silently take a share of the connections.
    ("grpc.so_reuseport", 0),
    # A client that is gone without a FIN is noticed, and its streams end, within 30 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
assert MAX_BATCH_ITEMS * 256 < MAX_MESSAGE_BYTES


def one_line_for_garbage(record: logging.LogRecord) -> bool:
    """A logging filter: a message that is no protobuf is its sender's fault, so it gets a line and not the traceback of a bug."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DecodeError):
        record.msg, record.args = "refused a message that cannot be parsed: %s", (error,)
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        record.exc_info = None
    return True


logging.getLogger("grpc._cython.cygrpc").addFilter(one_line_for_garbage)


def make_server(*, idle: Nanos = IDLE_CONNECTION, most_connections: int = MAX_CONNECTIONS) -> Any:
    """A grpc.aio.Server without services and ports."""
    bounds = (
        ("grpc.max_connection_idle_ms", int(to_milliseconds(idle))),
        ("grpc.max_allowed_incoming_connections", most_connections),
    )
    return grpc.aio.server(options=_OPTIONS + bounds, maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS)


def bind(server: Any, *, host: str, port: int) -> int:
    """Adds the port (0: a free one) and returns the number. Raises ConfigError when it is in use or the host is not ours."""
    listening_socket(host, port).close()  # says what is wrong in our words, where gRPC would log it to stderr in its own
    try:
        bound = int(server.add_insecure_port(f"{host}:{port}"))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    if bound == 0:
        raise ConfigError(f"cannot listen on {host}:{port}: not an address of this machine")
    return bound


def guarded(method: Callable[[Any, Request, Any], Awaitable[Answer]]) -> Callable[[Any, Request, Any], Awaitable[Answer]]:
    """Wraps a servicer's coroutine method (one that answers with a stream writes to its context): a LarderError becomes its status
    code and message."""

    @wraps(method)
    async def answer(self: Any, request: Request, context: Any) -> Answer:
        try:
            return await method(self, request, context)
        except LarderError as error:
            await context.abort(status_code_of(error), str(error))
            raise AssertionError("abort does not return") from error

    return answer
