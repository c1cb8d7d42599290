"""What is acknowledged as durable is found after kill -9, all of it; and a stop that has too little time says what it left."""

import asyncio
import logging
import os
import signal

import pytest

from kvstore.core.events.puts import CommitStatus
from kvstore.core.store_config import WritePolicy
from kvstore.errors import ConfigError, LarderError
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.units import MIB, Bytes, milliseconds, seconds

SOON = seconds(20)


def test_everything_acknowledged_as_durable_is_found_after_a_kill_9(node_process, chain, connect):
    async def put_until_killed(address, popen):
        """The blocks called durable, while a kill -9 comes at the 12th put."""
        client = connect(address)
        durable = []
        try:
            for number in range(30):
                refs = chain(f"c{number}", 8)
                if number == 12:
                    asyncio.get_running_loop().call_later(0.002, os.kill, popen.pid, signal.SIGKILL)
                statuses = await client.put(refs)
                durable += [ref for ref, status in zip(refs, statuses, strict=True) if status is CommitStatus.DURABLE]
        except LarderError:
            pass
        finally:
            await client.close()
        return durable

    async def missing(address, refs):
        client = connect(address)
        present = []
        for start in range(0, len(refs), 8):
            present += await client.stub.probe_prefix(client.key_space, refs[start : start + 8], timeout=SOON)
            assert await client.get([refs[start]]) == 1
        await client.close()
        return present.count(False)

    with EmbeddedRedis() as redis:
        with node_process(redis, write_policy="write_through") as (popen, address):
            durable = asyncio.run(put_until_killed(address, popen))
            popen.wait()
        assert len(durable) > 48
        with node_process(redis, write_policy="write_through") as (popen, address):
            assert asyncio.run(missing(address, durable)) == 0


def test_a_stop_with_too_little_time_ends_in_time_and_says_what_it_left(serving, chain, caplog):
    async def scenario():
        keys = {"host_capacity": Bytes(64 * MIB), "ssd_capacity": Bytes(64 * MIB), "region_bytes": Bytes(4 * MIB), "demote_above": 1.0}
        async with serving(ssd=True, drain_deadline=milliseconds(1), **keys) as (server, client):
            for number in range(40):
                await client.store(chain(f"c{number}", 50), size=4096)
        async with serving(ssd=True, **keys) as (server, client):
            return server.recovery.records

    with caplog.at_level(logging.INFO):
        found = asyncio.run(scenario())
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("stop:") and record.levelname == "WARNING"]
    kept, left = int(line.split()[1]), int(line.split("SSD, ")[1].split()[0])
    assert kept + left == 2000
    assert left > 0
    assert kept <= found < 2000, "what was written and not yet reported may be found too"


def test_a_write_policy_without_an_ssd_is_refused(node_config):
    with pytest.raises(ConfigError, match="write_policy on_eviction needs an SSD tier"):
        node_config(write_policy=WritePolicy.ON_EVICTION)
