"""The store service of one node as its callers see it: types of ours in, types of ours out, a deadline on every call.

Every method raises a LarderError: the class that the node answered with, Unavailable when it did not answer, DeadlinePassed (an
Unavailable) when the deadline came first. Cancelling the caller cancels the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio
from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.core.events.gets import ReadStatus
from kvstore.core.events.puts import CommitStatus, ReserveItem, ReserveStatus
from kvstore.core.extent import MAX_PAYLOAD_BYTES, Tier
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import AS_SEALED, BlockHash, BlockRef, BootId, Epoch, KeySpace, LeaseId, NodeId, RungCode, WriteToken
from kvstore.rpc.convert import block_ref_to_proto, block_refs_to_proto, key_space_to_proto
from kvstore.rpc.errors import error_of
from kvstore.units import Bytes, Nanos, milliseconds, to_milliseconds, to_seconds

Status = TypeVar("Status", bound=IntEnum)

_LAST_PORT = 65535


class DeadlinePassed(Unavailable):
    """The peer did not answer in time: it may be frozen, overloaded or behind a black hole. Use another one."""


@dataclass(frozen=True, slots=True)
class Greeting:
    node_id: NodeId
    boot_id: BootId
    epoch: Epoch
    state: str
    data_port: int
    """0: no TCP door."""
    local_door: str
    """Name of an abstract Unix socket; empty: none."""
    machine: str
    ucx: bool
    """The TCP door speaks of transfers by UCX too."""


class Grant(NamedTuple):
    status: ReserveStatus
    write_token: WriteToken
    arena_offset: int
    ticket: bytes
    """Of the data plane; empty: the node has none."""
    ttl: Nanos
    """Of the reservation, from some time after the call was sent."""


class FoundCopy(NamedTuple):
    payload_bytes: Bytes
    checksum: int
    tier: Tier
    arena_offset: int | None
    """In the node's host arena, as long as the lease lasts; None: not there."""
    rung: RungCode = AS_SEALED


@dataclass(frozen=True, slots=True)
class Acquired:
    lease_id: LeaseId
    ttl: Nanos
    copies: tuple[FoundCopy | None, ...]
    """In the order asked; None: not there."""
    ticket: bytes
    """For reads through the data plane; empty: the node has none."""


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    write_token: WriteToken
    offset: Bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    item: int
    status: ReadStatus
    offset: Bytes
    data: bytes
    last: bool


