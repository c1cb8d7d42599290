"""The requests of one connection as they come in: reads whose payloads lie in memory are served here, all others are handed on.

Works out of the event loop's own turn, as control_line.py does: no task, and no future for a read. What has to be waited for (the SSD, a
payload that comes in) is the connection's own task's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvstore.transport.frames import HEADER_BYTES, BadFrame, FrameKind, Header
from kvstore.transport.stream import MOST_PARTS, Buffer, GivenUp, StoodStill, Stream, StreamCut, drop_front
from kvstore.transport.ticket import PROOF_BYTES
from kvstore.units import Nanos, seconds, to_milliseconds, to_seconds


class Idle(StoodStill):
    """Nothing was asked for as long as allowed."""


class Request(NamedTuple):
    header: Header
    head: bytes
    """The header as it came: proofs are over it."""
    body: bytes
    """Of a READ, with its proof."""
    time_left: Nanos
    """In which the rest of it must have come."""


class Outgoing(NamedTuple):
    """Payloads of one read, each behind its header, ready to go."""

    parts: list[Buffer]
    still: Callable[[], bool]
    """Asked before every touch of them; False ends the transfer."""
    done: Callable[[bool], None]
    """Called once: whether all has gone out."""


class RequestLine:
    def __init__(
        self,
        stream: Stream,
        serve: Callable[[Request], Outgoing | None],
        *,
        most_body: int,
        idle: Nanos,
        rest: Nanos,
        whole: Nanos,
        send_idle: Nanos,
    ) -> None:
        """`serve`: what answers a READ at once; None: it is handed on. Raises BadFrame. How long something may take: `idle` the next
        request (to be changed at will), `rest` the next byte of one that has begun, `whole` all of it, `send_idle` a reader that takes
        nothing."""
        self._stream = stream
        self._sock = stream.sock
        self._fd = stream.sock.fileno()
        self._serve = serve
        self._most_body = most_body
        self._rest = rest
        self._whole_s = to_seconds(whole)
        self._whole_by = 0.0
        """Loop time; of the request that has begun."""
        self._send_idle = send_idle
        self._loop = asyncio.get_running_loop()
        self._head = bytearray(HEADER_BYTES)
        self._header: Header | None = None
        """Of a READ whose body is coming."""
        self._body = bytearray()
        self._have = 0
        """Bytes of the header, or of the body behind it."""
        self.idle = idle
        self.number = 0
        """Of the next request."""
        self._outgoing: Outgoing | None = None
        self._handed_on: asyncio.Future[Request | None] | None = None
        self._reads = False
        self._writes = False
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        """Loop time by which something must have moved."""

    async def next(self) -> Request | None:
        """The next request that is not served here. None: the client said goodbye between two. Raises BadFrame, Idle, StoodStill and
        StreamCut."""
        self._handed_on = self._loop.create_future()
        self._within(self.idle)
        self._read_if(True)
        try:
            return await self._handed_on
        finally:
            self._handed_on.cancel()
            self._read_if(False)
            self._write_if(False)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._outgoing is not None:
                self._sent(whole=False)

    def _readable(self) -> None:
        try:
            while self._outgoing is None and self._handed_on is not None and not self._handed_on.done():
                into = self._head if self._header is None else self._body
                try:
                    got = self._sock.recv_into(memoryview(into)[self._have :])
                except BlockingIOError:
                    break
                except OSError as error:
                    raise StreamCut(str(error)) from error
                if not got:
                    if self._header is not None or self._have:
                        raise StreamCut("the client closed the connection amidst a request")
                    self._hand_on(None)
                    return
                if self._header is None and not self._have:
                    self._whole_by = self._loop.time() + self._whole_s
                self._have += got
                if self._have < len(into):
                    break
                self._have = 0
                self._whole()
                if self._header is None:
                    return  # the next one is not here yet: its client waits for the answer
            if self._have or self._header is not None:
                self._within(min(self._rest, self._time_left()))
        except Exception as error:
            self._fail(error)

    def _whole(self) -> None:
        """A header has come, or the body that it announced."""
        if self._header is None:
            header = Header.unpack(self._head)
            if header.number != self.number:
                raise BadFrame("replay", f"request {header.number} where {self.number} should be")
            self.number += 1
            if header.kind is not FrameKind.READ:
                self._hand_on(Request(header, bytes(self._head), b"", self._time_left()))
                return
            if not PROOF_BYTES < header.length <= self._most_body:
                raise BadFrame("bad_length", f"a request of {header.length} bytes; at most {self._most_body}")
            self._header, self._body = header, bytearray(header.length)
            return
        request = Request(self._header, bytes(self._head), bytes(self._body), self._time_left())
        self._header = None
        self._outgoing = self._serve(request)
        if self._outgoing is None:
            self._hand_on(request)
        else:
            self._send()

    def _send(self) -> None:
        try:
            outgoing = self._outgoing
            assert outgoing is not None
            if not outgoing.still():
                raise GivenUp(sum(len(part) for part in outgoing.parts))
            try:
                sent = self._sock.sendmsg(outgoing.parts[:MOST_PARTS])
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise StreamCut(str(error)) from error
            self._stream.sent_bytes += sent
            drop_front(outgoing.parts, sent)
            if not outgoing.parts:
                self._sent(whole=True)
                self._within(self.idle)
            elif sent or not self._writes:
                self._within(self._send_idle)
            self._write_if(bool(outgoing.parts))
            self._read_if(not outgoing.parts)
        except Exception as error:
            self._fail(error)

    def _sent(self, *, whole: bool) -> None:
        outgoing, self._outgoing = self._outgoing, None
        assert outgoing is not None
        outgoing.done(whole)

    # -- time

    def _within(self, time: Nanos) -> None:
        """Something must move within this. One timer stands for all: it looks again when there is time left."""
        self._until = until = self._loop.time() + to_seconds(time)
        if self._timer is None or until < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(until, self._look_at_time)

    def _time_left(self) -> Nanos:
        return seconds(max(0.0, self._whole_by - self._loop.time()))

    def _look_at_time(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look_at_time)
        elif self._outgoing is not None:
            self._fail(StoodStill(f"the reader took nothing for {to_milliseconds(self._send_idle):.0f} ms"))
        elif (self._have or self._header is not None) and self._loop.time() >= self._whole_by:
            self._fail(BadFrame("too_slow", "a request that takes too long to come"))
        elif self._have or self._header is not None:
            self._fail(StoodStill(f"nothing moved for {to_milliseconds(self._rest):.0f} ms amidst a request"))
        else:
            self._fail(Idle(f"nothing was asked for {to_milliseconds(self.idle):.0f} ms"))

    # -- the loop and the task

    def _hand_on(self, request: Request | None) -> None:
        self._read_if(False)
        assert self._handed_on is not None
        if not self._handed_on.done():
            self._handed_on.set_result(request)

    def _fail(self, error: Exception) -> None:
        self._read_if(False)
        self._write_if(False)
        assert self._handed_on is not None
        if not self._handed_on.done():
            self._handed_on.set_exception(error)

    def _read_if(self, wanted: bool) -> None:
        if wanted is not self._reads:
            self._reads = wanted
            if wanted:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.remove_reader(self._fd)

    def _write_if(self, wanted: bool) -> None:
        if wanted is not self._writes:
            self._writes = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._send)
            else:
                self._loop.remove_writer(self._fd)
