"""The control messages at the doors of the data plane: the same questions to the core as those of the gRPC service."""

from __future__ import annotations

from kvstore.core.events import (
    AcquireRequested,
    AnswerAcquire,
    AnswerCommit,
    AnswerRelease,
    AnswerReserve,
    CommitItem,
    CommitRequested,
    ReleaseRequested,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.expiry import MAX_TTL
from kvstore.node.config import NodeConfig
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.transport.control_frames import (
    AcquireBody,
    AcquiredBody,
    AcquiredCopy,
    PackedGrant,
    ReleaseBody,
    ReserveBody,
    pack_grants,
    unpack_commit,
)
from kvstore.transport.frames import BadFrame, FrameKind
from kvstore.transport.ticket import TicketOffice
from kvstore.units import Nanos


class StreamControl:
    def __init__(self, node: Node, *, config: NodeConfig, metrics: NodeMetrics, tickets: TicketOffice) -> None:
        self._node = node
        self._config = config
        self._metrics = metrics
        self._tickets = tickets

    async def answer(self, kind: FrameKind, body: bytes) -> bytes | None:
        """None: nothing is sent back. Raises BadFrame."""
        match kind:
            case FrameKind.ACQUIRE:
                return await self._acquire(AcquireBody.unpack(body))
            case FrameKind.RELEASE:
                request = ReleaseBody.unpack(body)
                release = ReleaseRequested(
                    request_id=self._node.next_request_id(), lease_id=request.lease_id, key_space=request.key_space, hashes=request.hashes
                )
                await self._node.ask(release, AnswerRelease)
                return None
            case FrameKind.RESERVE:
                return await self._reserve(ReserveBody.unpack(body))
            case FrameKind.COMMIT:
                return await self._commit(body)
            case _:
                raise BadFrame("garbage", f"{kind.name} is no request")

    async def _acquire(self, request: AcquireBody) -> bytes:
        acquire = AcquireRequested(
            request_id=self._node.next_request_id(),
            key_space=request.key_space,
            blocks=request.blocks,
            ttl=request.ttl,
            as_sealed=request.as_sealed,
        )
        answer = await self._node.ask(acquire, AnswerAcquire)
        ticket = b""
        if answer.lease_id:
            ticket = self._tickets.for_lease(answer.lease_id, expires_at=Nanos(self._node.now() + answer.ttl)).to_bytes()
        copies = tuple(
            [
                block
                and AcquiredCopy(block.payload_bytes, block.checksum, block.tier, block.extent.offset if block.extent else None, block.rung)
                for block in answer.blocks
            ]
        )
        return AcquiredBody(answer.lease_id, answer.ttl, ticket, copies).pack()

    async def _reserve(self, request: ReserveBody) -> bytes:
        if not all(0 < item.payload_bytes <= self._config.arena_capacity for item in request.items):
            raise BadFrame("bad_length", f"a payload must have 1 to {self._config.arena_capacity} bytes")
        expires_at = Nanos(self._node.now() + self._config.reservation_ttl)
        if any(item.ttl is not None and item.ttl > MAX_TTL for item in request.items):
            raise BadFrame("bad_length", "a block lives ten years at most")
        reserve = ReserveRequested(request_id=self._node.next_request_id(), key_space=request.key_space, items=request.items)
        grants: list[PackedGrant] = []
        for grant in (await self._node.ask(reserve, AnswerReserve)).grants:
            if grant.extent is None:
                self._metrics.put_refused(grant.status)
                grants.append(PackedGrant(grant.status, grant.write_token, 0, b""))
                continue
            assert grant.status is ReserveStatus.GRANTED
            ticket = self._tickets.for_write(grant.write_token, length=grant.extent.length, expires_at=expires_at)
            grants.append(PackedGrant(grant.status, grant.write_token, grant.extent.offset, ticket.to_bytes()))
        return pack_grants(grants, ttl=self._config.reservation_ttl)

    async def _commit(self, body: bytes) -> bytes:
        incoming = self._node.incoming
        items = []
        for token, checksum in unpack_commit(body):
            items.append(CommitItem(token, checksum, incoming.received_bytes(token)))
            incoming.close(token)
        started = self._node.now()
        answer = await self._node.ask(CommitRequested(request_id=self._node.next_request_id(), items=tuple(items)), AnswerCommit)
        self._metrics.committed(answer.statuses, took=Nanos(self._node.now() - started))
        return bytes(answer.statuses)
