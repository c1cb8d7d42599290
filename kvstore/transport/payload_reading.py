"""Payloads of one read on their way in over a stream, straight into the memory given.

Works out of the event loop's own turn, as the control line does: no task and no future for a payload, or for the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.errors import Unavailable
from kvstore.rpc.store_stub import DeadlinePassed
from kvstore.transport.frames import HEADER_BYTES, BadFrame, FrameKind, Header
from kvstore.transport.grpc_transport import OUTCOME_OF
from kvstore.transport.payload_transport import Arrived, Ended, PayloadSlot, ReadOutcome
from kvstore.transport.stream import StreamCut
from kvstore.transport.stream_pool import Connection
from kvstore.units import MIB, Nanos, to_milliseconds, to_seconds

_TURN_BYTES = 4 * MIB
"""Received in one turn of the loop at most."""


class PayloadReading:
    """Of one request on one connection, which is the caller's again at the end: for the next transfer, or to be closed after an error."""

    def __init__(
        self,
        connection: Connection,
        slots: Sequence[PayloadSlot],
        request: Sequence[bytes],
        *,
        node_name: str,
        timeout: Nanos,
        idle_timeout: Nanos,
        arrived: Arrived,
        ended: Ended,
    ) -> None:
        """`request`: the frames of the connection's latest number, still to be sent. Neither `arrived` nor `ended` is called before this
        returns."""
        self._stream = connection.stream
        self._sock = connection.stream.sock
        self._fd = self._sock.fileno()  # a socket that is not registered yet costs the loop two looks at its addresses, for a message
        self._number = connection.number - 1
        self._slots = slots
        self._node_name = node_name
        self._arrived = arrived
        self._ended = ended
        self._loop = loop = asyncio.get_running_loop()
        self._item = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._have = 0
        """Bytes of the next header."""
        self._into: memoryview | None = None
        """What is left to fill of the item's slot; None: its header comes first."""
        self._over = False
        self._moved_at = loop.time()
        self._deadline = self._moved_at + to_seconds(timeout)
        self._idle_timeout = idle_timeout
        self._idle_s = to_seconds(idle_timeout)
        self._timer = loop.call_at(min(self._deadline, self._moved_at + self._idle_s), self._look_at_time)
        self._unsent = b"".join(request)
        self._writes = False
        self._paused = False
        self._reads = False
        self._read_if(True)
        self._send()

    def stop(self) -> bool:
        """Nothing is told of it any more and no slot is written to. True: it was under way, and the connection is good for nothing but to
        be closed."""
        if self._over:
            return False
        self._over = True
        self._timer.cancel()
        self._read_if(False)
        if self._writes:
            self._loop.remove_writer(self._fd)
        return True

    def pause(self) -> None:
        """Nothing is taken from the node, nor any slot touched, until `resume`; nor is the time counted as the node's."""
        self._paused = True

    def resume(self) -> None:
        """What is there already arrives before this returns, up to the next pause."""
        if self._paused and not self._over:
            self._paused = False
            self._moved_at = self._loop.time()
            self._readable()

    def _send(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the receiver will hear of it, with what the node said before
        self._unsent = self._unsent[sent:]
        if bool(self._unsent) is not self._writes:
            self._writes = not self._writes
            if self._writes:
                self._loop.add_writer(self._fd, self._send)
            else:
                self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            self._receive()
        except (StreamCut, BadFrame) as error:
            self._end(Unavailable(f"{self._node_name}: {error}"))
        except Exception as bug:
            self._end(bug)
        self._read_if(not self._over and not self._paused)

    def _read_if(self, wanted: bool) -> None:
        if wanted is not self._reads:
            self._reads = wanted
            if wanted:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.remove_reader(self._fd)

    def _receive(self) -> None:
        left = _TURN_BYTES
        while not self._over and not self._paused:
            if self._have == HEADER_BYTES:
                self._take_header()
                continue
            if left <= 0:
                return
            into = self._into
            try:
                if into is None:
                    got = self._sock.recv_into(self._head[self._have :])
                elif self._item + 1 < len(self._slots):
                    got = self._sock.recvmsg_into([into, self._head])[0]  # the next header comes along: it saves a call
                else:
                    got = self._sock.recv_into(into)
            except BlockingIOError:
                return
            except OSError as error:
                raise StreamCut(str(error)) from error
            if not got:
                raise StreamCut("the other side closed the connection")
            self._moved_at = self._loop.time()
            self._stream.received_bytes += got
            left -= got
            if into is None:
                self._have += got
            elif got < len(into):
                self._into = into[got:]
                return  # there is no more now
            else:
                self._have = got - len(into)
                self._next(ReadOutcome.OK)

    def _take_header(self) -> None:
        """A payload of another length than the slot's ends the stream: where the next one begins cannot be known."""
        header, item, number = Header.unpack(self._head), self._item, self._number
        self._have = 0
        if header.kind is not FrameKind.PAYLOAD or header.item != item or header.number != number:
            raise BadFrame("garbage", f"{header.kind.name} {header.number}:{header.item} where payload {number}:{item} should be")
        outcome = OUTCOME_OF.get(header.status, ReadOutcome.MALFORMED)
        into = self._slots[item].into
        if header.length != (len(into) if outcome is ReadOutcome.OK else 0):
            raise BadFrame("bad_length", f"a payload of {header.length} bytes where {len(into)} were expected")
        if header.length:
            self._into = into
        else:
            self._next(outcome)

    def _next(self, outcome: ReadOutcome) -> None:
        self._into = None
        self._item += 1
        self._arrived(self._item - 1, outcome)
        if self._item == len(self._slots):
            self._end(None)

    def _look_at_time(self) -> None:
        """Runs once a deadline at most, and not once a payload."""
        now = self._loop.time()
        if self._paused:
            self._timer = self._loop.call_later(self._idle_s, self._look_at_time)
        elif now >= self._deadline:
            self._end(DeadlinePassed(f"{self._node_name}: the transfer was given up"))
        elif now >= self._moved_at + self._idle_s:
            self._end(DeadlinePassed(f"{self._node_name}: nothing moved for {to_milliseconds(self._idle_timeout):.0f} ms"))
        else:
            self._timer = self._loop.call_at(min(self._deadline, self._moved_at + self._idle_s), self._look_at_time)

    def _end(self, error: Exception | None) -> None:
        if self.stop():
            self._ended(error)
