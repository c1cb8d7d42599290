"""UCX on the node's side: one worker for all, started when somebody first asks for it, and an endpoint for each connection that uses it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvstore.core.events.gets import ReadStatus
from kvstore.errors import Unavailable
from kvstore.ids import WriteToken
from kvstore.node.incoming import IncomingPayloads
from kvstore.node.payload_stream import Entry
from kvstore.transport.frames import UCX_PIECE_BYTES, BadFrame, FrameKind, Header, UcxPart, WriteItem, pieces_of
from kvstore.transport.stream import Stream, StreamCut
from kvstore.transport.ucx_worker import UcxEndpoint, UcxFailed, UcxWorker, moved, open_worker
from kvstore.units import MIB, Nanos

_STAGING_BYTES = 2 * UCX_PIECE_BYTES
"""Of one write: messages that are received at a time."""


class UcxHost:
    """The node's worker."""

    def __init__(self, *, host: str) -> None:
        """`host`: the address this node listens on. On loopback UCX does, too."""
        self._net_devices = "lo" if host in ("127.0.0.1", "::1", "localhost") else None
        self._worker: UcxWorker | None = None
        self._opening = asyncio.Lock()

    async def worker(self) -> UcxWorker:
        """Raises Unavailable."""
        async with self._opening:
            if self._worker is None:
                self._worker = await open_worker(net_devices=self._net_devices)
            return self._worker

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class UcxLink:
    """What moves over UCX for one connection."""

    GATHER_BYTES = 16 * MIB
    """Announced at a time: they lie in the arena, and cost no memory."""

    def __init__(self, stream: Stream, host: UcxHost) -> None:
        self._stream = stream
        self._host = host
        self._endpoint: UcxEndpoint | None = None
        self._address = b""

    async def address(self) -> bytes:
        return (await self._host.worker()).address

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    async def _endpoint_for(self, part: UcxPart) -> UcxEndpoint:
        """Only after the proof of the request that brought the address. Raises BadFrame."""
        if self._endpoint is None or self._address != part.address:
            self.close()
            try:
                worker = await self._host.worker()
            except Unavailable as error:
                raise BadFrame("no_ucx", str(error)) from None
            try:
                self._endpoint = worker.connect(part.address)
            except UcxFailed as error:
                raise BadFrame("bad_ucx_address", str(error)) from None
            self._address = part.address
        return self._endpoint

    async def sink(self, part: UcxPart, number: int, *, idle: Nanos) -> UcxSink:
        return UcxSink(self._stream, await self._endpoint_for(part), number, part.tags(), idle=idle)

    async def take(self, part: UcxPart, items: Sequence[WriteItem], incoming: IncomingPayloads, *, idle: Nanos) -> list[WriteToken]:
        """Every payload into its extent; those whose reservation was over by then are returned.

        They are received beside the arena and copied in: a receive that has begun cannot be taken back when the reservation ends, and its
        extent may be another block's by then. Costs one copy (0.1 s of CPU a GB); the stream needs none, as it asks before each call.
        """
        endpoint = await self._endpoint_for(part)
        coming = _pieces(items)
        tags = part.tags()
        window: deque[tuple[WriteItem, int, memoryview, asyncio.Future[None]]] = deque()
        staged = 0
        refused: dict[WriteToken, None] = {}
        upcoming = next(coming, None)
        while upcoming is not None or window:
            while upcoming is not None and (not window or staged + upcoming[2] <= _STAGING_BYTES):
                item, offset, length = upcoming
                staging = np.empty(length, np.uint8).data
                window.append((item, offset, staging, endpoint.receive(staging, next(tags))))
                staged += length
                upcoming = next(coming, None)
            item, offset, staging, transfer = window.popleft()
            await moved([transfer], stream=self._stream, idle=idle)
            staged -= len(staging)
            if not incoming.take(item.write_token, offset, staging):
                refused[item.write_token] = None
        return list(refused)


class UcxSink:
    """Payloads of one read on their way out, straight from where they lie."""

    def __init__(self, stream: Stream, endpoint: UcxEndpoint, number: int, tags: Iterator[int], *, idle: Nanos) -> None:
        self._stream = stream
        self._endpoint = endpoint
        self._number = number
        self._tags = tags
        self._idle = idle
        self._is_sending = False

    def withdraw(self) -> None:
        """What UCX has been given and not sent is taken back: its memory is another's from now on."""
        if self._is_sending:
            self._endpoint.close()

    async def send(self, first: int, group: Sequence[Entry], *, still: Callable[[], bool]) -> None:
        """Raises StreamCut, also when it was withdrawn."""
        statuses = bytes([entry if isinstance(entry, ReadStatus) else ReadStatus.OK for entry in group])
        await self._stream.send([Header(FrameKind.GROUP, self._number, len(statuses), 0, first).pack(), statuses], idle=self._idle)
        pieces = [piece for entry in group if not isinstance(entry, ReadStatus) for piece in pieces_of(entry)]
        if not still():
            raise StreamCut("the read was closed")
        self._is_sending = True
        try:
            await moved([self._endpoint.send(piece, next(self._tags)) for piece in pieces], stream=self._stream, idle=self._idle)
        finally:
            self._is_sending = False


def _pieces(items: Sequence[WriteItem]) -> Iterator[tuple[WriteItem, int, int]]:
    """(item, offset, length) of each message of a write."""
    for item in items:
        for offset in range(0, item.length, UCX_PIECE_BYTES):
            yield item, offset, min(UCX_PIECE_BYTES, item.length - offset)
