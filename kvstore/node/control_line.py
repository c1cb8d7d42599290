"""One connection that carries control messages alone, node side: each is handled when it has come, and answered when its answer is known.

Works out of the event loop's own turn, without a task or a future for a message; see transport/control_line.py for the other end.
"""

from __future__ import annotations

import asyncio
from functools import partial

from kvstore.node.stream_control import StreamControl
from kvstore.transport.control_frames import MAX_CONTROL_BYTES
from kvstore.transport.control_line import RECEIVE_BYTES
from kvstore.transport.frame_splitter import FrameSplitter
from kvstore.transport.frames import BadFrame, FrameKind, Header
from kvstore.transport.stream import StoodStill, Stream, StreamCut
from kvstore.units import Nanos, to_milliseconds, to_seconds

MOST_UNDER_WAY = 1024
"""Questions without an answer yet (reservations that wait for room, commits that wait for the disk). Then nothing more is read."""


class ControlLine:
    def __init__(self, stream: Stream, control: StreamControl, *, next_number: int, idle: Nanos, rest_of_request: Nanos) -> None:
        """`idle`: how long nothing may be asked; `rest_of_request`: how long a message, or the taking of an answer, may take."""
        self._sock = stream.sock
        self._control = control
        self._number = next_number
        self._idle_s = to_seconds(idle)
        self._rest_of_request = rest_of_request
        self._loop = asyncio.get_running_loop()
        self._frames = FrameSplitter(most_bytes=MAX_CONTROL_BYTES)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._under_way = 0
        self._unsent = bytearray()
        self._reads = False
        self._writes = False
        self._heard_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    async def serve(self) -> None:
        """Returns when the client has gone, or has asked nothing for long. Raises BadFrame, StoodStill, StreamCut."""
        self._heard_at = self._loop.time()
        self._idle_timer = self._loop.call_later(self._idle_s, self._look_whether_idle)
        self._keep_on()
        try:
            await self._over
        finally:
            self._over.cancel()
            self._read_if(False)
            self._write_if(False)
            for timer in (self._idle_timer, self._rest_timer):
                if timer is not None:
                    timer.cancel()

    def _readable(self) -> None:
        try:
            try:
                data = self._sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise StreamCut(str(error)) from error
            if not data:
                if self._frames.is_halfway:
                    raise StreamCut("the client closed the connection amidst a message")
                self._end(None)
                return
            self._heard_at = self._loop.time()
            for header, body in self._frames.take(data):
                self._stop_rest_timer()  # what is halfway behind it has its own time
                if header.number != self._number:
                    raise BadFrame("replay", f"request {header.number} where {self._number} should be")
                self._number += 1
                self._under_way += header.kind is not FrameKind.RELEASE
                self._control.handle(header.kind, body, partial(self._answer, header.number))
            self._keep_on()
        except Exception as error:
            self._end(error)

    def _answer(self, number: int, body: bytes) -> None:
        """Called by the node whenever it knows it; of a client that has gone it is dropped."""
        if self._over.done():
            return
        self._under_way -= 1
        self._unsent += Header(FrameKind.ANSWER, number, len(body)).pack()
        self._unsent += body
        if not self._writes:
            self._send()
        if not self._reads:
            self._keep_on()

    def _writable(self) -> None:
        self._send()
        self._keep_on()

    def _send(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._end(StreamCut(str(error)))
            return
        del self._unsent[:sent]
        if sent and self._unsent:
            self._stop_rest_timer()  # it is slow, and moves
        if self._unsent or self._writes:
            self._keep_on()

    def _keep_on(self) -> None:
        """Waits for what can come next, and bounds the waiting."""
        if self._over.done():
            return
        self._write_if(bool(self._unsent))
        self._read_if(not self._unsent and self._under_way < MOST_UNDER_WAY)
        if self._unsent or self._frames.is_halfway:
            if self._rest_timer is None:
                self._rest_timer = self._loop.call_later(to_seconds(self._rest_of_request), self._stood_still)
        else:
            self._stop_rest_timer()

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stood_still(self) -> None:
        self._end(StoodStill(f"nothing moved for {to_milliseconds(self._rest_of_request):.0f} ms"))

    def _look_whether_idle(self) -> None:
        left = self._heard_at + self._idle_s - self._loop.time()
        if left <= 0 and not self._under_way:
            self._end(None)
        else:
            self._idle_timer = self._loop.call_later(max(left, 1.0), self._look_whether_idle)

    def _read_if(self, wanted: bool) -> None:
        if wanted is not self._reads:
            self._reads = wanted
            if wanted:
                self._loop.add_reader(self._sock, self._readable)
            else:
                self._loop.remove_reader(self._sock)

    def _write_if(self, wanted: bool) -> None:
        if wanted is not self._writes:
            self._writes = wanted
            if wanted:
                self._loop.add_writer(self._sock, self._writable)
            else:
                self._loop.remove_writer(self._sock)

    def _end(self, error: Exception | None) -> None:
        """A bug among the errors reaches whoever serves this connection, and ends the node."""
        self._read_if(False)
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
