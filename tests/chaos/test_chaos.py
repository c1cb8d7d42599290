"""The short form of `make chaos`, and that its verdicts are right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from chaos.hosts import LOOPBACK
from chaos.ledger import Ledger, owners_of
from chaos.link import Link, Weather
from chaos.namespaces import Networks, obstacle, sweep
from chaos.verdict import Tally

from kvstore.client import PutOutcome
from kvstore.core.view import Member, Role, View
from kvstore.ids import BootId, Epoch, NodeId

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(300)
def test_a_killed_and_a_silenced_store_at_once_cost_no_read_and_no_block_but_those_that_only_they_had(seed: int) -> None:
    command = [sys.executable, "-m", "chaos.run", "--seed", str(seed), "--stores", "3", "--hosts", "loopback"]
    command += ["--kinds", "kill+silence_inward"]
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"PYTHONPATH": path})
    record = json.loads(done.stdout.strip().splitlines()[-1])
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert {key: record[key] for key in ("failed_reads", "wrong_bytes", "acknowledged_lost", "leaks")} == {
        "failed_reads": 0,
        "wrong_bytes": 0,
        "acknowledged_lost": 0,
        "leaks": 0,
    }, shown
    assert record["faults"] == 2 + shown.count("redis restarts")
    assert record["reads"] > 0


def test_a_run_is_clean_only_if_it_read_something_and_nothing_was_wrong() -> None:
    assert not Tally(1).clean
    assert Tally(1, reads=1).clean
    for wrong in ("failed_reads", "wrong_bytes", "acknowledged_lost", "leaks"):
        assert not Tally(1, reads=1, **{wrong: 1}).clean
    assert not Tally(1, reads=1, complaints=["not whole"]).clean
    keys = ["minutes", "seed", "faults", "reads", "failed_reads", "wrong_bytes", "acknowledged_lost", "leaks"]
    assert list(json.loads(Tally(1).line())) == keys


def view_of(*node_ids: str) -> View:
    boot, zones = BootId(bytes(16)), iter("abcde")
    members = (Member(node_id=NodeId(name), boot_id=boot, role=Role.STORE, address="127.0.0.1:1", zone=next(zones)) for name in node_ids)
    return View(Epoch(1), tuple(members))


def test_a_degraded_block_is_no_promise_and_ends_the_run_of_those_that_are() -> None:
    ledger = Ledger(seed=1, most=2)
    number, view = ledger.make(4), view_of("s1", "s2")
    outcomes = [PutOutcome.STORED, PutOutcome.DEGRADED, PutOutcome.EXISTS, PutOutcome.FAILED]
    assert ledger.put(number, outcomes, view=view, lost=set(), whole=view) == 2
    assert ledger.chains[number].run == 1
    assert [ref.index for ref in ledger.promised()] == [0, 2]
    assert ledger.put(number, [PutOutcome.EXISTS] * 4, view=view, lost=set(), whole=view) == 2
    assert ledger.chains[number].run == 4
    ledger.make(1), ledger.make(1)
    assert len(ledger.retire()) == 1
    assert ledger.promised() == []


def test_two_lost_stores_excuse_the_blocks_that_nobody_else_had_and_no_others() -> None:
    whole = view_of("s1", "s2", "s3", "s4")
    ledger = Ledger(seed=1, most=100)
    for _ in range(40):
        ledger.put(ledger.make(8), [PutOutcome.STORED] * 8, view=whole, lost=set(), whole=whole)
    stripes = {chain.refs[0].stripe for chain in ledger.chains.values()}
    lost = {NodeId("s1"), NodeId("s2")}
    only_theirs = {stripe for stripe in stripes if owners_of(stripe, whole) == lost}
    assert 0 < len(only_theirs) < len(stripes)
    assert ledger.forget_lost({NodeId("s1")}, whole) == 0
    assert ledger.forget_lost(lost, whole) == 8 * len(only_theirs)
    assert {ref.stripe for ref in ledger.promised()} == stripes - only_theirs


def test_what_a_store_acknowledged_before_it_was_lost_is_no_promise_of_its_own() -> None:
    whole = view_of("s1", "s2", "s3")
    ledger = Ledger(seed=1, most=100)
    number = ledger.make(1)
    first, second = sorted(owners_of(ledger.chains[number].refs[0].stripe, whole))
    assert ledger.put(number, [PutOutcome.STORED], view=whole, lost={first}, whole=whole) == 1
    assert ledger.chains[number].holders == {0: {second}}
    assert ledger.forget_lost({second}, whole) == 1
    assert ledger.put(number, [PutOutcome.STORED], view=whole, lost={first, second}, whole=whole) == 0


@asynccontextmanager
async def echo_behind_a_link() -> AsyncIterator[tuple[Link, Weather, tuple[str, int]]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(100):
                writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    weather = Weather()
    link = Link(("127.0.1.99", port), (LOOPBACK, port), weather)
    await link.start()
    try:
        yield link, weather, ("127.0.1.99", port)
    finally:
        await link.stop()
        server.close()


def test_a_link_holds_bytes_while_it_is_silent_and_breaks_when_it_is_cut() -> None:
    async def scenario() -> None:
        async with echo_behind_a_link() as (link, weather, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            weather.outward.clear()
            writer.write(b"two")
            coming = asyncio.ensure_future(reader.readexactly(3))
            _, other_writer = await asyncio.open_connection(*address)
            assert not coming.done()
            weather.clear_up()
            assert await coming == b"two"
            weather.refuses = True
            link.cut()
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            late_reader, late_writer = await asyncio.open_connection(*address)
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await late_reader.readexactly(1)
            for each in (writer, other_writer, late_writer):
                each.close()

    asyncio.run(scenario())


needs_namespaces = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@needs_namespaces
def test_a_host_in_a_namespace_is_cut_off_one_way_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    with Networks() as networks:
        host = networks.host(1, redis_port=1, folder=tmp_path)
        echo = (
            "import socket; s = socket.create_server(('', 7401)); c, _ = s.accept(); [c.sendall(p) for p in iter(lambda: c.recv(9), b'')]"
        )
        with subprocess.Popen(host.command([sys.executable, "-S", "-c", echo])) as process:
            try:
                connection = connected((host.address, host.port))
                connection.sendall(b"one")
                assert connection.recv(3) == b"one"
                connection.settimeout(0.2)
                host.silence(inward=False, outward=True)
                connection.sendall(b"two")
                with pytest.raises(TimeoutError):
                    connection.recv(3)
                host.clear_up()
                connection.settimeout(30)
                assert connection.recv(3) == b"two"  # it has arrived; only the answer was sent again
                connection.close()
            finally:
                process.kill()
        host.fill_disk(None)
        with pytest.raises(OSError, match="No space"):
            (host.ssd / "one-more").write_bytes(bytes(1 << 20))
    assert f"larder-chaos-{os.getpid()}" not in Path("/proc/mounts").read_text()
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith(f"lc{os.getpid()}")]
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"larder-chaos-{os.getpid()}")]


def connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(address, timeout=30)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens there"
            time.sleep(0.01)


@needs_namespaces
def test_what_a_killed_run_left_is_taken_away_by_the_next(tmp_path: Path) -> None:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    leave = (
        "import os, pathlib, sys; from chaos.namespaces import Networks; n = Networks().__enter__(); "
        "n.host(1, redis_port=1, folder=pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
    with subprocess.Popen([sys.executable, "-c", leave, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}) as process:
        process.wait()
    mark = f"larder-chaos-{process.pid}"
    assert mark in Path("/proc/mounts").read_text()
    sweep()
    assert mark not in Path("/proc/mounts").read_text()
    assert not [name for name in os.listdir("/sys/class/net") if name.startswith(f"lc{process.pid}")]
    assert not [name for name in os.listdir("/run/netns") if name.startswith(mark)]
