"""A connection for control messages alone: any number of questions under way, each answered when its answer is known.

Nothing here is a task: a question is a send, an answer is a call out of the event loop's own turn. So one costs some 30 us on both sides
together beside what is asked, where a stream that is waited for costs 200 and gRPC ten times that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvstore.errors import LarderError, Unavailable
from kvstore.rpc.store_stub import DeadlinePassed
from kvstore.transport.control_frames import MAX_CONTROL_BYTES
from kvstore.transport.frame_splitter import FrameSplitter
from kvstore.transport.frames import BadFrame, FrameKind, Header
from kvstore.transport.stream_pool import MOST_IDLE_S, Connection
from kvstore.units import Nanos, to_seconds

logger = logging.getLogger(__name__)

POST_WITHIN_S = 0.002
"""What nobody waits for goes behind the next question, which costs nothing, or alone after this."""
RECEIVE_BYTES = 1 << 18
_MOST_UNSENT = 8 * MAX_CONTROL_BYTES
"""Of a node that takes nothing: beyond it nothing more is asked."""

Answered = Callable[[bytes | LarderError], None]
"""Called once: with the body of the answer, or with DeadlinePassed or Unavailable. If it raises, a bug, then once more with Unavailable."""


class ControlLine:
    """Of one client to one node. Belongs to one event loop. After a deadline that passed it takes no new questions: the connection may be
    dead without a word. It closes itself when the last one is answered or given up."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sock = connection.stream.sock
        self._loop = asyncio.get_running_loop()
        self._frames = FrameSplitter(most_bytes=MAX_CONTROL_BYTES)
        self._waiting: dict[int, tuple[float, FrameKind, Answered]] = {}
        """By number: loop time of the deadline, what was asked, whom to tell."""
        self._posts: list[tuple[FrameKind, bytes]] = []
        self._post_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._unsent = bytearray(Header(FrameKind.CONTROL, connection.next_number(), 0).pack())
        self._is_blocked = False
        self._is_stale = False
        self._used_at = time.monotonic()
        self._loop.add_reader(self._sock, self._readable)

    @property
    def closed(self) -> bool:
        return self._connection.stream.closed

    @property
    def usable(self) -> bool:
        """For a new question."""
        if self._is_stale or self.closed or self._connection.worn_out:
            return False
        return bool(self._waiting) or time.monotonic() - self._used_at < MOST_IDLE_S

    def ask(self, kind: FrameKind, body: bytes, *, timeout: Nanos, answered: Answered) -> None:
        """`answered` may be called before this returns."""
        if self.closed or len(self._unsent) > _MOST_UNSENT:
            answered(Unavailable(f"{kind.name}: the node takes nothing"))
            return
        deadline = self._loop.time() + to_seconds(timeout)
        number = self._connection.next_number()
        self._waiting[number] = (deadline, kind, answered)
        self._used_at = time.monotonic()
        if self._watch_timer is None or deadline < self._watch_timer.when():
            self._watch(deadline)
        self._send(Header(kind, number, len(body)).pack() + body + self._take_posts())

    def post(self, kind: FrameKind, body: bytes) -> None:
        """Something without an answer, that nobody waits for."""
        self._posts.append((kind, body))
        if self._post_timer is None:
            self._post_timer = self._loop.call_later(POST_WITHIN_S, self._send_posts)

    def retire(self) -> None:
        """Another takes its place: no new questions; it closes itself when the last is answered."""
        self._is_stale = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """What was posted still goes, as far as the socket takes it at once."""
        self._send_posts()
        self._end("this side closed the connection")

    # -- out

    def _take_posts(self) -> bytes:
        if self._post_timer is not None:
            self._post_timer.cancel()
            self._post_timer = None
        if not self._posts:
            return b""
        posts = b"".join([Header(kind, self._connection.next_number(), len(body)).pack() + body for kind, body in self._posts])
        self._posts.clear()
        return posts

    def _send_posts(self) -> None:
        if not self.closed:
            self._send(self._take_posts())

    def _send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            if self._is_blocked:
                return
            data = bytes(self._unsent)
            self._unsent.clear()
        try:
            sent = self._sock.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._end(str(error))
            return
        if sent < len(data):
            self._unsent += data[sent:]
            if not self._is_blocked:
                self._is_blocked = True
                self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock)
        self._is_blocked = False
        self._send(b"")

    # -- in

    def _readable(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(str(error))
            return
        if not data:
            self._end("the other side closed the connection")
            return
        try:
            for header, body in self._frames.take(data):
                if header.kind is not FrameKind.ANSWER:
                    raise BadFrame("garbage", f"{header.kind.name} where an answer should be")
                waiting = self._waiting.pop(header.number, None)
                if waiting is not None:  # else it is late, and given up
                    _tell(*waiting[1:], body)
        except BadFrame as error:
            self._end(str(error))
            return
        if self._is_stale and not self._waiting:
            self._end("a deadline had passed")

    def _watch(self, when: float) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._watch_timer = self._loop.call_at(when, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        """Runs once a deadline at most, and not once a question: most are answered long before."""
        self._watch_timer = None
        now = self._loop.time()
        late = [number for number, (deadline, _, _) in self._waiting.items() if deadline <= now]
        for number in late:
            self._is_stale = True
            _, kind, answered = self._waiting.pop(number)
            _tell(kind, answered, DeadlinePassed(f"no answer to {kind.name} in time"))
        if self._waiting:
            self._watch(min(deadline for deadline, _, _ in self._waiting.values()))
        elif self._is_stale:
            self._end("a deadline had passed")

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self._loop.remove_reader(self._sock)
        if self._is_blocked:
            self._loop.remove_writer(self._sock)
        for timer in (self._post_timer, self._watch_timer):
            if timer is not None:
                timer.cancel()
        self._connection.close()
        waiting, self._waiting = self._waiting, {}
        for _, kind, answered in waiting.values():
            _tell(kind, answered, Unavailable(f"{kind.name}: {reason}"))


def _tell(kind: FrameKind, answered: Answered, found: bytes | LarderError) -> None:
    """A bug behind one answer costs the others nothing, and who waits for it hears that it will not come."""
    try:
        answered(found)
    except Exception:
        logger.exception("a bug behind the answer to %s: this must not happen", kind.name)
        if not isinstance(found, LarderError):
            _tell(kind, answered, Unavailable(f"{kind.name}: its answer could not be taken in"))
