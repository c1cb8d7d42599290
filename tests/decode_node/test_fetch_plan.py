"""Cost comparison and bounds of the plan; no clock, no store."""

from __future__ import annotations

import random

import pytest

from decode_node.fetch_plan import FetchPlan, FetchPolicy, FetchSpeed, Speeds, loadable_blocks, plan_fetch
from kvstore.units import milliseconds, seconds

BLOCK = 32


def plan(
    *,
    tokens: int = 1025,
    local: int = 0,
    store: int = 32,
    room: int = 1000,
    fetch: float = 1000.0,
    prefill: float = 2000.0,
    continuation: bool = False,
    policy: FetchPolicy | None = None,
) -> FetchPlan:
    return plan_fetch(
        tokens=tokens,
        block_tokens=BLOCK,
        local_blocks=local,
        store_blocks=store,
        room_blocks=room,
        speeds=Speeds(fetch_blocks_per_s=fetch, prefill_tokens_per_s=prefill),
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


def test_a_continuation_fetches_even_from_a_slow_store() -> None:
    assert plan(fetch=10.0, continuation=True).fetch_blocks == 32
    assert plan(fetch=10.0, continuation=True).wait == FetchPolicy().max_wait


@pytest.mark.parametrize(("fetch", "prefill"), [(0.0, 2000.0), (1000.0, 0.0), (0.0, 0.0)])
def test_an_unknown_speed_means_try(fetch: float, prefill: float) -> None:
    assert plan(fetch=fetch, prefill=prefill).fetch_blocks == 32


def test_the_wait_is_what_computing_would_take_within_its_bounds() -> None:
    policy = FetchPolicy(max_wait=seconds(0.4), min_wait=milliseconds(50))
    assert plan(prefill=4000.0, policy=policy).wait == seconds(32 * BLOCK / 4000)
    assert plan(prefill=1000.0, policy=policy).wait == seconds(0.4)
    assert plan(prefill=1e6, fetch=1e6, policy=policy).wait == milliseconds(50)


def test_a_full_pool_shortens_the_fetch() -> None:
    assert plan(room=5).fetch_blocks == 5
    assert plan(room=0).fetch_blocks == 0


def test_every_plan_accounts_for_each_token_once() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
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
        assert 0 < made.wait <= FetchPolicy().max_wait


def test_the_speed_follows_the_samples() -> None:
    speed = FetchSpeed(weight=0.5)
    assert speed.planned_with() == 0.0
    speed.observe(blocks=10, took=seconds(1))
    assert speed.planned_with() == pytest.approx(10.0)
    speed.observe(blocks=30, took=seconds(1))
    assert speed.planned_with() == pytest.approx(20.0)


def test_a_single_block_measures_latency_and_is_not_counted() -> None:
    speed = FetchSpeed()
    speed.observe(blocks=1, took=seconds(1))
    assert speed.planned_with() == 0.0


def test_a_store_that_was_slow_is_tried_again_after_some_loads() -> None:
    speed = FetchSpeed(probe_every=4)
    speed.observe(blocks=10, took=seconds(10))
    assert [speed.planned_with() for _ in range(5)] == [1.0, 1.0, 1.0, 0.0, 1.0]
