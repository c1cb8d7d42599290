"""What UCX alone could do to the bytes, and what is done about it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from kvstore.client import Acknowledge, BlockPut, PutOutcome
from kvstore.node.config import ShmAccess
from kvstore.transport import Peer
from kvstore.transport.ucx_worker import UcxFailed, open_worker, ucx_obstacle
from kvstore.units import MIB, milliseconds

pytestmark = pytest.mark.skipif(ucx_obstacle() is not None, reason="ucxx is not installed")


async def chosen_by(store: Any) -> str:
    [member] = store.views.view.stores
    choice = await store.client._nodes._transport.choice(Peer(member.node_id, member.boot_id, member.address))
    return f"{choice.kind}: {choice.reason}"


def test_a_wall_before_ucx_is_a_failed_put_and_then_another_way(
    run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any, eventually: Any
) -> None:
    sizes = [MIB] * 2
    refs = chain(sizes)
    impatient = dataclasses.replace(client_config, write_timeout=milliseconds(500))

    async def test() -> None:
        async with serving("ucx", client_config=impatient) as store:
            transport = store.client._nodes._transport
            transport._kinds |= {"tcp"}
            assert (await chosen_by(store)).startswith("ucx")
            nowhere = await open_worker(net_devices="lo")  # takes messages, and nobody looks at them
            [chosen] = transport._chosen.values()
            chosen.transport._node_worker = nowhere.address
            puts = [BlockPut(ref, bytes(size)) for ref, size in zip(refs, sizes, strict=True)]
            report = await store.client.put(key_space, puts, acknowledge=Acknowledge.ALL)
            assert set(report.outcomes) == {PutOutcome.FAILED}
            await eventually(store.client.usable_stores)
            assert "no ucx: it did not work a while ago" in await chosen_by(store)
            await store.put(refs, sizes)
            assert await store.read(refs, sizes) == ["ok"] * 2
            nowhere.close()

    run(test())


def test_memory_of_a_receive_that_was_given_up_is_left_alone(run: Any) -> None:
    async def test() -> None:
        here, there = await open_worker(net_devices="lo"), await open_worker(net_devices="lo")
        to_there, to_here = here.connect(there.address), there.connect(here.address)
        memory = memoryview(bytearray(MIB))
        given_up = to_there.receive(memory, 7)
        to_there.close()
        late = to_here.send(memoryview(b"x" * MIB), 7)
        to_here.close()
        other = memoryview(bytearray(1000))
        ours, theirs = here.connect(there.address).receive(other, 8), there.connect(here.address).send(memoryview(b"y" * 1000), 8)
        await asyncio.wait_for(asyncio.gather(ours, theirs), 20)
        assert isinstance(given_up.exception(), UcxFailed)
        assert (bytes(memory), bytes(other)) == (bytes(MIB), b"y" * 1000)
        assert isinstance(late.exception(), UcxFailed)
        here.close()
        there.close()

    run(test())


def test_a_port_scanner_at_the_ports_of_ucx_disturbs_nobody(run: Any, serving: Any, chain: Any) -> None:
    sizes = [100_000] * 3
    refs = chain(sizes)

    async def test() -> None:
        async with serving("ucx", shm=ShmAccess.OFF) as store:
            await store.put(refs, sizes)
            loop = asyncio.get_running_loop()
            ports = listening_ports() - {store.server.port, store.server._doors.port}
            assert ports, "UCX has none of its own?"
            for port in ports:
                for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), os.urandom(4096), b""):
                    with socket.socket() as scanner:
                        scanner.setblocking(False)
                        await loop.sock_connect(scanner, ("127.0.0.1", port))
                        await loop.sock_sendall(scanner, garbage)
                        assert await store.read(refs, sizes) == ["ok"] * 3

    run(test())


def test_an_address_that_is_none_ends_no_process() -> None:
    """UCX itself aborts over the number of a format that it does not know, and is not told where an address ends."""
    script = """
import asyncio, random
from kvstore.transport.ucx_worker import UcxFailed, open_worker

async def main():
    rng = random.Random(7)
    here, there = await open_worker(net_devices="lo"), await open_worker(net_devices="lo")
    good = there.address
    bent = [bytes([first]) + good[1:] for first in range(good[0] & 0xF0, (good[0] & 0xF0) + 16) if first != good[0]]
    bent += [b"", b"garbage" * 20, bytes(100)] + [good[:cut] for cut in range(0, len(good), 9)]
    bent += [good[:1] + rng.randbytes(80) for _ in range(20)]
    refused = 0
    for address in bent:
        try:
            here.connect(address).close()
        except UcxFailed:
            refused += 1
    memory = memoryview(bytearray(5))
    arriving = here.connect(good).receive(memory, 7)
    there.connect(here.address).send(memoryview(b"bytes"), 7)
    await asyncio.wait_for(arriving, 20)
    print(bytes(memory).decode(), refused * 10 > len(bent) * 9, flush=True)

asyncio.run(main())
"""
    environment = os.environ | {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, ["bytes", "True"]), ended.stderr[-2000:]


def listening_ports() -> set[int]:
    """Of this process, on any address."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in mine}
