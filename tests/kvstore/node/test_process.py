"""A real node process with a real Redis: start, kill -9, graceful stop, refusals."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from kvstore.core.view import MemberState
from kvstore.errors import LarderError
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.rpc.admin_stub import AdminStub
from kvstore.units import seconds

SOON = seconds(20)


@pytest.fixture(scope="module")
def redis():
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def process(redis, tmp_path):
    """`with process(ssd=True, ...) as (popen, address)`: one `python -m kvstore.node` that has said READY."""

    @contextlib.contextmanager
    def start(*, ssd=False, node_id="node-p", **keys):
        popen = _launch(redis, tmp_path, ssd=ssd, node_id=node_id, **keys)
        try:
            ready = popen.stdout.readline().split()
            assert ready[:3] == ["READY", node_id, "store"], popen.stderr.read()
            yield popen, dict(word.split("=") for word in ready[3:])
        finally:
            if popen.poll() is None:
                popen.send_signal(signal.SIGTERM)
            popen.wait(timeout=20)
            popen.stdout.close()
            popen.stderr.close()

    return start


def _launch(redis, tmp_path, *, ssd=False, node_id="node-p", **keys):
    flags = {"node_id": node_id, "redis_url": redis.url, "host_capacity": "4MiB", "region_bytes": "256KiB", "ssd_capacity": "8MiB"}
    if ssd:
        flags["ssd_path"] = str(tmp_path / "ssd")
    command = [sys.executable, "-m", "kvstore.node", *(f"--{key}={value}" for key, value in (flags | keys).items())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _end_of(popen):
    """(stdout, stderr) of a process that must end by itself."""
    try:
        return popen.communicate(timeout=30)
    finally:
        popen.kill()


def test_after_a_kill_9_everything_that_was_on_the_ssd_is_found_and_right(process, chain, connect):
    async def fill(address):
        """Per chain how many blocks are on SSD, when everything that the node still has is there."""
        client = connect(address)
        for number in range(30):
            await client.store(chain(f"c{number}", 8))
        admin = AdminStub(client.channel)
        async with asyncio.timeout(30):
            while True:
                tiers = {
                    number: [report.tiers for report in await admin.locate(client.key_space, chain(f"c{number}", 8), timeout=SOON)]
                    for number in range(30)
                }
                if all("ssd" in found for chain_tiers in tiers.values() for found in chain_tiers if found):
                    break
                await asyncio.sleep(0.02)
        await client.close()
        return {number: sum("ssd" in found for found in chain_tiers) for number, chain_tiers in tiers.items()}

    async def count(address):
        client = connect(address)
        found = {number: await client.get(chain(f"c{number}", 8)) for number in range(30)}
        await client.close()
        return found

    with process(ssd=True) as (popen, addresses):
        on_ssd = asyncio.run(fill(addresses["rpc"]))
        assert sum(on_ssd.values()) > 20
        os.kill(popen.pid, signal.SIGKILL)
        popen.wait()
    with process(ssd=True) as (popen, addresses):
        found = asyncio.run(count(addresses["rpc"]))
    assert sum(found.values()) >= 0.99 * sum(on_ssd.values())
    assert all(found[number] >= on_ssd[number] for number in on_ssd)


def test_a_kill_9_in_the_middle_of_puts_leaves_nothing_listed_that_cannot_be_read(process, chain, connect):
    async def put_until_killed(address, popen):
        client = connect(address)
        asyncio.get_running_loop().call_later(0.4, popen.kill)
        number = 0
        with contextlib.suppress(LarderError):
            while True:
                await client.store(chain(f"c{number}", 8))
                number += 1
        await client.close()
        return number

    async def check(address, chains):
        client = connect(address)
        found = 0
        for number in range(chains):
            refs = chain(f"c{number}", 8)
            listed = await client.stub.probe_prefix(client.key_space, refs, timeout=SOON)
            for ref, present in zip(refs, listed, strict=True):
                if present:
                    assert await client.get([ref]) == 1
                    found += 1
        await client.close()
        return found

    with process(ssd=True, demote_above="0") as (popen, addresses):
        chains = asyncio.run(put_until_killed(addresses["rpc"], popen))
    with process(ssd=True) as (popen, addresses):
        assert asyncio.run(check(addresses["rpc"], chains)) > 0


def test_a_sigterm_saves_the_hot_blocks_and_says_so_in_the_registry(process, chain, connect, redis):
    async def state_of(node_id):
        async with RedisRegistry(redis.url) as registry:
            return registry.view.member(node_id).state

    async def fill(address):
        client = connect(address)
        await client.store(chain("hot", 16))
        await client.close()

    async def count(address):
        client = connect(address)
        found = await client.get(chain("hot", 16))
        await client.close()
        return found

    with process(ssd=True, node_id="node-s") as (popen, addresses):
        assert asyncio.run(state_of("node-s")) is MemberState.ACTIVE
        asyncio.run(fill(addresses["rpc"]))
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(timeout=20) == 0
        assert popen.stderr.read().count("Traceback") == 0
    assert asyncio.run(state_of("node-s")) is MemberState.LEFT
    with process(ssd=True, node_id="node-s") as (_, addresses):
        assert asyncio.run(count(addresses["rpc"])) == 16


def test_metrics_are_served(process, chain, connect):
    async def fill(address):
        client = connect(address)
        await client.store(chain("a", 4))
        assert await client.get(chain("a", 4)) == 4
        await client.close()

    with process() as (_, addresses):
        asyncio.run(fill(addresses["rpc"]))
        text = urllib.request.urlopen(f"http://{addresses['metrics']}/metrics", timeout=10).read().decode()
    assert 'larder_put_outcomes_total{outcome="stored",reason=""} 4.0' in text
    assert 'larder_read_outcomes_total{outcome="ok",reason=""} 4.0' in text
    assert f'larder_tier_bytes{{tier="host"}} {4 * 20_480}' in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"redis_url": "redis://127.0.0.1:1/0"}, "Redis"),
        ({"host_capacity": "100000GiB"}, "host_capacity"),
        ({"ssd_path": "/proc/nowhere"}, "ssd_path"),
        ({"ssd": True, "ssd_capacity": "1000000GiB"}, "ssd_capacity"),
        ({"region_byte": "1MiB"}, "region_bytes"),
        ({"weight": "heavy"}, "weight"),
        ({"weight": "inf"}, "weight"),
        ({"host": "no.such.host.invalid"}, "cannot listen on no.such.host.invalid"),
        ({"lease_ttl": "10ms"}, "tick_every"),
    ],
)
def test_a_wrong_configuration_is_one_line_on_stderr_and_exit_2(redis, tmp_path, keys, words):
    popen = _launch(redis, tmp_path, **keys)
    out, err = _end_of(popen)
    lines = [line for line in err.splitlines() if line]
    assert popen.returncode == 2
    assert out == ""
    assert words in lines[-1]
    assert len(lines) == 1, err


def test_a_port_in_use_is_one_line_and_exit_2(redis, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        popen = _launch(redis, tmp_path, port=taken.getsockname()[1])
        _, err = _end_of(popen)
    assert popen.returncode == 2
    assert len(err.splitlines()) == 1
    assert "cannot listen on" in err


def test_two_nodes_on_one_folder_the_second_refuses(process, redis, tmp_path):
    with process(ssd=True):
        popen = _launch(redis, tmp_path, ssd=True, node_id="node-q")
        _, err = _end_of(popen)
    assert popen.returncode == 2
    assert "in use by another store node" in err


def test_a_node_whose_id_is_taken_over_ends_with_one_line(process, redis, tmp_path):
    old = _launch(redis, tmp_path, ssd=False)
    try:
        assert old.stdout.readline().startswith("READY node-p store")
        with process():
            _, stderr = _end_of(old)
    finally:
        old.kill()
        old.wait(timeout=20)
    assert old.returncode == 2
    assert "another process has joined as 'node-p'" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_a_node_starts_without_torch_or_numba():
    script = "import sys, kvstore.node.__main__; print(sorted({'torch', 'numba', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
