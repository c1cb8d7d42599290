"""Membership against a real Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from kvstore.core.view import MOST_HOT_STRIPES, MemberState, Role
from kvstore.errors import ConfigError, StaleView
from kvstore.ids import Epoch, StripeId
from kvstore.registry import EmbeddedRedis, Membership, RedisRegistry, RegistryConfig
from kvstore.registry.redis_link import RedisLink, RegistryAway
from kvstore.registry.standing import NotRenewed, Renewed
from kvstore.units import milliseconds, seconds, to_seconds


@asynccontextmanager
async def joined(registry_on: Any, server: EmbeddedRedis, *members: Any) -> AsyncIterator[list[RedisRegistry]]:
    registries = [registry_on(server) for _ in members]
    try:
        for registry, member in zip(registries, members, strict=True):
            await registry.start()
            await registry.join(member)
        yield registries
    finally:
        for registry in registries:
            await registry.close()


def states(registry: RedisRegistry) -> dict[str, str]:
    return {member.node_id: member.state.value for member in registry.view.members}


def test_members_see_one_another_with_all_they_said(run, redis_server, registry_on, member, until) -> None:
    async def test() -> None:
        first, second = member("s1"), member("p1", role=Role.PREFILL, port=7001)
        async with joined(registry_on, redis_server, first, second) as (one, two):
            for registry in (one, two):
                await until(registry, lambda registry=registry: len(registry.view.members) == 2)
                assert set(registry.view.members) == {first, second}
                assert registry.view.stores == (first,)

    run(test())


def test_every_step_of_a_life_is_a_new_epoch(run, redis_server, registry_on, member, until) -> None:
    async def test() -> None:
        async with registry_on(redis_server) as watcher:
            async with joined(registry_on, redis_server, member("s1", state=MemberState.JOINING)) as (registry,):
                epochs = []
                for step, expected in (
                    (None, "joining"),
                    (registry.serve, "active"),
                    (registry.drain, "draining"),
                    (registry.leave, "left"),
                ):
                    if step is not None:
                        await step()
                    await until(watcher, lambda expected=expected: states(watcher) == {"s1": expected})
                    epochs.append(watcher.view.epoch)
                assert epochs == sorted(set(epochs))
                assert registry.membership is Membership.OBSERVER

    run(test())


def test_next_view_wakes_up_on_a_change(run, redis_server, registry_on, member) -> None:
    async def test() -> None:
        async with registry_on(redis_server) as watcher:
            waiting = asyncio.create_task(watcher.next_view(after=watcher.view.epoch))
            async with joined(registry_on, redis_server, member("s1")):
                assert [member.node_id for member in (await waiting).members] == ["s1"]

    run(test())


def test_a_change_is_announced_and_does_not_wait_for_the_poll(run, redis_server, registry_on, member, registry_config) -> None:
    async def test() -> None:
        slow_poll = dataclasses.replace(registry_config, poll_every=seconds(20))
        async with registry_on(redis_server, config=slow_poll) as watcher:
            async with joined(registry_on, redis_server, member("s1")) as (registry,):
                async with asyncio.timeout(5):
                    view = await watcher.next_view(after=watcher.view.epoch)
                assert view.member(registry.member.node_id)

    run(test())


def test_a_change_whose_announcement_was_lost_is_found_by_the_poll(run, redis_server, registry_on, member, until) -> None:
    async def unheard() -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    async def test() -> None:
        watcher = registry_on(redis_server)
        watcher._link.announcements = unheard  # type: ignore[method-assign,assignment]
        async with watcher, joined(registry_on, redis_server, member("s1")):
            await until(watcher, lambda: states(watcher) == {"s1": "active"})

    run(test())


def test_the_first_sweep_after_everybody_stood_still_suspects_nobody(run, redis_server, registry_config, member) -> None:
    """Leases that ran out meanwhile mean nothing; those who do not renew now are suspect one lease later."""

    async def test() -> None:
        link, one = RedisLink(redis_server.url, config=registry_config), member("s1")

        async def swept_until(expected: MemberState) -> MemberState:
            async with asyncio.timeout(8):
                while True:
                    await link.sweep()
                    view = await link.newer_view(Epoch(0))
                    assert view is not None
                    if view.members[0].state is expected:
                        return expected
                    await asyncio.sleep(0.03)

        await link.join(one, comes_back=False)
        await link.sweep()
        await asyncio.sleep(2 * to_seconds(registry_config.lease_ttl))
        await link.sweep()
        view = await link.newer_view(Epoch(0))
        assert view is not None
        assert [each.state for each in view.members] == [MemberState.ACTIVE]
        assert await swept_until(MemberState.SUSPECT)
        await link.close()

    run(test())


def test_a_member_that_stops_renewing_is_suspect_and_then_dead(run, redis_server, registry_on, member, until) -> None:
    async def test() -> None:
        async with joined(registry_on, redis_server, member("s1"), member("s2")) as (one, two):
            await until(one, lambda: len(one.view.members) == 2)
            await two.close()  # ends without leaving, as kill -9 does
            await until(one, lambda: states(one) == {"s1": "active", "s2": "suspect"})
            await until(one, lambda: states(one) == {"s1": "active", "s2": "dead"})

    run(test())


def test_a_joining_member_that_stops_renewing_is_dead_at_once(run, redis_server, registry_on, member, until) -> None:
    async def test() -> None:
        async with joined(registry_on, redis_server, member("s1"), member("s2", state=MemberState.JOINING)) as (one, two):
            await two.close()
            await until(one, lambda: states(one).get("s2") == "dead")

    run(test())


def test_a_suspect_that_renews_is_active_again(run, redis_server, registry_config, registry_on, member, until) -> None:
    async def test() -> None:
        frozen = member("s2")
        link = RedisLink(redis_server.url, config=registry_config)
        async with joined(registry_on, redis_server, member("s1")) as (one,):
            await link.join(frozen, comes_back=False)
            await until(one, lambda: states(one).get("s2") == "suspect")
            epoch = one.view.epoch
            assert await link.renew(frozen) == Renewed(state=MemberState.ACTIVE, takeover=1.0)
            await until(one, lambda: states(one).get("s2") == "active")
            assert one.view.epoch > epoch
        await link.close()

    run(test())


def test_a_frozen_member_that_was_declared_dead_joins_again_with_a_new_epoch(
    run, redis_server, registry_config, registry_on, member, until
) -> None:
    async def test() -> None:
        frozen = member("s2")
        link = RedisLink(redis_server.url, config=registry_config)
        async with joined(registry_on, redis_server, member("s1")) as (one,):
            await link.join(frozen, comes_back=False)
            await until(one, lambda: states(one).get("s2") == "dead")
            epoch = one.view.epoch
            # It wakes up: a bare renewal does not undo what the others decided, nor does a change of state.
            assert await link.renew(frozen) is NotRenewed.REMOVED
            assert not await link.change(frozen, before=MemberState.ACTIVE, after=MemberState.DRAINING)
            await asyncio.sleep(0.1)
            assert states(one)["s2"] == "dead"
            assert await link.join(frozen, comes_back=True)
            await until(one, lambda: states(one).get("s2") == "active")
            assert one.view.epoch > epoch
        await link.close()

    run(test())


def test_a_stopped_registry_process_comes_back_by_itself(run, redis_server, registry_on, member, until) -> None:
    """The whole loop, with another registry's sweep while this one's tasks stand still."""

    async def test() -> None:
        async with joined(registry_on, redis_server, member("s1"), member("s2")) as (one, two):
            renewing = two._link.renew
            thawed = asyncio.Event()

            async def frozen_renew(member: Any) -> Renewed | NotRenewed:
                await thawed.wait()
                return await renewing(member)

            two._link.renew = frozen_renew  # type: ignore[method-assign]
            await until(one, lambda: states(one).get("s2") == "dead")
            thawed.set()
            await until(one, lambda: states(one).get("s2") == "active")
            assert two.membership is Membership.MEMBER

    run(test())


def test_two_sweepers_declare_a_death_once(run, redis_server, registry_config, registry_on, member, until) -> None:
    async def test() -> None:
        link = RedisLink(redis_server.url, config=registry_config)
        async with joined(registry_on, redis_server, member("s1"), member("s2"), member("s3")) as (one, *_):
            await link.join(member("s4"), comes_back=False)
            await until(one, lambda: len(one.view.members) == 4)
            epoch = one.view.epoch
            await until(one, lambda: states(one)["s4"] == "dead")
            assert one.view.epoch == epoch + 2  # suspect, dead
        await link.close()

    run(test())


def test_a_restart_faster_than_a_lease_shows_as_another_boot(run, redis_server, registry_on, member, until) -> None:
    async def test() -> None:
        old, new = member("s1"), member("s1", port=7009)
        async with joined(registry_on, redis_server, old) as (one,):
            await until(one, lambda: one.view.members == (old,))
            async with joined(registry_on, redis_server, new) as (two,):
                await until(two, lambda: two.view.members == (new,))
                # The old process, if it still runs, notices and stands back; it does not take the id back.
                await until(one, lambda: one.membership is Membership.SUPERSEDED)
                await asyncio.sleep(0.3)
                assert two.view.members == (new,)
                with pytest.raises(StaleView):
                    await one.drain()

    run(test())


def test_while_redis_is_away_the_view_stays_and_nobody_dies(run, registry_on, member, until) -> None:
    with EmbeddedRedis() as server:

        async def test() -> None:
            async with joined(registry_on, server, member("s1"), member("s2")) as (one, two):
                await until(one, lambda: len(one.view.members) == 2)
                before = one.view
                os.kill(server.pid, signal.SIGSTOP)  # a black hole: no error, no answer
                try:
                    await until(one, lambda: not one.connected and not two.connected)
                    await asyncio.sleep(1.2)  # longer than a lease and a death together
                    assert one.view == before
                finally:
                    os.kill(server.pid, signal.SIGCONT)
                seen: list[dict[str, str]] = []
                await until(one, lambda: one.connected and two.connected)
                for _ in range(100):
                    seen.append(states(one))
                    await asyncio.sleep(0.01)
                assert all("dead" not in each.values() for each in seen)
                assert states(one) == {"s1": "active", "s2": "active"}
                # And membership works on.
                await two.drain()
                await until(one, lambda: states(one)["s2"] == "draining")

        run(test())


def test_a_restarted_empty_redis_is_filled_again_by_the_members(run, registry_on, member, until) -> None:
    server = EmbeddedRedis()
    server.start()

    async def test() -> None:
        watcher = registry_on(server)
        await watcher.start()
        async with joined(registry_on, server, member("s1"), member("s2"), member("s3")) as registries:
            for registry in (*registries, watcher):
                await until(registry, lambda registry=registry: len(registry.view.members) == 3)
            before = watcher.view
            views: list[int] = []
            server.stop()
            await until(watcher, lambda: not watcher.connected)
            assert watcher.view == before
            server.start()
            await until(watcher, lambda: watcher.view.epoch > before.epoch)
            for _ in range(60):
                views.append(len(watcher.view.members))
                await asyncio.sleep(0.01)
            # Never a view in between with few members: that would move stripes for nothing.
            assert set(views) == {3}
            assert watcher.view.epoch > before.epoch
            assert set(watcher.view.members) == set(before.members)
        await watcher.close()

    try:
        run(test())
    finally:
        server.stop()


def test_steps_that_a_redis_forgot_which_was_filled_again_from_an_older_view_are_taken_again(
    run, redis_server, empty_redis, registry_on, member, until
) -> None:
    async def test() -> None:
        new = dataclasses.replace(member("s1", state=MemberState.JOINING), takeover=0.25)
        async with joined(registry_on, redis_server, new) as (one,):

            async def forget() -> None:
                epoch = one.view.epoch
                empty_redis(redis_server)
                await one._link.restore([new], known=epoch)

            await one.serve()
            await one.take_over(0.5)
            await until(one, lambda: [each.takeover for each in one.view.members] == [0.5])
            await forget()
            await until(one, lambda: states(one) == {"s1": "active"} and one.member.takeover == 0.25)
            await one.take_over(0.5)
            await until(one, lambda: [each.takeover for each in one.view.members] == [0.5])
            await one.drain()
            await forget()
            await until(one, lambda: states(one) == {"s1": "draining"})

    run(test())


def test_the_dead_are_not_brought_back_by_a_redis_that_is_emptied_twice(run, redis_server, empty_redis, registry_on, member, until) -> None:
    async def test() -> None:
        async with joined(registry_on, redis_server, member("s1"), member("s2")) as (one, two):
            await until(one, lambda: len(one.view.members) == 2)
            await two.close()
            await until(one, lambda: states(one).get("s2") == "dead")
            for _ in range(2):
                epoch = one.view.epoch
                empty_redis(redis_server)
                await until(one, lambda epoch=epoch: one.view.epoch > epoch)
                assert states(one) == {"s1": "active"}

    run(test())


def test_an_observer_is_not_left_behind_when_the_whole_cluster_is_new(run, redis_server, empty_redis, registry_on, member, until) -> None:
    async def test() -> None:
        async with registry_on(redis_server) as watcher:
            async with joined(registry_on, redis_server, *(member(f"s{number}") for number in range(4))):
                await until(watcher, lambda: len(watcher.view.members) == 4)
            old_epoch = watcher.view.epoch
            empty_redis(redis_server)
            async with joined(registry_on, redis_server, member("new")):
                await until(watcher, lambda: states(watcher) == {"new": "active"})
                assert watcher.view.epoch > old_epoch

    run(test())


def test_records_of_those_who_left_are_forgotten_after_a_while(run, redis_server, registry_on, registry_config, member, until) -> None:
    async def test() -> None:
        soon = dataclasses.replace(registry_config, forget_after=milliseconds(100))
        stays, goes = registry_on(redis_server, config=soon), registry_on(redis_server)
        for registry, node_id in ((stays, "s1"), (goes, "s2")):
            await registry.start()
            await registry.join(member(node_id))
        await until(stays, lambda: "s2" in states(stays))
        await goes.leave()
        await until(stays, lambda: states(stays) == {"s1": "active"})
        await stays.close()
        await goes.close()

    run(test())


def test_clusters_of_different_names_share_a_redis_unseen(run, redis_server, registry_on, registry_config, member) -> None:
    async def test() -> None:
        other = dataclasses.replace(registry_config, cluster="other")
        async with joined(registry_on, redis_server, member("s1")):
            async with registry_on(redis_server, config=other) as watcher:
                assert watcher.view.members == ()

    run(test())


def test_a_record_this_version_does_not_understand_is_left_out(run, redis_server, registry_on, registry_config, member, until) -> None:
    async def test() -> None:
        async with joined(registry_on, redis_server, member("s1")) as (one,):
            await one._link._redis.commands.hset("{larder:larder}:states", "odd", "00:levitating:5")
            await one._link._redis.commands.hset("{larder:larder}:states", "odder", "what")
            await one._link.sweep()
            await one.drain()
            await one.drain()  # an operator may ask twice
            await until(one, lambda: states(one) == {"s1": "draining"})

    run(test())


def test_a_takeover_grows_by_compare_and_set_and_a_quick_restart_keeps_it(
    run, redis_server, registry_config, registry_on, member, until
) -> None:
    async def test() -> None:
        old = dataclasses.replace(member("s1"), takeover=0.25)
        async with joined(registry_on, redis_server, old) as (one,):
            await one.take_over(0.5)
            await until(one, lambda: [each.takeover for each in one.view.members] == [0.5])
            link = RedisLink(redis_server.url, config=registry_config)
            assert not await link.take_over(old, takeover=0.75), "a frozen step of before"
            new = dataclasses.replace(member("s1"), takeover=0.25)
            async with joined(registry_on, redis_server, new) as (two,):
                assert two.member.takeover == 0.5
                assert not await link.take_over(dataclasses.replace(old, takeover=0.5), takeover=1.0), "of the old boot"
                await two.take_over(1.0)
                await two.drain()
                with pytest.raises(StaleView):
                    await two.take_over(0.5)
                await two.leave()
            async with joined(registry_on, redis_server, dataclasses.replace(member("s1"), takeover=0.25)) as (three,):
                assert three.member.takeover == 0.25, "who left comes back as a newcomer"
            await link.close()

    run(test())


def test_a_step_that_no_state_allows_is_a_stale_view_and_no_crash(run, redis_server, registry_on, member) -> None:
    async def test() -> None:
        async with joined(registry_on, redis_server, member("s1", state=MemberState.JOINING)) as (one,):
            with pytest.raises(StaleView):
                await one.drain()

    run(test())


def test_no_redis_is_one_clear_line(run, member) -> None:
    async def test() -> None:
        registry = RedisRegistry("redis://127.0.0.1:1/0")
        with pytest.raises(ConfigError, match=r"Redis at redis://127.0.0.1:1/0 cannot be reached: .*; start one or set redis_url"):
            await registry.start()

    run(test())


def test_a_password_in_the_url_does_not_reach_the_message(run) -> None:
    async def test() -> None:
        registry = RedisRegistry("redis://user:se@cret@127.0.0.1:1/0")
        with pytest.raises(ConfigError) as refused:
            await registry.start()
        assert "cret" not in str(refused.value)
        assert "redis://***@127.0.0.1:1/0" in str(refused.value)

    run(test())


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        RedisRegistry("not a url")


@pytest.mark.parametrize("wrong", [{"cluster": "a b"}, {"cluster": ""}, {"lease_ttl": 0}, {"poll_every": -1}])
def test_a_wrong_configuration_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RegistryConfig(**wrong)


def test_hot_stripes_are_part_of_the_view_for_their_time_and_no_more_than_it_can_hold(
    run, redis_server, registry_on, registry_config, member, until
) -> None:
    patient = partial(registry_on, config=dataclasses.replace(registry_config, call_timeout=seconds(5)))

    async def test() -> None:
        stripes = [StripeId(bytes([number]) * 32) for number in range(MOST_HOT_STRIPES + 3)]
        async with joined(patient, redis_server, member("s1"), member("s2")) as (one, two):
            await one.announce_hot({stripes[0]: 1}, ttl=seconds(60))
            await two.announce_hot({stripes[0]: 2, stripes[1]: 0}, ttl=seconds(1))
            await until(two, lambda: two.view.hot == {stripes[0]: 2, stripes[1]: 0})
            await until(one, lambda: one.view.hot == {})  # the last word on both was that they end soon
            await one.announce_hot(dict.fromkeys(stripes, 1), ttl=seconds(60))
            before = one.view
            assert len(before.hot) == MOST_HOT_STRIPES
            await one.announce_hot(dict.fromkeys(before.hot, 1), ttl=seconds(60))
            assert one.view.epoch == before.epoch or one.view.members != before.members, "what all know already is no change"
            impostor = member("s1")
            async with registry_on(redis_server) as other:
                other._standing.member = impostor
                with pytest.raises(StaleView):
                    await other.announce_hot({stripes[0]: 1}, ttl=seconds(60))

    run(test())


def test_a_step_whose_answer_was_lost_is_seen_in_the_view_and_the_next_one_goes_on_from_it(
    run, redis_server, registry_on, member, until
) -> None:
    """Compare and set from the step before would be refused for ever: a newcomer that owns half of its stripes until it is restarted."""

    async def test() -> None:
        async with joined(registry_on, redis_server, dataclasses.replace(member("s1"), takeover=0.25)) as (one,):
            asking = one._link.take_over

            async def answer_lost(member: Any, *, takeover: float) -> bool:
                await asking(member, takeover=takeover)
                raise RegistryAway("the connection broke")

            one._link.take_over = answer_lost  # type: ignore[method-assign]
            with pytest.raises(RegistryAway):
                await one.take_over(0.5)
            one._link.take_over = asking  # type: ignore[method-assign]
            await until(one, lambda: one.member.takeover == 0.5)
            await one.take_over(0.75)
            await until(one, lambda: one.view.member(one.member.node_id).takeover == 0.75)

    run(test())
