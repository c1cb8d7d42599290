"""Cost comparison and bounds of the plan; no clock, no store."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from decode_node.fetch_plan import FetchPlan, FetchPolicy, FetchSpeed, Speeds, loadable_blocks, plan_fetch
from kvstore.units import Nanos, milliseconds, seconds

BLOCK = 32


def plan(
    *,
    tokens: int = 1025,
    local: int = 0,
    store: int = 32,
    tiers: Sequence[str] | None = None,
    room: int = 1000,
    fetch: float = 1000.0,
    slow: float = 10.0,
    prefill: float = 2000.0,
    continuation: bool = False,
    policy: FetchPolicy | None = None,
) -> FetchPlan:
    """`store` blocks, all of the host tier unless `tiers` says otherwise."""
    return plan_fetch(
        tokens=tokens,
        block_tokens=BLOCK,
        local_blocks=local,
        store_tiers=["host"] * store if tiers is None else tiers,
        room_blocks=room,
        speeds=Speeds(fetch_blocks_per_s={"host": fetch, "ssd": slow}, prefill_tokens_per_s=prefill),
        continuation=continuation,
        policy=policy or FetchPolicy(),
    )


def test_one_token_is_always_left_to_compute() -> None:
    assert [loadable_blocks(tokens, block_tokens=BLOCK) for tokens in (1, 32, 33, 64, 65)] == [0, 0, 1, 1, 2]


def test_a_store_faster_than_computing_is_fetched_from() -> None:
    assert plan().fetch_blocks == 32
    assert plan().recompute_tokens == 1


def test_a_store_slower_than_computing_is_left_alone() -> None:
    slow = plan(fetch=10.0)
    assert slow.fetch_blocks == 0
    assert slow.recompute_tokens == 1025


def test_only_the_part_of_a_run_that_pays_is_fetched() -> None:
    assert plan(tiers=["host"] * 10 + ["ssd"] * 22).fetch_blocks == 10
    # A slow block between fast ones pays when those behind it save more than it costs.
    assert plan(tiers=["host"] * 10 + ["ssd"] + ["host"] * 21).fetch_blocks == 32
    assert plan(tiers=["ssd"] * 30 + ["host"]).fetch_blocks == 0


def test_a_continuation_fetches_even_from_a_slow_store() -> None:
    made = plan(fetch=10.0, continuation=True)
    assert made.fetch_blocks == 32
    assert made.pace.allowed(0) == FetchPolicy().max_wait


@pytest.mark.parametrize(("fetch", "prefill"), [(0.0, 2000.0), (1000.0, 0.0), (0.0, 0.0)])
def test_an_unknown_speed_means_try(fetch: float, prefill: float) -> None:
    assert plan(fetch=fetch, prefill=prefill).fetch_blocks == 32


def test_a_fetch_may_take_what_its_blocks_are_worth_and_a_credit() -> None:
    policy = FetchPolicy(max_wait=seconds(0.4), min_credit=milliseconds(50), patience=0.25)
    pace = plan(prefill=4096.0, policy=policy).pace
    assert pace.allowed(0) == seconds(32 * BLOCK / 4096 / 4)
    assert pace.allowed(10) == pace.allowed(0) + seconds(10 * BLOCK / 4096)
    assert plan(prefill=1000.0, policy=policy).pace.allowed(32) == seconds(0.4)
    assert plan(prefill=1e6, fetch=1e6, policy=policy).pace.allowed(0) == milliseconds(50)


def test_whatever_comes_when_a_hit_costs_no_more_than_a_recompute_and_the_credit(seed: int) -> None:
    """The promise: loads of any number of fetches, each cut where its pace says, then the rest computed."""
    draw = random.Random(seed)
    policy = FetchPolicy(max_wait=seconds(1000))
    for _ in range(300):
        pace = plan(prefill=draw.choice([100.0, 2000.0]), fetch=0.0, policy=policy).pace
        assert pace.block_cost is not None
        credit, spent, left = pace.credit, 0, 32
        while left and pace.allowed(0):
            asked, came, now = draw.randint(1, left), 0, 0
            while came < asked:
                now += draw.choice([0, pace.block_cost // 50, pace.block_cost * 3])
                if now > pace.allowed(came):
                    now = pace.allowed(came)
                    break
                came += 1
            pace, spent, left = pace.after(blocks=came, took=Nanos(now)), spent + now, left - came
            if came < asked:
                break
        assert pace.block_cost is not None
        assert spent + left * pace.block_cost <= 32 * pace.block_cost + credit


def test_a_full_pool_shortens_the_fetch() -> None:
    assert plan(room=5).fetch_blocks == 5
    assert plan(room=5).left_for_room == 27
    assert plan(room=0).fetch_blocks == 0
    assert plan(room=5, fetch=10.0).left_for_room == 0


def test_every_plan_accounts_for_each_token_once(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        tokens = draw.randint(1, 5000)
        most = loadable_blocks(tokens, block_tokens=BLOCK)
        local = draw.randint(0, most)
        store = draw.randint(0, most - local)
        made = plan(
            tokens=tokens,
            local=local,
            store=store,
            room=draw.randint(0, 200),
            fetch=draw.choice([0.0, 1.0, 1e4]),
            prefill=draw.choice([0.0, 10.0, 1e5]),
            continuation=draw.random() < 0.5,
        )
        assert (made.local_blocks + made.fetch_blocks) * BLOCK + made.recompute_tokens == tokens
        assert made.recompute_tokens >= 1
        assert made.fetch_blocks <= store
        assert made.fetch_blocks + made.left_for_room <= store
        assert 0 < made.pace.allowed(made.fetch_blocks) <= FetchPolicy().max_wait


def test_the_speed_follows_the_samples() -> None:
    speed = FetchSpeed(weight=0.5)
    assert speed.planned_with() == 0.0
    speed.observe(blocks=10, took=seconds(1), given_up=False)
    assert speed.planned_with() == pytest.approx(10.0)
    speed.observe(blocks=30, took=seconds(1), given_up=False)
    assert speed.planned_with() == pytest.approx(20.0)


def test_a_single_block_measures_latency_and_is_not_counted() -> None:
    speed = FetchSpeed()
    speed.observe(blocks=1, took=seconds(1), given_up=False)
    assert speed.planned_with() == 0.0


def test_a_fetch_that_was_given_up_was_slow_even_if_nothing_came() -> None:
    speed = FetchSpeed()
    speed.observe(blocks=0, took=seconds(0.5), given_up=True)
    assert speed.planned_with() == pytest.approx(2.0)


def test_a_store_that_was_slow_is_tried_again_after_some_loads() -> None:
    speed = FetchSpeed(probe_every=4)
    speed.observe(blocks=10, took=seconds(10), given_up=False)
    assert [speed.planned_with() for _ in range(5)] == [1.0, 1.0, 1.0, 0.0, 1.0]
