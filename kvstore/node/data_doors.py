"""The doors of the data plane: a TCP port and, for processes of the same user on the same machine, an abstract Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from kvstore.ids import BootId
from kvstore.node.config import NodeConfig, ShmAccess
from kvstore.node.data_connection import DataConnection, DoorKind
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.node.ucx_link import UcxHost
from kvstore.process import listening_socket
from kvstore.tiers.host import HostArena
from kvstore.transport.stream import Stream
from kvstore.transport.ticket import TicketOffice
from kvstore.transport.ucx_worker import ucx_obstacle

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
"""At each door. More are closed at once: a herd waits in its own backoff, not in this node's memory."""
_PEER_CREDENTIALS = struct.Struct("3i")


class DataDoors:
    """Belongs to the node's event loop. An abstract socket has no file: the kernel drops it with the process, however that ends."""

    def __init__(
        self, node: Node, *, config: NodeConfig, boot_id: BootId, arena: HostArena, tickets: TicketOffice, metrics: NodeMetrics
    ) -> None:
        self._node = node
        self._config = config
        self._boot_id = boot_id
        self._arena = arena
        self._tickets = tickets
        self._metrics = metrics
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: Counter[str] = Counter()
        """Open now, by kind of door."""
        self.port = 0
        """0: no TCP door."""
        self._ucx: UcxHost | None = None
        self.local_door = ""
        """Empty: no door for this machine."""

    def start(self) -> None:
        """Raises ConfigError when the port is in use."""
        if self._config.tcp:
            listener = listening_socket(self._config.host, self._config.data_port, key="data_port")
            self.port = listener.getsockname()[1]
            if self._config.ucx and ucx_obstacle() is None:
                self._ucx = UcxHost(host=self._config.host)
            self._listen(listener, DoorKind.TCP)
        if self._config.shm is not ShmAccess.OFF and hasattr(socket, "AF_UNIX"):
            name = f"larder-{self._boot_id.hex()}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind("\0" + name)
                listener.listen(64)
            except OSError as error:
                listener.close()
                logger.warning("no shared memory for this machine's processes: %s", error)
            else:
                self.local_door = name
                self._listen(listener, DoorKind.LOCAL)

    @property
    def offers_ucx(self) -> bool:
        return self._ucx is not None

    async def stop(self) -> None:
        """Closes the doors and every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        if self._ucx is not None:
            self._ucx.close()

    def _listen(self, listener: socket.socket, door: DoorKind) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._spawn(self._accept(listener, door))

    async def _accept(self, listener: socket.socket, door: DoorKind) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("data plane: cannot accept: %s", error)  # no descriptors left: they come back
                await asyncio.sleep(0.1)
                continue
            if self.connections[door] >= MOST_CONNECTIONS:
                self._refuse(sock, door, "too_many")
            elif door is DoorKind.LOCAL and not _same_user(sock):
                self._refuse(sock, door, "foreign_user")
            else:
                self._spawn(self._serve(sock, door))

    def _refuse(self, sock: socket.socket, door: DoorKind, reason: str) -> None:
        self._metrics.data_refused.labels(door, reason).inc()
        sock.close()

    async def _serve(self, sock: socket.socket, door: DoorKind) -> None:
        with contextlib.closing(Stream(sock)) as stream:
            self._count(door, 1)
            try:
                connection = DataConnection(
                    stream,
                    door,
                    self._node,
                    config=self._config,
                    boot_id=self._boot_id,
                    arena=self._arena,
                    tickets=self._tickets,
                    metrics=self._metrics,
                    ucx=self._ucx if door is DoorKind.TCP else None,
                )
                await connection.serve()
            finally:
                self._count(door, -1)

    def _count(self, door: DoorKind, change: int) -> None:
        self.connections[door] += change
        self._metrics.data_connections.labels(door).set(self.connections[door])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.crash(error)


def _same_user(sock: socket.socket) -> bool:
    """The kernel's word on who connected, not the peer's."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
    return int(user) == os.getuid()
