"""The short form of `make chaos`, and that its verdicts are right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from chaos.cluster import LOOPBACK
from chaos.ledger import Ledger
from chaos.link import Link, Weather
from chaos.verdict import Tally

from kvstore.client import PutOutcome

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(300)
def test_a_killed_and_a_silenced_store_cost_no_read_no_byte_and_no_acknowledged_block(seed: int) -> None:
    command = [sys.executable, "-m", "chaos.run", "--seed", str(seed), "--stores", "3", "--kinds", "kill,silence_inward"]
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
    assert record["faults"] >= 2
    assert record["reads"] > 0


def test_a_run_is_clean_only_if_it_read_something_and_nothing_was_wrong() -> None:
    assert not Tally(1).clean
    assert Tally(1, reads=1).clean
    for wrong in ("failed_reads", "wrong_bytes", "acknowledged_lost", "leaks"):
        assert not Tally(1, reads=1, **{wrong: 1}).clean
    assert not Tally(1, reads=1, complaints=["not whole"]).clean
    keys = ["minutes", "seed", "faults", "reads", "failed_reads", "wrong_bytes", "acknowledged_lost", "leaks"]
    assert list(json.loads(Tally(1).line())) == keys


def test_a_degraded_block_is_no_promise_and_ends_the_run_of_those_that_are() -> None:
    ledger = Ledger(seed=1, most=2)
    number = ledger.make(4)
    outcomes = [PutOutcome.STORED, PutOutcome.DEGRADED, PutOutcome.EXISTS, PutOutcome.FAILED]
    assert ledger.put(number, outcomes) == 2
    assert ledger.chains[number].run == 1
    assert [ref.index for ref in ledger.promised()] == [0, 2]
    assert ledger.put(number, [PutOutcome.EXISTS] * 4) == 2
    assert ledger.chains[number].run == 4
    ledger.make(1), ledger.make(1)
    assert len(ledger.retire()) == 1
    assert ledger.promised() == []


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
