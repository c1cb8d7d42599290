"""One connection of the data plane, node side: requests in, payloads out of and into the arena.

What is not a valid request of somebody with a ticket closes the connection and moves a counter; nothing is allocated for it but one bounded
body.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import aclosing
from enum import StrEnum

from kvstore.core.events.gets import ReadOutcome, ReadStatus
from kvstore.core.events.puts import ReservationsAbandoned
from kvstore.core.extent import Tier
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.errors import Unavailable
from kvstore.ids import BOOT_ID_BYTES, BootId, WriteToken
from kvstore.node.config import NodeConfig
from kvstore.node.control_line import ControlLine
from kvstore.node.metrics import NodeMetrics
from kvstore.node.node import Node
from kvstore.node.payload_stream import Entry, groups_of
from kvstore.node.request_line import Idle, Outgoing, Request, RequestLine
from kvstore.node.stream_control import StreamControl
from kvstore.node.ucx_link import UcxHost, UcxLink, UcxSink
from kvstore.tiers.host import HostArena
from kvstore.transport.frames import (
    MAX_BODY_BYTES,
    BadFrame,
    FrameKind,
    Header,
    ReadBody,
    UcxPart,
    WriteItem,
    pack_tokens,
    unpack_write_body,
)
from kvstore.transport.stream import Buffer, GivenUp, StoodStill, Stream, StreamCut
from kvstore.transport.ticket import NONCE_BYTES, PROOF_BYTES, Ticket, TicketOffice, proof_of, same_proof
from kvstore.units import MIB, Nanos, seconds

logger = logging.getLogger(__name__)

FIRST_REQUEST: Nanos = seconds(5)
"""After its greeting a connection must say something useful within this."""
NEXT_REQUEST: Nanos = seconds(60)
"""A connection that was used may be idle so long; clients give theirs up after half of it."""
LONGEST_LIFE: Nanos = seconds(7 * 24 * 3600)
"""Of a connection that brought somebody the arena, and tells it by its end that the node has ended. Then the arena is mapped anew."""
REST_OF_REQUEST: Nanos = seconds(5)
"""Between two bytes of a request, or of a short answer."""
WHOLE_REQUEST: Nanos = seconds(20)
"""From the first byte of a request to the last of its body: whoever sends one every few seconds does not keep a connection for ever."""
_GATHER_BYTES = 4 * MIB
_DRAIN_BYTES = 256 << 10


class DoorKind(StrEnum):
    TCP = "tcp"
    LOCAL = "local"


class DataConnection:
    def __init__(
        self,
        stream: Stream,
        door: DoorKind,
        node: Node,
        *,
        config: NodeConfig,
        boot_id: BootId,
        arena: HostArena,
        tickets: TicketOffice,
        metrics: NodeMetrics,
        ucx: UcxHost | None = None,
    ) -> None:
        self._stream = stream
        self._door = door
        self._node = node
        self._config = config
        self._boot_id = boot_id
        self._arena = arena
        self._tickets = tickets
        self._metrics = metrics
        may_place = door is DoorKind.LOCAL and not arena.sealed
        self._control = StreamControl(node, config=config, metrics=metrics, tickets=tickets, may_place=may_place)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._requests = RequestLine(
            stream,
            self._serve_now,
            most_body=MAX_BODY_BYTES,
            idle=FIRST_REQUEST,
            rest=REST_OF_REQUEST,
            whole=WHOLE_REQUEST,
            send_idle=config.read_deadline,
        )
        self._opened: tuple[OpenRead, Nanos] | None = None
        """What the READ that was handed on is to bring, and when it came."""
        self._ucx = None if ucx is None else UcxLink(stream, ucx)

    async def serve(self) -> None:
        """Returns when the connection is to be closed."""
        try:
            greeting = Header(FrameKind.GREETING, 0, NONCE_BYTES + BOOT_ID_BYTES).pack()
            await self._stream.send([greeting, self._nonce, self._boot_id], idle=REST_OF_REQUEST)
            while await self._request():
                pass
        except BadFrame as error:
            self._count_refused(error.reason)
        except StoodStill:
            self._count_refused("stood_still")
        except StreamCut:
            self._count_refused("cut")
        finally:
            if self._opened is not None:
                self._finish(*self._opened)
            if self._ucx is not None:
                self._ucx.close()

    async def _request(self) -> bool:
        """Serves one, after all the reads before it. False: the client said goodbye between two, or had nothing to say."""
        try:
            request = await self._requests.next()
        except Idle:
            if not self._requests.number:
                self._count_refused("half_open")
            return False
        if request is None:
            return False
        header, head = request.header, request.head
        self._requests.idle = NEXT_REQUEST
        in_time = self._within(request.time_left)
        match header.kind:
            case FrameKind.READ:
                await self._send_opened(header)
            case FrameKind.WRITE:
                await self._write(header, *await self._body(header, head, in_time))
            case FrameKind.CONTROL:
                await self._serve_control(header)
                return False
            case FrameKind.ARENA if self._door is DoorKind.LOCAL:
                await self._hand_over_arena(header)
            case FrameKind.UCX if self._ucx is not None:
                await self._say_ucx_address(header, self._ucx)
            case FrameKind.FETCH if self._ucx is not None:
                await self._fetch(header, self._ucx, *await self._body(header, head, in_time))
            case FrameKind.PUSH if self._ucx is not None:
                await self._take_push(header, self._ucx, *await self._body(header, head, in_time))
            case _:
                raise BadFrame("garbage", f"{header.kind.name} is no request at this door")
        return True

    def _within(self, time: Nanos) -> Callable[[], bool]:
        """Whether it is not over."""
        end = self._node.now() + time
        return lambda: self._node.now() < end

    async def _rest(self, parts: Sequence[memoryview], in_time: Callable[[], bool]) -> None:
        try:
            await self._stream.receive(parts, idle=REST_OF_REQUEST, still=in_time)
        except GivenUp:
            raise BadFrame("too_slow", "a request that takes too long to come") from None

    async def _body(self, header: Header, head: bytes, in_time: Callable[[], bool]) -> tuple[bytes, bytes, bytes]:
        """(what the proof is over, body, proof)."""
        if not PROOF_BYTES < header.length <= MAX_BODY_BYTES:
            raise BadFrame("bad_length", f"a request of {header.length} bytes; at most {MAX_BODY_BYTES}")
        data = bytearray(header.length)
        await self._rest([memoryview(data)], in_time)
        body = bytes(data[:-PROOF_BYTES])
        return head + body, body, bytes(data[-PROOF_BYTES:])

    def _check(self, tickets: Sequence[Ticket], message: bytes, proof: bytes) -> None:
        if not same_proof(proof, proof_of(tickets, nonce=self._nonce, message=message)):
            raise BadFrame("bad_ticket", "no ticket for what was asked")

    # -- reads

    def _serve_now(self, request: Request) -> Outgoing | None:
        """A READ of what lies in the host tier. None: some of it is elsewhere, and has to be waited for."""
        header, body = request.header, ReadBody.unpack(request.body[:-PROOF_BYTES])
        self._requests.idle = NEXT_REQUEST
        self._check_read(body, request.head + request.body[:-PROOF_BYTES], request.body[-PROOF_BYTES:])
        started = self._node.now()
        if body.ticket_expires_at <= started:
            refused = parts_of([ReadStatus.NOT_LEASED] * len(body.hashes), header.number)
            return Outgoing(refused, self._within(self._config.read_deadline), lambda whole: None)
        read = self._node.open_read_now(body.lease_id, body.key_space, body.hashes)
        entries: list[Entry] = []
        for item in read.items:
            if item.status is not ReadStatus.OK:
                entries.append(item.status)
            elif item.extent is not None and item.extent.tier is Tier.HOST:
                entries.append(self._node.source.host_view(item.extent))
            else:
                self._opened = (read, started)
                return None

        def done(whole: bool) -> None:
            if whole:
                sent = sum([len(entry) for entry in entries if not isinstance(entry, ReadStatus)])
                self._metrics.data_bytes.labels(self._door, "out").inc(sent)
                read.outcomes[:] = [ReadOutcome.UNREAD if isinstance(entry, ReadStatus) else ReadOutcome.OK for entry in entries]
            self._finish(read, started)

        # Without an operation there is nothing to keep in place: only statuses go out.
        still = (lambda: read.is_open) if read.is_open else self._within(self._config.read_deadline)
        return Outgoing(parts_of(entries, header.number), still, done)

    def _check_read(self, request: ReadBody, message: bytes, proof: bytes) -> None:
        self._check([self._tickets.for_lease(request.lease_id, expires_at=request.ticket_expires_at)], message, proof)

    async def _send_opened(self, header: Header) -> None:
        assert self._opened is not None
        (read, started), self._opened = self._opened, None
        sink = StreamSink(self._stream, header.number, idle=self._config.read_deadline)
        try:
            await self._send_payloads(read, sink, _GATHER_BYTES)
        finally:
            self._finish(read, started)

    async def _serve_read(self, request: ReadBody, sink: UcxSink, *, gather_bytes: int) -> None:
        started = self._node.now()
        if request.ticket_expires_at <= started:
            await sink.send(0, [ReadStatus.NOT_LEASED] * len(request.hashes), still=self._within(self._config.read_deadline))
            return
        read = self._node.open_read_now(request.lease_id, request.key_space, request.hashes)
        read.before_end = sink.withdraw
        try:
            await self._send_payloads(read, sink, gather_bytes)
        finally:
            self._finish(read, started)

    def _finish(self, read: OpenRead, started: Nanos) -> None:
        read.finish()
        self._metrics.read(read, took=Nanos(self._node.now() - started))

    async def _send_payloads(self, read: OpenRead, sink: StreamSink | UcxSink, gather_bytes: int) -> None:
        """In order, as many at once as there are. The reader compares the checksums; those of the SSD are compared here too, so that a bad
        copy is found where it lies."""
        # Without an operation there is nothing to keep in place: only statuses go out.
        still = (lambda: read.is_open) if read.is_open else self._within(self._config.read_deadline)
        groups = groups_of(read, self._node.source, check_host=False, gather_bytes=gather_bytes, until_end=self._stream.until_end)
        async with aclosing(groups):
            async for first, group in groups:
                await sink.send(first, group, still=still)
                self._note_sent(read, first, group)

    def _note_sent(self, read: OpenRead, first: int, group: Sequence[Entry]) -> None:
        sent = 0
        for item, entry in enumerate(group, first):
            if not isinstance(entry, ReadStatus):
                read.outcomes[item] = ReadOutcome.OK
                sent += len(entry)
        self._metrics.data_bytes.labels(self._door, "out").inc(sent)

    # -- writes

    async def _write(self, header: Header, message: bytes, body: bytes, proof: bytes) -> None:
        items = unpack_write_body(body)
        self._check_write(items, message, proof)
        refused: list[WriteToken] = []
        try:
            for item in items:
                if not await self._take(item):
                    refused.append(item.write_token)
        finally:
            self._give_up_unfinished(items)
        self._metrics.data_bytes.labels(self._door, "in").inc(sum(item.length for item in items))
        await self._say_written(header, refused)

    def _check_write(self, items: Sequence[WriteItem], message: bytes, proof: bytes) -> None:
        tickets = [self._tickets.for_write(item.write_token, length=item.length, expires_at=item.ticket_expires_at) for item in items]
        self._check(tickets, message, proof)

    async def _say_written(self, header: Header, refused: Sequence[WriteToken]) -> None:
        answer = pack_tokens(refused)
        await self._stream.send([Header(FrameKind.WRITTEN, header.number, len(answer)).pack(), answer], idle=REST_OF_REQUEST)

    async def _take(self, item: WriteItem) -> bool:
        """One payload, straight into its extent. False: its reservation is over; its bytes were read and dropped."""
        incoming, token = self._node.incoming, item.write_token
        room = incoming.room(token, item.length)
        missing = item.length
        if room is not None:
            try:
                await self._stream.receive([room], idle=self._config.reservation_ttl, still=lambda: incoming.is_open(token))
                return incoming.filled(token, item.length)
            except GivenUp as over:
                missing = over.missing
        scratch = memoryview(bytearray(min(missing, _DRAIN_BYTES)))
        in_time = self._within(self._config.reservation_ttl)
        while missing:
            part = scratch[:missing]
            await self._stream.receive([part], idle=self._config.reservation_ttl, still=in_time)
            missing -= len(part)
        return False

    def _give_up_unfinished(self, items: Sequence[WriteItem]) -> None:
        """What a connection that broke leaves unfinished is given up at once and not after 30 s."""
        incoming = self._node.incoming
        tokens = [item.write_token for item in items]
        unfinished = tuple(token for token in tokens if incoming.is_open(token) and not incoming.is_complete(token))
        if unfinished:
            self._node.feed(ReservationsAbandoned(write_tokens=unfinished))

    # -- UCX

    async def _say_ucx_address(self, header: Header, ucx: UcxLink) -> None:
        if header.length:
            raise BadFrame("bad_length", "UCX has no body")
        try:
            address = await ucx.address()
        except Unavailable as error:
            logger.warning("%s", error)
            raise BadFrame("no_ucx", str(error)) from None
        await self._stream.send([Header(FrameKind.UCX, header.number, len(address)).pack(), address], idle=REST_OF_REQUEST)

    async def _fetch(self, header: Header, ucx: UcxLink, message: bytes, body: bytes, proof: bytes) -> None:
        part, body = UcxPart.split(body)
        request = ReadBody.unpack(body)
        self._check_read(request, message, proof)
        sink = await ucx.sink(part, header.number, idle=self._config.read_deadline)
        await self._serve_read(request, sink, gather_bytes=ucx.GATHER_BYTES)

    async def _take_push(self, header: Header, ucx: UcxLink, message: bytes, body: bytes, proof: bytes) -> None:
        part, body = UcxPart.split(body)
        items = unpack_write_body(body)
        self._check_write(items, message, proof)
        try:
            refused = await ucx.take(part, items, self._node.incoming, idle=self._config.reservation_ttl)
        finally:
            self._give_up_unfinished(items)
        self._metrics.data_bytes.labels(self._door, "in").inc(sum(item.length for item in items))
        await self._say_written(header, refused)

    # -- control

    async def _serve_control(self, header: Header) -> None:
        if header.length:
            raise BadFrame("bad_length", "CONTROL has no body")
        line = ControlLine(
            self._stream, self._control, next_number=self._requests.number, idle=NEXT_REQUEST, rest_of_request=REST_OF_REQUEST
        )
        await line.serve()

    # -- the same machine

    async def _hand_over_arena(self, header: Header) -> None:
        if header.length:
            raise BadFrame("bad_length", "ARENA has no body")
        fds = self._arena.share()
        try:
            answer = Header(FrameKind.ARENA, header.number, self._arena.capacity).pack()
            if socket.send_fds(self._stream.sock, [answer], fds) != len(answer):
                raise StreamCut("the answer with the descriptors did not go out whole")
            self._requests.idle = LONGEST_LIFE
        except OSError as error:
            raise StreamCut(str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)

    def _count_refused(self, reason: str) -> None:
        self._metrics.data_refused.labels(self._door, reason).inc()


class StreamSink:
    """Payloads of one read on their way out over the connection itself, each behind its header."""

    def __init__(self, stream: Stream, number: int, *, idle: Nanos) -> None:
        self._stream = stream
        self._number = number
        self._idle = idle

    async def send(self, first: int, group: Sequence[Entry], *, still: Callable[[], bool]) -> None:
        """Raises StreamCut, GivenUp."""
        await self._stream.send(parts_of(group, self._number, first=first), idle=self._idle, still=still)


def parts_of(entries: Sequence[Entry], number: int, *, first: int = 0) -> list[Buffer]:
    """What goes out for request `number`, from its item `first` on."""
    parts: list[Buffer] = []
    for item, entry in enumerate(entries, first):
        if isinstance(entry, ReadStatus):
            parts.append(Header(FrameKind.PAYLOAD, number, 0, entry, item).pack())
        else:
            parts += (Header(FrameKind.PAYLOAD, number, len(entry), ReadStatus.OK, item).pack(), entry)
    return parts
