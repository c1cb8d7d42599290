"""A gRPC call as the rest of the code sees it: its answer or its messages, and failures as errors of ours."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from kvstore.rpc.errors import error_of


async def answer_of(call: Any) -> Any:
    """The one message of a call. Raises the LarderError that its status stands for."""
    try:
        return await call
    except grpc.RpcError as error:
        raise error_of(error) from None


async def messages_of(call: Any) -> AsyncGenerator[Any, None]:
    """The messages of a streaming call, which is cancelled when the caller leaves early. Raises as `answer_of`."""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message
    except grpc.RpcError as error:
        raise error_of(error) from None
    finally:
        call.cancel()
