"""A real node process with a real Redis: start, kill -9, graceful stop, refusals."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from kvstore.codec.checksum import payload_checksum
from kvstore.core.recovered import newest_records
from kvstore.core.recovery import recover_region
from kvstore.core.region import record_bytes
from kvstore.core.view import MemberState
from kvstore.errors import LarderError
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.rpc.admin_stub import AdminStub
from kvstore.rpc.store_stub import WrittenChunk
from kvstore.units import Bytes, seconds

SOON = seconds(20)
KILL_ROUNDS = int(os.environ.get("LARDER_KILL_ROUNDS", "3"))


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


def test_killed_again_and_again_at_random_moments_a_node_keeps_what_was_on_its_ssd(process, chain, connect, tmp_path, seed):
    """Puts and deletes until a kill -9 at any moment, restart, the same again. `LARDER_KILL_ROUNDS=100` goes on for longer."""
    rng = random.Random(seed)
    put, durable, deleted, deleting = {}, set(), set(), set()

    async def write_until_killed(popen, client, admin):
        steps_left = rng.randint(4, 24)  # by progress and not by the clock: a slow machine must not kill an idle node
        with contextlib.suppress(LarderError):
            [half, _] = await client.reserve(chain(f"open-{len(put)}", 2))  # an open put, half written, at every kill
            await client.stub.write_payloads(_chunks([(half.write_token, bytes(10_000))]), timeout=SOON)
            while True:
                steps_left -= 1
                if steps_left == 0:
                    asyncio.get_running_loop().call_later(rng.uniform(0, 0.03), popen.kill)
                refs = chain(f"c{len(put)}", 8)
                put.update({ref.hash: ref for ref in refs})
                await client.store(refs)
                known = [ref for ref in list(put.values())[-80:] if ref.hash not in deleting]
                for ref, report in zip(known, await admin.locate(client.key_space, known, timeout=SOON), strict=True):
                    if "ssd" in report.tiers:
                        durable.add(ref.hash)
                if rng.random() < 0.2:
                    victims = rng.sample(known, 2)
                    deleting.update(ref.hash for ref in victims)
                    gone = await client.stub.delete(client.key_space, victims, timeout=SOON)
                    deleted.update(ref.hash for ref, done in zip(victims, gone, strict=True) if done)

    async def check(client, admin, on_medium):
        """Right after a restart."""
        refs = list(put.values())
        status = await admin.status(timeout=SOON)
        ssd = next(tier for tier in status.tiers if tier.tier == "ssd")
        assert (ssd.copies, ssd.used_bytes) == on_medium, "what it counts is not what lies on the medium"
        assert (status.leases, status.reservations) == (0, 0)
        present = await client.stub.probe_prefix(client.key_space, refs, timeout=SOON)
        listed = [ref for ref, here in zip(refs, present, strict=True) if here]
        for start in range(0, len(listed), 64):
            each_alone = [ref._replace(stripe=ref.hash) for ref in listed[start : start + 64]]
            assert await client.get(each_alone) == len(each_alone), "listed and not readable"
        assert not {ref.hash for ref in listed} & deleted, "a deleted block came back"
        kept = durable - deleting
        assert len(kept & {ref.hash for ref in listed}) >= 0.99 * len(kept)

    async def one_round(popen, address, on_medium):
        client = connect(address)
        admin = AdminStub(client.channel)
        await check(client, admin, on_medium)
        if popen is not None:
            await write_until_killed(popen, client, admin)
        await client.close()

    on_medium = (0, 0)
    keys = {"demote_above": "0.0", "ssd_capacity": f"{max(32, 16 * KILL_ROUNDS)}MiB", "scrub_rate": "0"}
    for _ in range(KILL_ROUNDS):
        with process(ssd=True, **keys) as (popen, addresses):
            asyncio.run(one_round(popen, addresses["rpc"], on_medium))
        on_medium = _records_on(tmp_path / "ssd")
    assert len(durable) > 20, "the kills came too early to show anything"
    assert deleting
    with process(ssd=True, **keys) as (_, addresses):
        asyncio.run(one_round(None, addresses["rpc"], on_medium))


def _chunks(payloads):
    return (WrittenChunk(token, Bytes(0), data) for token, data in payloads)


def _records_on(folder):
    """(live records, bytes that they take) by the region files alone, while no node runs."""
    regions = []
    for path in sorted(folder.glob("region-*")):
        data = path.read_bytes()
        found = recover_region(
            lambda offset, length, data=data: data[offset : offset + length],
            lambda record, data=data: payload_checksum(data[record.offset : record.offset + record.length]) == record.checksum,
            region=int(path.name[-6:]),
            region_bytes=len(data),
        )
        if found is not None:
            regions.append(found)
    live, _ = newest_records(regions)
    return len(live), sum(record_bytes(record.length) for _, record in live)


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
