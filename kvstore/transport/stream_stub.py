"""The store service of a node whose payloads go over streams: what every put and get asks goes there too, all else through gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.core.events.puts import CommitStatus, ReserveItem
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LeaseId, WriteToken
from kvstore.rpc.store_stub import Acquired, Grant, StoreStub
from kvstore.transport.control_frames import (
    AcquireBody,
    ReleaseBody,
    ReserveBody,
    pack_commit,
    unpack_acquired,
    unpack_committed,
    unpack_grants,
)
from kvstore.transport.control_line import ControlLine
from kvstore.transport.frames import BadFrame, FrameKind
from kvstore.transport.stream_pool import DoorClosed, StreamPool
from kvstore.units import Bytes, Nanos


class StreamStub(StoreStub):
    """When the door is closed, gRPC is asked."""

    def __init__(self, channel: Any, pool: StreamPool, *, places: bool = False) -> None:
        """`places`: the payloads of its commits were put into the node's mapped arena, and not sent."""
        super().__init__(channel)
        self._pool = pool
        self._commit_kind = FrameKind.PLACED if places else FrameKind.COMMIT
        self._line: ControlLine | None = None
        self._dialing = asyncio.Lock()

    def acquire_now(
        self,
        key_space: KeySpace,
        blocks: Sequence[BlockRef],
        *,
        ttl: Nanos | None,
        timeout: Nanos,
        answered: Callable[[Acquired | LarderError], None],
        as_sealed: bool = False,
    ) -> bool:
        line = self._line
        if line is None or not line.usable:
            return False

        def unpack(body: bytes | LarderError) -> None:
            answered(body if isinstance(body, LarderError) else _acquired(body, blocks))

        line.ask(FrameKind.ACQUIRE, AcquireBody(key_space, ttl, tuple(blocks), as_sealed).pack(), timeout=timeout, answered=unpack)
        return True

    def release_now(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash] = ()) -> bool:
        if self._line is None or not self._line.usable:
            return False
        self._line.post(FrameKind.RELEASE, ReleaseBody(lease_id, key_space, tuple(hashes)).pack())
        return True

    async def acquire_prefix(
        self, key_space: KeySpace, blocks: Sequence[BlockRef], *, ttl: Nanos | None, timeout: Nanos, as_sealed: bool = False
    ) -> Acquired:
        try:
            body = await self._ask(FrameKind.ACQUIRE, AcquireBody(key_space, ttl, tuple(blocks), as_sealed).pack(), timeout)
        except DoorClosed:
            return await super().acquire_prefix(key_space, blocks, ttl=ttl, timeout=timeout, as_sealed=as_sealed)
        acquired = _acquired(body, blocks)
        if isinstance(acquired, LarderError):
            raise acquired
        return acquired

    async def release(
        self,
        lease_id: LeaseId,
        key_space: KeySpace,
        *,
        hashes: Sequence[BlockHash] = (),
        corrupt_hashes: Sequence[BlockHash] = (),
        timeout: Nanos,
    ) -> None:
        if corrupt_hashes or not self.release_now(lease_id, key_space, hashes):
            await super().release(lease_id, key_space, hashes=hashes, corrupt_hashes=corrupt_hashes, timeout=timeout)

    async def reserve(
        self,
        key_space: KeySpace,
        items: Sequence[ReserveItem | tuple[BlockRef, Bytes]],
        *,
        timeout: Nanos,
        spare_room_only: bool = False,
    ) -> list[Grant]:
        if spare_room_only:  # between nodes, and rare
            return await super().reserve(key_space, items, timeout=timeout, spare_room_only=True)
        asked = ReserveBody(key_space, tuple([ReserveItem(*item) for item in items]))
        try:
            body = await self._ask(FrameKind.RESERVE, asked.pack(), timeout)
        except DoorClosed:
            return await super().reserve(key_space, items, timeout=timeout)
        return _whole(lambda: unpack_grants(body), items)

    async def commit(self, items: Sequence[tuple[WriteToken, int]], *, timeout: Nanos) -> list[CommitStatus]:
        try:
            body = await self._ask(self._commit_kind, pack_commit(items), timeout)
        except DoorClosed:
            return await super().commit(items, timeout=timeout)
        return _whole(lambda: unpack_committed(body), items)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    async def _ask(self, kind: FrameKind, body: bytes, timeout: Nanos) -> bytes:
        """The body of the answer. Raises DoorClosed without having sent anything, DeadlinePassed, Unavailable."""
        line = self._line if self._line is not None and self._line.usable else await self._dial(timeout)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def settle(found: bytes | LarderError) -> None:
            if answer.done():
                return
            if isinstance(found, LarderError):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        line.ask(kind, body, timeout=timeout, answered=settle)
        return await answer

    async def _dial(self, timeout: Nanos) -> ControlLine:
        async with self._dialing:
            if self._line is None or not self._line.usable:
                connection = await self._pool.take(timeout=timeout)
                if self._line is not None:
                    self._line.retire()
                self._line = ControlLine(connection)
            return self._line


def _acquired(body: bytes, blocks: Sequence[BlockRef]) -> Acquired | LarderError:
    try:
        acquired = unpack_acquired(body)
        _same_length(acquired.copies, blocks)
    except (BadFrame, Unavailable) as error:
        return Unavailable(f"not a peer of this version: {error}")
    return acquired


def _whole(unpack: Callable[[], list[Any]], asked: Sequence[object]) -> list[Any]:
    try:
        answers = unpack()
    except BadFrame as error:
        raise Unavailable(f"not a peer of this version: {error}") from None
    _same_length(answers, asked)
    return answers


def _same_length(answers: Sequence[object], asked: Sequence[object]) -> None:
    if len(answers) != len(asked):
        raise Unavailable(f"the node answered {len(answers)} items to {len(asked)} asked: not a peer of this version")
