"""Connections of the data plane to one door of one node, greeted and ready, used one transfer at a time."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from kvstore.errors import StaleView, Unavailable
from kvstore.ids import BOOT_ID_BYTES, BootId
from kvstore.rpc.store_stub import DeadlinePassed
from kvstore.transport.frames import HEADER_BYTES, BadFrame, FrameKind, Header
from kvstore.transport.stream import Stream, StreamCut
from kvstore.transport.ticket import NONCE_BYTES
from kvstore.units import Nanos, to_milliseconds, to_seconds

MOST_IDLE = 4
"""Connections kept to a door: a client has few transfers from one node at a time. More are opened when needed and closed after use."""
MOST_IDLE_S = 30.0
"""An older one is not used again: the node closes it after twice that, and the two must not meet."""
MOST_OPEN = 16
"""Beyond it a transfer waits for another to end."""

MOST_REQUESTS = 1 << 31
"""Of a connection: a header counts them in 32 bits. A busy control line comes to it within days."""

Door = tuple[str, int] | str
"""(host, port), or the name of an abstract Unix socket."""


class DoorClosed(Unavailable):
    """Nobody listens there, or it cannot be reached."""


class Companion(Protocol):
    def close(self) -> None: ...


class Connection:
    """A stream after its greeting. `number` counts the requests on it."""

    def __init__(self, stream: Stream, nonce: bytes) -> None:
        self.stream = stream
        self.nonce = nonce
        self.number = 0
        self.companion: Companion | None = None
        """What lives and ends with it."""

    def close(self) -> None:
        self.stream.close()
        if self.companion is not None:
            self.companion.close()

    @property
    def worn_out(self) -> bool:
        return self.number >= MOST_REQUESTS

    def next_number(self) -> int:
        self.number += 1
        return self.number - 1


class StreamPool:
    """Belongs to one event loop."""

    def __init__(self, door: Door, boot_id: BootId) -> None:
        self._door = door
        self._boot_id = boot_id
        self._idle: list[tuple[float, Connection]] = []
        self._turns = asyncio.Semaphore(MOST_OPEN)
        self._closed = False

    @asynccontextmanager
    async def connection(self, *, timeout: Nanos) -> AsyncIterator[Connection]:
        """One for a transfer; kept when the block ends without an error, closed otherwise. Raises DoorClosed, StaleView, DeadlinePassed."""
        async with self._turns:
            connection = self.take_now() or await self.dial(timeout=timeout)
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self.give_back(connection)

    def take_now(self) -> Connection | None:
        """One that is idle, for a transfer that begins at once. The caller gives it back, or closes it."""
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < MOST_IDLE_S and connection.stream.quiet():
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection) -> None:
        """After a transfer that went well."""
        if self._closed or connection.worn_out or len(self._idle) >= MOST_IDLE:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))

    async def take(self, *, timeout: Nanos) -> Connection:
        """One for good: the caller closes it. Raises as `connection`."""
        return self.take_now() or await self.dial(timeout=timeout)

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()

    async def dial(self, *, timeout: Nanos) -> Connection:
        """A connection of the caller's own. Raises as `connection`."""
        local = isinstance(self._door, str)
        sock = socket.socket(socket.AF_UNIX if local else _family(self._door), socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(to_seconds(timeout)):
                await asyncio.get_running_loop().sock_connect(sock, "\0" + self._door if isinstance(self._door, str) else self._door)
                stream = Stream(sock)
                nonce = await self._greeted(stream, timeout)
        except TimeoutError:
            sock.close()
            raise DeadlinePassed(f"{self._door}: no greeting within {to_milliseconds(timeout):.0f} ms") from None
        except StreamCut as cut:
            sock.close()
            raise DoorClosed(f"{self._door}: {cut}") from None
        except OSError as error:
            sock.close()
            raise DoorClosed(f"{self._door}: {errno.errorcode.get(error.errno or 0, '')} {error.strerror or error}") from None
        except BaseException:
            sock.close()
            raise
        return Connection(stream, nonce)

    async def _greeted(self, stream: Stream, timeout: Nanos) -> bytes:
        """The connection's nonce. Ports and names are used again: what answers must be the start of the node that is meant."""
        head, body = bytearray(HEADER_BYTES), bytearray(NONCE_BYTES + BOOT_ID_BYTES)
        await stream.receive([memoryview(head), memoryview(body)], idle=timeout)
        try:
            header = Header.unpack(head)
        except BadFrame as error:
            raise DoorClosed(f"{self._door}: {error}") from None
        if header.kind is not FrameKind.GREETING or header.length != len(body):
            raise DoorClosed(f"{self._door}: no greeting of this version")
        if bytes(body[NONCE_BYTES:]) != self._boot_id:
            raise StaleView(f"{self._door}: another start of the node answers; refresh the view")
        return bytes(body[:NONCE_BYTES])


def _family(door: Door) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in door[0] else socket.AF_INET
