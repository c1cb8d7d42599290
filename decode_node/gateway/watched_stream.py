"""One decode node's stream under watch: its next event, or why it cannot be trusted to bring one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

from decode_node.gateway.nodes import FinishedOut, GenerateEvent, Heartbeat, PrefixLoaded, TokenOut
from decode_node.gateway.silence import Pace, Silence
from decode_node.published import PublishedPrefix
from kvstore.clock import Clock
from kvstore.errors import InvalidRequest, LarderError, Overloaded, Unavailable
from kvstore.units import Nanos, to_seconds


class FailoverReason(StrEnum):
    """Label of larder_failovers_total."""

    SILENT = "silent"
    """No token and no heartbeat in time: frozen, or the way to it is cut."""
    STALLED = "stalled"
    """Heartbeats, but no token for very long: the node lives, its engine does not."""
    ERROR = "error"
    """The stream broke or ended with an error: killed, crashed, drained."""
    INCOMPLETE = "incomplete"
    """The stream ended in good order but before the answer did."""
    POSITION = "position"
    """A token came twice, one was left out, or one came after the end."""
    OVERLOADED = "overloaded"
    """No room or no turn."""


class AttemptFailed(Exception):
    """This node's stream is over before the answer is; another node may go on."""

    def __init__(self, reason: FailoverReason, error: LarderError) -> None:
        super().__init__(str(error))
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPatience:
    connect: Nanos
    """Until the first sign of life."""
    heartbeat: Nanos
    """Between two signs of life."""
    first_token: Nanos
    """Until the first token: a node may have a queue."""
    token: Nanos
    """Between two tokens."""


class WatchedStream:
    def __init__(
        self,
        stream: AsyncIterator[GenerateEvent],
        *,
        patience: StreamPatience,
        pace: Pace,
        clock: Clock,
        published: PublishedPrefix | None = None,
    ) -> None:
        """`pace` is the node's. `published`: what it may be waiting for; until that is over, nobody is late with the first token."""
        self._stream = stream
        self._pace = pace
        self._published = published
        self._patience = patience
        self._clock = clock
        self._silence_limit = patience.connect
        self._token_limit = patience.first_token
        self._last_token_at = self.heard_at = clock.now()
        """`heard_at`: when the last sign of life was read; the start, before the first."""

    async def next(self) -> PrefixLoaded | TokenOut | FinishedOut:
        """The next event that is no heartbeat. Raises AttemptFailed; InvalidRequest when the node refuses the request as such."""
        while True:
            event = await self._read()
            self._silence_limit = self._patience.heartbeat
            now = self.heard_at = self._clock.now()
            if isinstance(event, Heartbeat):
                if self._published is not None and not self._published.over:
                    self._last_token_at = now
                if now - self._last_token_at > self._token_limit:
                    late = Unavailable(f"signs of life, but no token for {to_seconds(self._token_limit):.0f} s")
                    raise AttemptFailed(FailoverReason.STALLED, late)
                continue
            if isinstance(event, TokenOut):
                self._last_token_at, self._token_limit = now, self._patience.token
            return event

    async def _read(self) -> GenerateEvent:
        try:
            event = await self._within_patience(asyncio.ensure_future(anext(self._stream, None)))
        except InvalidRequest:
            raise
        except Overloaded as error:
            raise AttemptFailed(FailoverReason.OVERLOADED, error) from None
        except LarderError as error:
            raise AttemptFailed(FailoverReason.ERROR, error) from None
        if event is None:
            raise AttemptFailed(FailoverReason.INCOMPLETE, Unavailable("the stream ended before the answer did"))
        return event

    async def _within_patience(self, pending: asyncio.Future[GenerateEvent | None]) -> GenerateEvent | None:
        """Not asyncio.timeout: that would cancel the read, and with it the call, before it can be asked whose silence it was."""
        began = self._clock.now()
        limit = self._pace.limit(self._silence_limit)
        silence = Silence(limit, now=began)
        try:
            while True:
                await asyncio.wait((pending,), timeout=to_seconds(silence.next_look))
                if pending.done():
                    self._pace.note(Nanos(self._clock.now() - began))
                    return pending.result()
                if silence.look(self._clock.now()):
                    silent = Unavailable(f"nothing came for {to_seconds(limit):.1f} s")
                    raise AttemptFailed(FailoverReason.SILENT, silent)
        finally:
            if not pending.done():
                pending.cancel()
                await asyncio.wait((pending,))
