"""A non-blocking socket with whole sends and receives: scatter and gather straight from and into the memory given."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence

from kvstore.units import MIB, Nanos, milliseconds, seconds, to_milliseconds, to_seconds

Buffer = bytes | memoryview

MOST_PARTS = 512
"""Of one call; the kernel takes 1,024."""
_CALL_BYTES = MIB
"""Of one call: half a millisecond, or two into memory that was never touched."""
_TURN = milliseconds(1)
"""Without a pause: then others on the loop have their turn."""


_LONG: Nanos = seconds(24 * 3600)


class StreamCut(ConnectionError):
    """The other side is gone, or this side gave the transfer up."""


class GivenUp(StreamCut):
    """This side gave the transfer up; `missing` bytes of it had not moved."""

    def __init__(self, missing: int) -> None:
        super().__init__("the transfer was given up")
        self.missing = missing


class StoodStill(StreamCut):
    """Nothing moved for as long as allowed."""


class Stream:
    """Owns the socket. One sender and one receiver at a time. Every wait is bounded by `idle`: how long nothing may move."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._turn_began = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def close(self) -> None:
        self.sock.close()

    def quiet(self) -> bool:
        """Whether the other side sent nothing and did not close: an idle connection that can be used again."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def send(self, parts: Sequence[Buffer], *, idle: Nanos, still: Callable[[], bool] | None = None) -> None:
        """All parts, one after another. `still` is asked before every touch of them; False ends the transfer. Raises StreamCut,
        GivenUp."""
        left: list[Buffer] = [part for part in parts if len(part)]
        while left:
            if still is not None and not still():
                raise GivenUp(sum(len(part) for part in left))
            try:
                sent = self.sock.sendmsg(_first(left))
            except BlockingIOError:
                await self._wait(write=True, idle=idle)
                continue
            except OSError as error:
                raise StreamCut(str(error)) from error
            self.sent_bytes += sent
            drop_front(left, sent)
            if left:
                await self._take_turns()

    async def receive(
        self, parts: Sequence[memoryview], *, idle: Nanos, ahead: memoryview | None = None, still: Callable[[], bool] | None = None
    ) -> int:
        """Fill all parts, one after another. Raises StreamCut, also when the stream ends before.

        Into `ahead` goes what follows them, as far as it comes in the same calls; the result is how many bytes did: it saves a call for
        the header of the next payload.
        """
        left: list[memoryview] = [part for part in parts if len(part)]
        missing = sum(len(part) for part in left)
        while missing:
            if still is not None and not still():
                raise GivenUp(missing)
            try:
                if ahead is not None or len(left) > 1:
                    into = left[:MOST_PARTS] if ahead is None or len(left) > MOST_PARTS else [*left, ahead]
                    got = self.sock.recvmsg_into(into)[0]
                else:
                    got = self.sock.recv_into(left[0], min(len(left[0]), _CALL_BYTES))
            except BlockingIOError:
                await self._wait(write=False, idle=idle)
                continue
            except OSError as error:
                raise StreamCut(str(error)) from error
            if got == 0:
                raise StreamCut("the other side closed the connection")
            self.received_bytes += got
            missing -= got
            if missing > 0:
                drop_front(left, got)
            await self._take_turns()  # behind a whole payload too: many may lie there
            if missing <= 0:
                return -missing
        return 0

    async def wait_readable(self, *, idle: Nanos) -> None:
        await self._wait(write=False, idle=idle)

    async def until_end(self) -> None:
        """Returns when the other side has closed the stream, unless it has sent something before: then never."""
        try:
            await self._wait(write=False, idle=_LONG)
            if self.sock.recv(1, socket.MSG_PEEK):
                await asyncio.Event().wait()
        except (OSError, StreamCut):
            pass

    async def _take_turns(self) -> None:
        if time.monotonic_ns() - self._turn_began >= _TURN:
            await asyncio.sleep(0)
            self._turn_began = time.monotonic_ns()

    async def _wait(self, *, write: bool, idle: Nanos) -> None:
        loop, fd = self._loop, self.sock.fileno()
        if fd < 0:
            raise StreamCut("the connection was closed")
        ready: asyncio.Future[bool] = loop.create_future()
        if write:
            loop.add_writer(fd, _settle, ready, True)
        else:
            loop.add_reader(fd, _settle, ready, True)
        timer = loop.call_later(to_seconds(idle), _settle, ready, False)
        try:
            if not await ready:
                raise StoodStill(f"nothing moved for {to_milliseconds(idle):.0f} ms")
            self._turn_began = time.monotonic_ns()
        finally:
            timer.cancel()
            if write:
                loop.remove_writer(fd)
            else:
                loop.remove_reader(fd)


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _first(parts: list[Buffer]) -> list[Buffer]:
    """Of one call."""
    room, taken = _CALL_BYTES, []
    for part in parts[:MOST_PARTS]:
        taken.append(part if len(part) <= room else memoryview(part)[:room])
        room -= len(part)
        if room <= 0:
            break
    return taken


def drop_front(parts: list[Buffer] | list[memoryview], count: int) -> None:
    """Takes the first `count` bytes off."""
    whole = 0
    for part in parts:
        if count < len(part):
            break
        count -= len(part)
        whole += 1
    del parts[:whole]
    if count:
        parts[0] = memoryview(parts[0])[count:]
