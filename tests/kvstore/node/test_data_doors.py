"""The doors of the data plane against those who have no business there."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from kvstore.core.events.gets import ReadStatus
from kvstore.node import data_connection
from kvstore.node.config import ShmAccess
from kvstore.transport.control_frames import MAX_CONTROL_BYTES, pack_commit
from kvstore.transport.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameKind,
    Header,
    ReadBody,
    UcxPart,
    WriteItem,
    pack_write_body,
    unpack_tokens,
)
from kvstore.transport.ticket import Ticket
from kvstore.transport.ucx_worker import open_worker, ucx_obstacle
from kvstore.units import MIB, Bytes, Nanos, milliseconds, seconds

PAYLOAD_BYTES = 20_000
CONTROL = Header(FrameKind.CONTROL, 0, 0).pack()


def _read_request(raw_client, acquired, refs, key_space, **changes):
    ticket = Ticket.from_bytes(acquired.ticket)
    body = ReadBody(acquired.lease_id, ticket.expires_at, key_space, tuple(ref.hash for ref in refs)).pack()
    return raw_client.request(FrameKind.READ, body, [ticket], **changes)


async def _read_answer(raw_client, refs):
    payloads = []
    for item in range(len(refs)):
        header = Header.unpack(await raw_client.receive(HEADER_BYTES))
        assert (header.kind, header.item) == (FrameKind.PAYLOAD, item)
        payloads.append(await raw_client.receive(header.length) if header.length else None)
    return payloads


def test_a_read_with_its_ticket_is_answered_and_every_forgery_of_it_closes_the_connection(
    serving, chain, payload, key_space, raw, eventually, refused
):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 3)
            await client.store(refs)
            acquired = await client.acquire(refs)
            good = await connect()
            request = _read_request(good, acquired, refs, key_space)
            await good.send(request)
            assert await _read_answer(good, refs) == [payload(ref) for ref in refs]

            await good.send(request)  # the same bytes again, on the same connection
            assert await good.closed()
            elsewhere = await connect()
            await elsewhere.send(request)  # and on another
            assert await elsewhere.closed()
            assert refused(server) == {"replay": 1, "bad_ticket": 1}

            for at in range(HEADER_BYTES, len(request), 37):  # any byte behind the header
                forger = await connect()
                forged = bytearray(_read_request(forger, acquired, refs, key_space))
                forged[at] ^= 1
                await forger.send(bytes(forged))
                assert await forger.closed(), at
            [other] = [await client.acquire(refs[:1])]
            thief = await connect()
            ticket = Ticket.from_bytes(other.ticket)
            body = ReadBody(acquired.lease_id, ticket.expires_at, key_space, (refs[2].hash,)).pack()
            await thief.send(thief.request(FrameKind.READ, body, [ticket]))
            assert await thief.closed(), "a ticket of one lease opened another"
            await eventually(lambda: server.node.reads == 0)

            whole = await connect()
            await whole.send(_read_request(whole, acquired, refs, key_space))
            assert await _read_answer(whole, refs) == [payload(ref) for ref in refs], "the node goes on serving"

    asyncio.run(test())


def test_a_ticket_covers_no_block_outside_its_lease_and_ends_with_its_time(serving, chain, payload, key_space, raw):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 3)
            await client.store(refs)
            acquired = await client.acquire(refs[:1])
            reader = await connect()
            await reader.send(_read_request(reader, acquired, refs[:2], key_space))
            assert await _read_answer(reader, refs[:2]) == [payload(refs[0]), None]

            late = server._tickets.for_lease(acquired.lease_id, expires_at=Nanos(server.node.now() - 1))
            body = ReadBody(acquired.lease_id, late.expires_at, key_space, (refs[0].hash,)).pack()
            await reader.send(reader.request(FrameKind.READ, body, [late]))
            assert await _read_answer(reader, refs[:1]) == [None]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: larder\r\n\r\n", "garbage"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), "garbage"),
        (bytes(4096), "garbage"),
        (Header(FrameKind.READ, 0, MAX_BODY_BYTES + 1).pack(), "bad_length"),
        (Header(FrameKind.READ, 0, 1 << 63).pack(), "bad_length"),
        (Header(FrameKind.READ, 0, 10).pack(), "bad_length"),
        (Header(FrameKind.READ, 0, 100).pack()[:-1] + b"\xff", "bad_header"),
        (Header(FrameKind.READ, 0, 200).pack() + bytes(200), "bad_length"),
        (Header(FrameKind.WRITE, 0, 200).pack() + b"\xff" * 200, "bad_length"),
        (Header(FrameKind.ARENA, 0, 0).pack(), "garbage"),
        (Header(FrameKind.ACQUIRE, 0, 0).pack(), "garbage"),
        (Header(FrameKind.CONTROL, 0, 1).pack(), "bad_length"),
        (CONTROL + b"GET / HTTP/1.1\r\nHost: larder\r\n\r\n", "garbage"),
        (CONTROL + Header(FrameKind.ACQUIRE, 1, MAX_CONTROL_BYTES + 1).pack(), "bad_length"),
        (CONTROL + Header(FrameKind.ACQUIRE, 1, 50).pack() + b"\xff" * 50, "bad_length"),
        (CONTROL + Header(FrameKind.RESERVE, 1, 50).pack() + bytes(50), "bad_length"),
        (CONTROL + Header(FrameKind.COMMIT, 1, 3).pack() + bytes(3), "bad_length"),
        (CONTROL + Header(FrameKind.RELEASE, 2, 0).pack(), "replay"),
        (CONTROL + Header(FrameKind.PLACED, 1, 4).pack() + bytes(4), "garbage"),
        (CONTROL + Header(FrameKind.READ, 1, 100).pack() + bytes(100), "garbage"),
        (Header(FrameKind.PAYLOAD, 0, 0).pack(), "garbage"),
        (Header(FrameKind.READ, 7, 200).pack(), "replay"),
        (Header(FrameKind.UCX, 0, 5).pack(), "bad_length"),
        (Header(FrameKind.FETCH, 0, 60).pack() + bytes(60), "bad_length"),
        (Header(FrameKind.FETCH, 0, 60).pack() + b"\xff" * 60, "bad_length"),
        (Header(FrameKind.PUSH, 0, 200).pack() + UcxPart(1, b"a" * 100).pack() + b"\xff" * 90, "bad_length"),
    ],
)
def test_garbage_closes_the_connection_and_moves_a_counter(serving, raw, garbage, reason, refused):
    async def test():
        async with serving() as (server, _), raw(server) as connect:
            client = await connect()
            await client.send(garbage)
            assert await client.closed()
            assert refused(server) == {reason: 1}

    asyncio.run(test())


@pytest.mark.skipif(ucx_obstacle() is not None, reason="ucxx is not installed")
def test_an_address_of_ucx_without_a_ticket_never_reaches_ucx(serving, chain, payload, key_space, raw, refused):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 2)
            await client.store(refs)
            acquired = await client.acquire(refs)
            [grant] = await client.reserve(chain("b", 1))
            ticket, stolen = Ticket.from_bytes(acquired.ticket), Ticket(Ticket.from_bytes(acquired.ticket).expires_at, bytes(32))
            body = UcxPart(7, b" garbage" * 20).pack() + ReadBody(acquired.lease_id, ticket.expires_at, key_space, (refs[0].hash,)).pack()
            items = pack_write_body([WriteItem(grant.write_token, PAYLOAD_BYTES, Ticket.from_bytes(grant.ticket).expires_at)])
            thief = await connect()
            await thief.send(thief.request(FrameKind.FETCH, body, [stolen]))
            assert await thief.closed()
            thief = await connect()
            await thief.send(thief.request(FrameKind.PUSH, UcxPart(7, b" garbage" * 20).pack() + items, [ticket]))
            assert await thief.closed()
            assert refused(server) == {"bad_ticket": 2}
            liar = await connect()
            await liar.send(liar.request(FrameKind.FETCH, body, [ticket]))
            assert await liar.closed()
            assert refused(server) == {"bad_ticket": 2, "bad_ucx_address": 1}

            overheard = await connect()
            worker = await open_worker(net_devices="lo")
            body = UcxPart(7, worker.address).pack() + body[len(UcxPart(7, b" garbage" * 20).pack()) :]
            request = overheard.request(FrameKind.FETCH, body, [ticket])
            await overheard.send(request)
            assert (await overheard.receive(HEADER_BYTES + 1))[-1] == ReadStatus.OK
            taken = memoryview(bytearray(PAYLOAD_BYTES))
            way = worker.connect(await _ucx_address(await connect()))
            await asyncio.wait_for(way.receive(taken, 7), 20)
            assert bytes(taken) == payload(refs[0])
            await overheard.send(request)
            assert await overheard.closed()
            elsewhere = await connect()
            await elsewhere.send(request)
            assert await elsewhere.closed()
            assert refused(server) == {"bad_ticket": 3, "bad_ucx_address": 1, "replay": 1}
            worker.close()

    asyncio.run(test())


async def _ucx_address(raw_client):
    await raw_client.send(Header(FrameKind.UCX, 0, 0).pack())
    header = Header.unpack(await raw_client.receive(HEADER_BYTES))
    return await raw_client.receive(header.length)


def test_a_half_open_connection_is_closed_in_time(serving, raw, monkeypatch, refused):
    monkeypatch.setattr(data_connection, "FIRST_REQUEST", milliseconds(100))
    monkeypatch.setattr(data_connection, "REST_OF_REQUEST", milliseconds(100))

    async def test():
        async with serving() as (server, _), raw(server) as connect:
            silent = await connect()
            assert await silent.closed()
            halfway = await connect()
            await halfway.send(Header(FrameKind.READ, 0, 500).pack() + b"half")
            assert await halfway.closed()
            control = await connect()
            await control.send(CONTROL + Header(FrameKind.ACQUIRE, 1, 500).pack() + b"half")
            assert await control.closed()
            assert refused(server) == {"half_open": 1, "stood_still": 2}
            assert server.status().data_connections["tcp"] == 0

    asyncio.run(test())


def test_a_reader_that_takes_nothing_is_cut_off_and_its_extents_are_free_again(serving, chain, key_space, raw, eventually):
    async def test():
        async with serving(host_capacity=Bytes(64 * MIB), read_deadline=milliseconds(300)) as (server, client), raw(server) as connect:
            refs = chain("a", 24)
            await client.store(refs, size=2 * MIB)  # more than the socket buffers take
            acquired = await client.acquire(refs)
            slow = await connect()
            await slow.send(_read_request(slow, acquired, refs, key_space))
            await eventually(lambda: server.node.reads == 1)
            await eventually(lambda: server.node.reads == 0)
            await eventually(lambda: server.status().data_connections["tcp"] == 0)

    asyncio.run(test())


def test_bytes_for_a_reservation_that_is_over_touch_nothing_and_the_others_arrive(serving, chain, payload, key_space, raw):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            refs = chain("a", 3)
            grants = await client.reserve(refs)
            await client.stub.delete(key_space, refs[1:2], timeout=seconds(5))  # takes the reservation away
            writer = await connect()
            tickets = [Ticket.from_bytes(grant.ticket) for grant in grants]
            items = [WriteItem(grant.write_token, PAYLOAD_BYTES, ticket.expires_at) for grant, ticket in zip(grants, tickets, strict=True)]
            await writer.send(writer.request(FrameKind.WRITE, pack_write_body(items), tickets) + b"".join(payload(ref) for ref in refs))
            header = Header.unpack(await writer.receive(HEADER_BYTES))
            assert header.kind is FrameKind.WRITTEN
            assert unpack_tokens(await writer.receive(header.length)) == {grants[1].write_token}
            assert [server.node.incoming.is_complete(grant.write_token) for grant in grants] == [True, False, True]

    asyncio.run(test())


def test_a_length_other_than_reserved_and_a_writer_that_dies_halfway_leave_nothing(serving, chain, raw, eventually, refused):
    async def test():
        async with serving() as (server, client), raw(server) as connect:
            [grant] = await client.reserve(chain("a", 1))
            ticket = Ticket.from_bytes(grant.ticket)
            for length in (PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 1, 1 << 40):
                liar = await connect()
                await liar.send(
                    liar.request(FrameKind.WRITE, pack_write_body([WriteItem(grant.write_token, length, ticket.expires_at)]), [ticket])
                )
                assert await liar.closed()
            assert refused(server) == {"bad_ticket": 3}
            dying = await connect()
            body = pack_write_body([WriteItem(grant.write_token, PAYLOAD_BYTES, ticket.expires_at)])
            await dying.send(dying.request(FrameKind.WRITE, body, [ticket]) + bytes(100))
            dying.sock.close()
            await eventually(lambda: server.status().reservations == 0)

    asyncio.run(test())


def test_a_sealed_arena_cannot_be_written_by_anybody_else_and_nobody_may_say_that_it_was(serving, chain, raw, refused):
    async def test():
        async with serving(shm=ShmAccess.READ) as (server, client), raw(server) as connect:
            [grant] = await client.reserve(chain("a", 1))
            local = await connect(local=True)
            await local.send(Header(FrameKind.ARENA, 0, 0).pack())
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(local.sock, HEADER_BYTES, 4)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.01)
            local.number = 1
            assert len(fds) == 1
            assert Header.unpack(data).length == server.host.capacity
            with pytest.raises(PermissionError):  # not even through another descriptor of the same memory
                os.pwrite(os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR), b"x", 0)
            os.close(fds[0])
            placed = pack_commit([(grant.write_token, 1)])
            await local.send(Header(FrameKind.CONTROL, 1, 0).pack() + Header(FrameKind.PLACED, 2, len(placed)).pack() + placed)
            assert await local.closed()
            assert refused(server) == {"garbage": 1}

    asyncio.run(test())


def test_a_process_of_another_user_gets_no_arena(serving, eventually, refused):
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    stranger = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0" + sys.argv[1])
sys.exit(0 if sock.recv(1) == b"" else 1)
"""

    async def test():
        async with serving() as (server, _):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", stranger, server._hello().local_door)
            assert await process.wait() == 0
            assert refused(server) == {"foreign_user": 1}

    asyncio.run(test())


def test_nothing_is_left_of_a_node_that_was_killed(tmp_path):
    script = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from kvstore.core.view import View
from kvstore.ids import Epoch
from kvstore.node.config import NodeConfig
from kvstore.node.server import NodeServer
from kvstore.registry.view_source import StaticViews
async def main():
    server = NodeServer(NodeConfig(), views=StaticViews(View(Epoch(1))))
    await server.start()
    print(server._hello().local_door, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    door = process.stdout.readline().strip()
    assert door
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + door)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 12):
            pass
    sock.close()
    with socket.socket(socket.AF_UNIX) as again, pytest.raises(ConnectionRefusedError):
        again.connect("\0" + door)
    assert set(os.listdir("/dev/shm")) <= before
