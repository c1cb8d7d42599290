"""One node under a seeded scheduler. `LARDER_SIM_SEEDS=5000` runs more; `LARDER_SIM_SEED=17` runs that one alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

ONLY = os.environ.get("LARDER_SIM_SEED")
SEEDS = [int(ONLY)] if ONLY else list(range(int(os.environ.get("LARDER_SIM_SEEDS", "200"))))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_with_an_ssd_keeps_its_promises_through_faults_and_crashes(seed: int, run_node: Callable[..., Any]) -> None:
    run_node(seed, steps=300, ssd=True, faults=True, gpu=seed % 3 == 0, host=seed % 4 != 1)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_a_node_with_an_ssd_keeps_its_promises_on_good_days(seed: int, run_node: Callable[..., Any]) -> None:
    run_node(seed, steps=300, ssd=True, faults=False)


@pytest.mark.parametrize("seed", SEEDS[:15])
def test_a_node_without_an_ssd_keeps_its_promises(seed: int, run_node: Callable[..., Any]) -> None:
    run_node(seed, steps=300, ssd=False, faults=True, gpu=seed % 2 == 0, host=seed % 4 != 0)


def test_the_same_seed_gives_the_same_run(run_node: Callable[..., Any]) -> None:
    first, second = (run_node(7, steps=200, ssd=True, faults=True) for _ in range(2))
    assert list(first.log) == list(second.log)