class StoreStub:
    """Calls on one channel. Cheap to make."""

    def __init__(self, channel: Any) -> None:
        self._stub = store_pb2_grpc.StoreServiceStub(channel)

    async def hello(self, *, timeout: Nanos) -> Greeting:
        answer = await _answer(self._stub.Hello(store_pb2.HelloRequest(), timeout=to_seconds(timeout)))
        if answer.data_port > _LAST_PORT:
            raise Unavailable(f"the node says that its data port is {answer.data_port}: not a peer of this version")
        return Greeting(
            NodeId(answer.node_id),
            BootId(answer.boot_id),
            Epoch(answer.epoch),
            answer.state,
            answer.data_port,
            answer.local_door,
            answer.machine,
            answer.ucx,
        )

    async def reserve(
        self,
        key_space: KeySpace,
        items: Sequence[ReserveItem | tuple[BlockRef, Bytes]],
        *,
        timeout: Nanos,
        spare_room_only: bool = False,
    ) -> list[Grant]:
        """One grant per item, in order. `spare_room_only`: refused rather than evict a block for it."""
        request = store_pb2.ReserveRequest(
            key_space=key_space_to_proto(key_space),
            items=[_reserve_item(ReserveItem(*item)) for item in items],
            spare_room_only=spare_room_only,
        )
        answer = await _answer(self._stub.Reserve(request, timeout=to_seconds(timeout)))
        _same_length(answer.grants, items)
        ttl = milliseconds(answer.reservation_ttl_ms)
        return [
            Grant(_status(ReserveStatus, grant.status), WriteToken(grant.write_token), grant.arena_offset, grant.ticket, ttl)
            for grant in answer.grants
        ]

    async def write_payloads(self, chunks: Iterable[WrittenChunk], *, timeout: Nanos) -> frozenset[WriteToken]:
        """Send the chunks in one stream, at the pace the node takes them. Returns the write tokens it refused."""
        messages = (store_pb2.WriteChunk(write_token=chunk.write_token, offset_bytes=chunk.offset, data=chunk.data) for chunk in chunks)
        answer = await _answer(self._stub.WritePayloads(messages, timeout=to_seconds(timeout)))
        return frozenset(WriteToken(token) for token in answer.refused_write_tokens)

    async def commit(self, items: Sequence[tuple[WriteToken, int]], *, timeout: Nanos) -> list[CommitStatus]:
        """`items` are (write token, checksum); one status per item, in order."""
        request = store_pb2.CommitRequest(
            items=[store_pb2.CommitItem(write_token=token, checksum_xxh3=checksum) for token, checksum in items]
        )
        answer = await _answer(self._stub.Commit(request, timeout=to_seconds(timeout)))
        _same_length(answer.statuses, items)
        return [_status(CommitStatus, status) for status in answer.statuses]

    async def probe_prefix(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, timeout: Nanos) -> list[bool]:
        request = store_pb2.ProbePrefixRequest(key_space=key_space_to_proto(key_space), blocks=block_refs_to_proto(blocks))
        answer = await _answer(self._stub.ProbePrefix(request, timeout=to_seconds(timeout)))
        _same_length(answer.present, blocks)
        return list(answer.present)

    async def acquire_prefix(
        self, key_space: KeySpace, blocks: Sequence[BlockRef], *, ttl: Nanos | None, timeout: Nanos, as_sealed: bool = False
    ) -> Acquired:
        """Lease the copies found. `ttl` None: the node's default. `as_sealed`: a block that the node has re-coded alone is missing."""
        request = store_pb2.AcquirePrefixRequest(
            key_space=key_space_to_proto(key_space),
            blocks=block_refs_to_proto(blocks),
            lease_ttl_ms=_ttl_ms(ttl),
            as_sealed=as_sealed,
        )
        answer = await _answer(self._stub.AcquirePrefix(request, timeout=to_seconds(timeout)))
        _same_length(answer.blocks, blocks)
        longest = max([block.payload_bytes for block in answer.blocks], default=0)
        if longest > MAX_PAYLOAD_BYTES:  # the reader would make room for it
            raise Unavailable(f"the node says that it has a payload of {longest} bytes: not a peer of this version")
        copies = tuple(
            FoundCopy(
                Bytes(block.payload_bytes),
                block.checksum_xxh3,
                _status(Tier, block.tier),
                block.arena_offset if block.HasField("arena_offset") else None,
                RungCode(block.rung),
            )
            if block.found
            else None
            for block in answer.blocks
        )
        return Acquired(LeaseId(answer.lease_id), milliseconds(answer.lease_ttl_ms), copies, answer.ticket)

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
        """`acquire_prefix` without a task: sent before this returns, `answered` once, maybe before it returns too. False: not possible now,
        nothing was sent."""
        return False

    def release_now(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash] = ()) -> bool:
        """`release` that nobody waits for: it goes with the next question to the node, or within milliseconds. False: not possible now."""
        return False

    async def read_payloads(
        self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash], *, timeout: Nanos
    ) -> AsyncGenerator[ReceivedChunk, None]:
        """Chunks as they arrive. Closing the iterator cancels the stream."""
        request = store_pb2.ReadRequest(lease_id=lease_id, key_space=key_space_to_proto(key_space), hashes=hashes)
        call = self._stub.ReadPayloads(request, timeout=to_seconds(timeout))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                status = _status(ReadStatus, message.status)
                yield ReceivedChunk(message.item, status, Bytes(message.offset_bytes), message.data, message.last)
        except grpc.RpcError as error:
            raise _error(error) from None
        except asyncio.CancelledError:
            _reraise_if_asked_for()
            raise Unavailable("the channel was closed under the call") from None
        finally:
            call.cancel()

    async def renew(self, lease_id: LeaseId, *, ttl: Nanos | None, timeout: Nanos) -> tuple[Nanos, bytes]:
        """The lease's new time to live, and its new ticket. Raises LeaseExpired when it is gone."""
        request = store_pb2.RenewRequest(lease_id=lease_id, lease_ttl_ms=_ttl_ms(ttl))
        answer = await _answer(self._stub.Renew(request, timeout=to_seconds(timeout)))
        return milliseconds(answer.lease_ttl_ms), answer.ticket

    async def release(
        self,
        lease_id: LeaseId,
        key_space: KeySpace,
        *,
        hashes: Sequence[BlockHash] = (),
        corrupt_hashes: Sequence[BlockHash] = (),
        timeout: Nanos,
    ) -> None:
        """End the lease on `hashes` (none: on all). `corrupt_hashes` failed the reader's own check."""
        request = store_pb2.ReleaseRequest(
            lease_id=lease_id, key_space=key_space_to_proto(key_space), hashes=hashes, corrupt_hashes=corrupt_hashes
        )
        await _answer(self._stub.Release(request, timeout=to_seconds(timeout)))

    async def delete(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, timeout: Nanos) -> list[bool]:
        request = store_pb2.DeleteRequest(key_space=key_space_to_proto(key_space), blocks=block_refs_to_proto(blocks))
        answer = await _answer(self._stub.Delete(request, timeout=to_seconds(timeout)))
        _same_length(answer.deleted, blocks)
        return list(answer.deleted)


async def _answer(call: Any) -> Any:
    try:
        return await call
    except grpc.RpcError as error:
        raise _error(error) from None
    except asyncio.CancelledError:
        _reraise_if_asked_for()
        raise Unavailable("the channel was closed under the call") from None


def _reraise_if_asked_for() -> None:
    """Inside `except CancelledError`. grpc.aio raises it too when a channel is closed under a call, though nobody cancelled the task."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise


def _error(error: grpc.RpcError) -> LarderError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(error.details())
    return error_of(error)


def _same_length(answers: Sequence[object], asked: Sequence[object]) -> None:
    if len(answers) != len(asked):
        raise Unavailable(f"the node answered {len(answers)} items to {len(asked)} asked: not a peer of this version")


def _status(kind: type[Status], number: int) -> Status:
    try:
        return kind(number)
    except ValueError:
        raise Unavailable(f"the node answered with the unknown {kind.__name__} {number}: not a peer of this version") from None


def _reserve_item(item: ReserveItem) -> store_pb2.ReserveItem:
    ttl_ms = None if item.ttl is None else -(-item.ttl // milliseconds(1))
    return store_pb2.ReserveItem(block=block_ref_to_proto(item.block), payload_bytes=item.payload_bytes, ttl_ms=ttl_ms, rung=item.rung)


def _ttl_ms(ttl: Nanos | None) -> int:
    return 0 if ttl is None else max(1, round(to_milliseconds(ttl)))
