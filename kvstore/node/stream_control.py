"""The control messages at the doors of the data plane: the same questions to the core as those of the gRPC service."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events.gets import AcquireRequested, AnswerAcquire, ReleaseRequested
from kvstore.core.events.puts import AnswerCommit, AnswerReserve, CommitItem, CommitRequested, ReserveRequested
from kvstore.core.expiry import MAX_TTL
from kvstore.core.extent import MAX_PAYLOAD_BYTES
from kvstore.node.config import NodeConfig
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.transport.control_frames import (
    AcquireBody,
    ReleaseBody,
    ReserveBody,
    pack_acquired,
    pack_committed,
    pack_grants,
    unpack_commit,
)
from kvstore.transport.frames import BadFrame, FrameKind
from kvstore.transport.ticket import TicketOffice
from kvstore.units import Nanos

Reply = Callable[[bytes], None]


class StreamControl:
    def __init__(self, node: Node, *, config: NodeConfig, metrics: NodeMetrics, tickets: TicketOffice, may_place: bool) -> None:
        """`may_place`: who speaks here writes into the arena itself."""
        self._node = node
        self._config = config
        self._metrics = metrics
        self._tickets = tickets
        self._may_place = may_place

    def handle(self, kind: FrameKind, body: bytes, reply: Reply) -> None:
        """`reply` is called once with the body of the answer, at once or later; not for RELEASE. Raises BadFrame."""
        match kind:
            case FrameKind.ACQUIRE:
                self._acquire(AcquireBody.unpack(body), reply)
            case FrameKind.RELEASE:
                lease_id, key_space, hashes = ReleaseBody.unpack(body)
                self._node.feed(
                    ReleaseRequested(request_id=self._node.next_request_id(), lease_id=lease_id, key_space=key_space, hashes=hashes)
                )
            case FrameKind.RESERVE:
                self._reserve(ReserveBody.unpack(body), reply)
            case FrameKind.COMMIT:
                self._commit(body, reply)
            case FrameKind.PLACED if self._may_place:
                for token, _ in unpack_commit(body):
                    self._node.incoming.placed(token)
                self._commit(body, reply)
            case _:
                raise BadFrame("garbage", f"{kind.name} is no control message at this door")

    def _acquire(self, request: AcquireBody, reply: Reply) -> None:
        def answered(answer: AnswerAcquire) -> None:
            ticket = b""
            if answer.lease_id:
                ticket = self._tickets.for_lease(answer.lease_id, expires_at=Nanos(self._node.now() + answer.ttl)).to_bytes()
            reply(pack_acquired(answer.lease_id, answer.ttl, ticket, answer.blocks, answer.recoded))

        acquire = AcquireRequested(
            request_id=self._node.next_request_id(),
            key_space=request.key_space,
            blocks=request.blocks,
            ttl=request.ttl,
            as_sealed=request.as_sealed,
        )
        self._node.ask_now(acquire, AnswerAcquire, answered)

    def _reserve(self, request: ReserveBody, reply: Reply) -> None:
        if not all([0 < item.payload_bytes <= MAX_PAYLOAD_BYTES for item in request.items]):
            raise BadFrame("bad_length", f"a payload must have 1 to {MAX_PAYLOAD_BYTES} bytes")
        if any([item.ttl is not None and item.ttl > MAX_TTL for item in request.items]):
            raise BadFrame("bad_length", "a block lives ten years at most")
        expires_at = Nanos(self._node.now() + self._config.reservation_ttl)

        def answered(answer: AnswerReserve) -> None:
            tickets = []
            for status, token, extent in answer.grants:
                if extent is None:
                    self._metrics.put_refused(status)
                if not self._may_place:
                    ticket = extent and self._tickets.for_write(token, length=extent.length, expires_at=expires_at)
                    tickets.append(ticket.to_bytes() if ticket else b"")
            reply(pack_grants(answer.grants, ttl=self._config.reservation_ttl, tickets=tickets))

        reserve = ReserveRequested(request_id=self._node.next_request_id(), key_space=request.key_space, items=request.items)
        self._node.ask_now(reserve, AnswerReserve, answered)

    def _commit(self, body: bytes, reply: Reply) -> None:
        incoming = self._node.incoming
        items = tuple([CommitItem(token, checksum, incoming.close(token)) for token, checksum in unpack_commit(body)])
        started = self._node.now()

        def answered(answer: AnswerCommit) -> None:
            self._metrics.committed(answer.statuses, took=Nanos(self._node.now() - started))
            reply(pack_committed(answer.statuses))

        self._node.ask_now(CommitRequested(request_id=self._node.next_request_id(), items=items), AnswerCommit, answered)
