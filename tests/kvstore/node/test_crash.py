import asyncio

import pytest

from kvstore.core.events.regions import RegionsRecovered


def test_a_bug_in_the_core_ends_the_wait_of_the_process_and_the_stop_does_not_trust_the_core_any_more(serving, chain):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            await client.store(chain("a", 1))
            waiting = asyncio.create_task(server.node.until_crash())
            with pytest.raises(AssertionError):
                server.node.feed(RegionsRecovered(regions=()))  # a second recovery is a bug of the shell
            with pytest.raises(AssertionError):
                await waiting

    asyncio.run(scenario())


def test_a_cancelled_wait_for_a_crash_is_no_crash(serving, chain):
    async def scenario():
        async with serving(ssd=True) as (server, client):
            await client.store(chain("a", 3))
            waiting = asyncio.create_task(server.node.until_crash())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with serving(ssd=True) as (_, client):
            assert await client.get(chain("a", 3)) == 3

    asyncio.run(scenario())
