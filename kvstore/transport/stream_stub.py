"""The store service of a node whose payloads go over streams: what every put and get asks goes there too, all else through gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvstore.core.events import CommitStatus, ReserveItem, ReserveStatus
from kvstore.errors import Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LeaseId, WriteToken
from kvstore.rpc.store_stub import Acquired, DeadlinePassed, FoundCopy, Grant, StoreStub
from kvstore.transport.control_frames import (
    MAX_CONTROL_BYTES,
    AcquireBody,
    AcquiredBody,
    ReleaseBody,
    ReserveBody,
    pack_commit,
    unpack_grants,
)
from kvstore.transport.frames import HEADER_BYTES, BadFrame, FrameKind, Header
from kvstore.transport.stream import StoodStill, StreamCut
from kvstore.transport.stream_pool import DoorClosed, StreamPool
from kvstore.units import Bytes, Nanos, to_milliseconds, to_seconds


class StreamStub(StoreStub):
    """Cost of a call: about 100 us in all on both sides, where gRPC takes ten times as long. When the door is closed, gRPC is asked."""

    def __init__(self, channel: Any, pool: StreamPool) -> None:
        super().__init__(channel)
        self._pool = pool

    async def acquire_prefix(
        self, key_space: KeySpace, blocks: Sequence[BlockRef], *, ttl: Nanos | None, timeout: Nanos, as_sealed: bool = False
    ) -> Acquired:
        try:
            body = await self._ask(FrameKind.ACQUIRE, AcquireBody(key_space, ttl, tuple(blocks), as_sealed).pack(), timeout)
        except DoorClosed:
            return await super().acquire_prefix(key_space, blocks, ttl=ttl, timeout=timeout, as_sealed=as_sealed)
        answer = AcquiredBody.unpack(body)
        _same_length(answer.copies, blocks)
        copies = tuple(
            [
                copy and FoundCopy(Bytes(copy.payload_bytes), copy.checksum, copy.tier, copy.arena_offset, copy.rung)
                for copy in answer.copies
            ]
        )
        return Acquired(answer.lease_id, answer.ttl, copies, answer.ticket)

    async def release(
        self,
        lease_id: LeaseId,
        key_space: KeySpace,
        *,
        hashes: Sequence[BlockHash] = (),
        corrupt_hashes: Sequence[BlockHash] = (),
        timeout: Nanos,
    ) -> None:
        if not corrupt_hashes:
            try:
                await self._ask(FrameKind.RELEASE, ReleaseBody(lease_id, key_space, tuple(hashes)).pack(), timeout)
                return
            except DoorClosed:
                pass
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
        ttl, grants = unpack_grants(body)
        _same_length(grants, items)
        try:
            return [Grant(ReserveStatus(grant.status), grant.write_token, grant.arena_offset, grant.ticket, ttl) for grant in grants]
        except ValueError as error:
            raise Unavailable(f"not a peer of this version: {error}") from None

    async def commit(self, items: Sequence[tuple[WriteToken, int]], *, timeout: Nanos) -> list[CommitStatus]:
        try:
            answer = await self._ask(FrameKind.COMMIT, pack_commit(items), timeout)
        except DoorClosed:
            return await super().commit(items, timeout=timeout)
        _same_length(answer, items)
        try:
            return [CommitStatus(status) for status in answer]
        except ValueError as error:
            raise Unavailable(f"not a peer of this version: {error}") from None

    async def _ask(self, kind: FrameKind, body: bytes, timeout: Nanos) -> bytes:
        """The body of the answer; nothing for a RELEASE, which has none."""
        try:
            async with asyncio.timeout(to_seconds(timeout)):
                async with self._pool.connection(timeout=timeout) as connection:
                    await connection.stream.send([Header(kind, connection.next_number(), len(body)).pack(), body], idle=timeout)
                    if kind is FrameKind.RELEASE:
                        return b""
                    head = bytearray(HEADER_BYTES)
                    await connection.stream.receive([memoryview(head)], idle=timeout)
                    header = Header.unpack(head)
                    if header.kind is not FrameKind.ANSWER or header.length > MAX_CONTROL_BYTES:
                        raise BadFrame("garbage", f"{header.kind.name} of {header.length} bytes in answer to {kind.name}")
                    answer = bytearray(header.length)
                    await connection.stream.receive([memoryview(answer)], idle=timeout)
                    return bytes(answer)
        except (TimeoutError, StoodStill):
            raise DeadlinePassed(f"no answer to {kind.name} within {to_milliseconds(timeout):.0f} ms") from None
        except (StreamCut, BadFrame) as error:
            raise Unavailable(f"{kind.name}: {error}") from None


def _same_length(answers: Sequence[object], asked: Sequence[object]) -> None:
    if len(answers) != len(asked):
        raise Unavailable(f"the node answered {len(answers)} items to {len(asked)} asked: not a peer of this version")
