"""The store service: what clients call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvpb.v1 import store_pb2, store_pb2_grpc

from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerProbe,
    AnswerRelease,
    AnswerRenew,
    ProbeRequested,
    ReleaseRequested,
    RenewRequested,
)
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitItem,
    CommitRequested,
    ReservationsAbandoned,
    ReserveGrant,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.events.removals import AnswerDelete, DeleteRequested
from kvstore.core.expiry import MAX_TTL
from kvstore.core.extent import MAX_PAYLOAD_BYTES
from kvstore.errors import InvalidRequest, LeaseExpired, Unavailable
from kvstore.ids import AS_SEALED, LeaseId, RungCode, WriteToken
from kvstore.node.config import NodeConfig
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.node.payload_stream import send_payloads
from kvstore.rpc.convert import (
    MAX_CHUNK_BYTES,
    block_ref_from_proto,
    block_refs_from_proto,
    check_batch,
    hashes_from_proto,
    key_space_from_proto,
)
from kvstore.rpc.server import guarded
from kvstore.transport.ticket import TicketOffice
from kvstore.units import Nanos, milliseconds, to_milliseconds, to_seconds


class StoreServicer(store_pb2_grpc.StoreServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(
        self,
        node: Node,
        *,
        config: NodeConfig,
        metrics: NodeMetrics,
        tickets: TicketOffice,
        hello: Callable[[], store_pb2.HelloResponse],
    ) -> None:
        self._node = node
        self._tickets = tickets
        self._config = config
        self._metrics = metrics
        self._hello = hello

    @guarded
    async def Hello(self, request: store_pb2.HelloRequest, context: Any) -> store_pb2.HelloResponse:
        return self._hello()

    @guarded
    async def Reserve(self, request: store_pb2.ReserveRequest, context: Any) -> store_pb2.ReserveResponse:
        check_batch(request.items, "items")
        key_space = key_space_from_proto(request.key_space)
        items = tuple(
            ReserveItem(block_ref_from_proto(item.block), _payload_bytes(item), _block_ttl(item), _rung(item.rung))
            for item in request.items
        )
        expires_at = Nanos(self._node.now() + self._config.reservation_ttl)
        reserve = ReserveRequested(
            request_id=self._node.next_request_id(), key_space=key_space, items=items, spare_room_only=request.spare_room_only
        )
        answer = await self._node.ask(reserve, AnswerReserve)
        for grant in answer.grants:
            if grant.status is not ReserveStatus.GRANTED:
                self._metrics.put_refused(grant.status)
        return store_pb2.ReserveResponse(
            grants=[self._grant(grant, expires_at=expires_at) for grant in answer.grants],
            reservation_ttl_ms=_ttl_ms(self._config.reservation_ttl),
        )

    @guarded
    async def WritePayloads(self, chunks: AsyncIterator[store_pb2.WriteChunk], context: Any) -> store_pb2.WriteResponse:
        """A payload comes whole in one stream: what its stream leaves unfinished, however that ends, is given up at once and not after
        30 s."""
        incoming = self._node.incoming
        begun: set[WriteToken] = set()
        refused: set[WriteToken] = set()
        try:
            while (chunk := await self._next_chunk(chunks)) is not None:
                if len(chunk.data) > MAX_CHUNK_BYTES:
                    raise InvalidRequest(f"a chunk of {len(chunk.data)} bytes; at most {MAX_CHUNK_BYTES}")
                token = WriteToken(chunk.write_token)
                if token not in refused:
                    begun.add(token)
                    check_batch(begun, "write tokens")
                    if not incoming.take(token, chunk.offset_bytes, chunk.data):
                        refused.add(token)
        finally:
            self._give_up_unfinished(begun)
        return store_pb2.WriteResponse(refused_write_tokens=sorted(refused))

    @guarded
    async def Commit(self, request: store_pb2.CommitRequest, context: Any) -> store_pb2.CommitResponse:
        check_batch(request.items, "items")
        items = []
        for message in request.items:
            token = WriteToken(message.write_token)
            items.append(CommitItem(token, message.checksum_xxh3, self._node.incoming.close(token)))
        started = self._node.now()
        answer = await self._node.ask(CommitRequested(request_id=self._node.next_request_id(), items=tuple(items)), AnswerCommit)
        self._metrics.committed(answer.statuses, took=Nanos(self._node.now() - started))
        return store_pb2.CommitResponse(statuses=[int(status) for status in answer.statuses])

    @guarded
    async def ProbePrefix(self, request: store_pb2.ProbePrefixRequest, context: Any) -> store_pb2.ProbePrefixResponse:
        blocks = block_refs_from_proto(request.blocks)
        probe = ProbeRequested(
            request_id=self._node.next_request_id(),
            key_space=key_space_from_proto(request.key_space),
            hashes=tuple(block.hash for block in blocks),
        )
        return store_pb2.ProbePrefixResponse(present=(await self._node.ask(probe, AnswerProbe)).present)

    @guarded
    async def AcquirePrefix(self, request: store_pb2.AcquirePrefixRequest, context: Any) -> store_pb2.AcquirePrefixResponse:
        acquire = AcquireRequested(
            request_id=self._node.next_request_id(),
            key_space=key_space_from_proto(request.key_space),
            blocks=tuple(block_refs_from_proto(request.blocks)),
            ttl=_ttl(request.lease_ttl_ms),
            as_sealed=request.as_sealed,
        )
        answer = await self._node.ask(acquire, AnswerAcquire)
        blocks = [
            store_pb2.AcquiredBlock(
                found=True,
                payload_bytes=block.payload_bytes,
                checksum_xxh3=block.checksum,
                tier=int(block.tier),
                arena_offset=None if block.extent is None else block.extent.offset,
                rung=answer.recoded.get(number, AS_SEALED),
            )
            if block is not None
            else store_pb2.AcquiredBlock()
            for number, block in enumerate(answer.blocks)
        ]
        return store_pb2.AcquirePrefixResponse(
            lease_id=answer.lease_id,
            lease_ttl_ms=_ttl_ms(answer.ttl),
            blocks=blocks,
            ticket=self._lease_ticket(answer.lease_id, answer.ttl),
        )

    @guarded
    async def ReadPayloads(self, request: store_pb2.ReadRequest, context: Any) -> None:
        hashes = hashes_from_proto(request.hashes)
        started = self._node.now()
        read = self._node.open_read_now(LeaseId(request.lease_id), key_space_from_proto(request.key_space), hashes)
        try:
            await send_payloads(read, self._node.source, context, deadline=self._config.read_deadline)
        finally:
            read.finish()
            self._metrics.read(read, took=Nanos(self._node.now() - started))

    @guarded
    async def Renew(self, request: store_pb2.RenewRequest, context: Any) -> store_pb2.RenewResponse:
        renew = RenewRequested(request_id=self._node.next_request_id(), lease_id=LeaseId(request.lease_id), ttl=_ttl(request.lease_ttl_ms))
        answer = await self._node.ask(renew, AnswerRenew)
        if answer.ttl == 0:
            raise LeaseExpired(f"lease {request.lease_id} is gone; acquire again")
        return store_pb2.RenewResponse(lease_ttl_ms=_ttl_ms(answer.ttl), ticket=self._lease_ticket(LeaseId(request.lease_id), answer.ttl))

    @guarded
    async def Release(self, request: store_pb2.ReleaseRequest, context: Any) -> store_pb2.ReleaseResponse:
        release = ReleaseRequested(
            request_id=self._node.next_request_id(),
            lease_id=LeaseId(request.lease_id),
            key_space=key_space_from_proto(request.key_space),
            hashes=tuple(hashes_from_proto(request.hashes)),
            corrupt_hashes=tuple(hashes_from_proto(request.corrupt_hashes)),
        )
        await self._node.ask(release, AnswerRelease)
        return store_pb2.ReleaseResponse()

    @guarded
    async def Delete(self, request: store_pb2.DeleteRequest, context: Any) -> store_pb2.DeleteResponse:
        blocks = block_refs_from_proto(request.blocks)
        delete = DeleteRequested(
            request_id=self._node.next_request_id(),
            key_space=key_space_from_proto(request.key_space),
            hashes=tuple(block.hash for block in blocks),
        )
        return store_pb2.DeleteResponse(deleted=(await self._node.ask(delete, AnswerDelete)).deleted)

    def _lease_ticket(self, lease_id: LeaseId, ttl: Nanos) -> bytes:
        if not lease_id:
            return b""
        return self._tickets.for_lease(lease_id, expires_at=Nanos(self._node.now() + ttl)).to_bytes()

    def _grant(self, grant: ReserveGrant, *, expires_at: Nanos) -> store_pb2.ReserveGrant:
        if grant.extent is None:
            return store_pb2.ReserveGrant(status=int(grant.status))
        ticket = self._tickets.for_write(grant.write_token, length=grant.extent.length, expires_at=expires_at)
        return store_pb2.ReserveGrant(
            status=int(grant.status), write_token=grant.write_token, arena_offset=grant.extent.offset, ticket=ticket.to_bytes()
        )

    async def _next_chunk(self, chunks: AsyncIterator[store_pb2.WriteChunk]) -> store_pb2.WriteChunk | None:
        """None at the end. A writer that is silent for so long that its reservations are gone is cut off."""
        try:
            async with asyncio.timeout(to_seconds(self._config.reservation_ttl)):
                return await anext(chunks, None)
        except TimeoutError:
            raise Unavailable(f"no chunk for {to_seconds(self._config.reservation_ttl):.0f} s: the write tokens are gone") from None

    def _give_up_unfinished(self, tokens: set[WriteToken]) -> None:
        unfinished = tuple(token for token in tokens if self._node.incoming.is_open(token) and not self._node.incoming.is_complete(token))
        if unfinished:
            self._node.feed(ReservationsAbandoned(write_tokens=unfinished))


def _payload_bytes(item: store_pb2.ReserveItem) -> int:
    """What is only too large for this node is answered so, item by item."""
    if not 0 < item.payload_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidRequest(f"payload_bytes must be 1 to {MAX_PAYLOAD_BYTES}: {item.payload_bytes}")
    return int(item.payload_bytes)


def _block_ttl(item: store_pb2.ReserveItem) -> Nanos | None:
    if not item.HasField("ttl_ms"):
        return None
    ttl = milliseconds(item.ttl_ms)
    if ttl > MAX_TTL:
        raise InvalidRequest(f"ttl_ms must be at most {to_milliseconds(MAX_TTL):.0f} (ten years): {item.ttl_ms}")
    return ttl


def _ttl(milliseconds_asked: int) -> Nanos | None:
    return milliseconds(milliseconds_asked) if milliseconds_asked else None


def _ttl_ms(ttl: Nanos) -> int:
    """Rounded down: a client must not think that it has longer than it has. 0 only for 0."""
    return max(int(to_milliseconds(ttl)), 1) if ttl else 0


def _rung(number: int) -> RungCode:
    if number >= 1 << 16:
        raise InvalidRequest(f"rung must be below 65536: {number}")
    return RungCode(number)
