"""A streaming client of the gateway that writes down when each token came. Times are the client's own."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvstore.errors import Unavailable


@dataclass(slots=True, kw_only=True)
class Stream:
    """One answer, as it came."""

    sent_at: float
    """Seconds of the monotonic clock, as all instants here."""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """One instant a token."""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        return round((self.arrivals[0] - self.sent_at) * 1e3, 1)

    @property
    def tokens_per_s(self) -> float:
        """From the first token to the last; 0 for a single token."""
        span = self.arrivals[-1] - self.arrivals[0]
        return round((len(self.arrivals) - 1) / span, 1) if span > 0 else 0.0

    @property
    def longest_gap_ms(self) -> float:
        return round(max((later - earlier for earlier, later in itertools.pairwise(self.arrivals)), default=0.0) * 1e3, 1)

    @property
    def larder(self) -> Mapping[str, Any]:
        """What the gateway says about blocks and nodes of this answer."""
        found = self.usage.get("larder", {})
        assert isinstance(found, dict)
        return found


async def stream_chat(
    client: httpx.AsyncClient, body: Mapping[str, Any], *, on_token: Callable[[Stream], None] = lambda stream: None
) -> Stream:
    """POST /v1/chat/completions and read it to its end. Raises Unavailable with the gateway's words when there is no whole answer."""
    return await _stream(client, "/v1/chat/completions", body, on_token)


async def stream_completion(
    client: httpx.AsyncClient, body: Mapping[str, Any], *, on_token: Callable[[Stream], None] = lambda stream: None
) -> Stream:
    """The same of /v1/completions, which takes a prompt of token ids."""
    return await _stream(client, "/v1/completions", body, on_token)


async def _stream(client: httpx.AsyncClient, route: str, body: Mapping[str, Any], on_token: Callable[[Stream], None]) -> Stream:
    request = {**body, "stream": True, "stream_options": {"include_usage": True}, "larder": {"return_token_ids": True}}
    stream = Stream(sent_at=time.monotonic())
    try:
        async with client.stream("POST", route, json=request) as answer:
            if answer.status_code != 200:
                raise Unavailable(f"the gateway answered {answer.status_code}: {_message(await answer.aread())}")
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(stream, json.loads(line.removeprefix("data: ")))
                    on_token(stream)
    except httpx.HTTPError as error:
        raise Unavailable(f"the stream broke after {len(stream.token_ids)} tokens: {str(error) or type(error).__name__}") from None
    if stream.finish_reason is None or not stream.arrivals:
        raise Unavailable(f"the stream ended after {len(stream.token_ids)} tokens without a finish reason")
    return stream


def _take(stream: Stream, chunk: Mapping[str, Any]) -> None:
    if "error" in chunk:
        raise Unavailable(f"the stream failed after {len(stream.token_ids)} tokens: {chunk['error'].get('message')}")
    stream.usage = chunk.get("usage") or stream.usage
    for choice in chunk.get("choices", ()):
        token_ids = choice.get("token_ids") or ()
        stream.token_ids += token_ids
        stream.arrivals += [time.monotonic()] * len(token_ids)
        stream.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
