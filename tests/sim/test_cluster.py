"""Several nodes, clients and a registry under one seed. `LARDER_SIM_SEEDS=5000` runs more; `LARDER_SIM_SEED=17` runs that one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sim import cluster

ONLY = os.environ.get("LARDER_SIM_SEED")
QUICK = 5
SEEDS = [int(ONLY)] if ONLY else list(range(int(os.environ.get("LARDER_SIM_SEEDS", QUICK))))


def storm_of(seed: int) -> dict[str, int]:
    """5 to 8 nodes at first; then in eight of ten runs, in one 9 to 19 and in one 20 to 50. Two or three replicas."""
    rng = Random(seed)
    few, some, many = 5 + seed % 4, rng.randint(9, 19), rng.randint(20, 50)
    nodes = few if seed < QUICK else rng.choices((few, some, many), (8, 1, 1))[0]
    return {"nodes": nodes, "replicas": 3 if seed % 4 == 0 else 2}


class Storms:
    """What the first seeds brought about, run once."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[dict[str, int], set[str], int]] = {}

    def seen(self, seed: int) -> tuple[dict[str, int], set[str], int]:
        if seed not in self._seen:
            run = cluster.run_cluster(seed, cluster.Storm(**storm_of(seed)))
            self._seen[seed] = (run.outcomes, set(run.reasons), run.reads)
        return self._seen[seed]


@pytest.fixture(scope="module")
def storms() -> Storms:
    return Storms()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_keeps_its_promises_through_a_storm_and_converges_after_it(seed: int, storms: Storms) -> None:
    storms.seen(seed)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_cluster_that_steps_blocks_down_gives_nobody_other_numbers_than_he_asked_for(seed: int, run_cluster: Callable[..., Any]) -> None:
    run = run_cluster(seed, nodes=4, replicas=2, step_down=True)
    assert run.reads > 0
    assert run.oracle.stepped_from, "nothing was stepped down"


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_on_good_days_every_put_is_acknowledged_as_asked_and_every_lease_can_be_read(seed: int, run_cluster: Callable[..., Any]) -> None:
    run = run_cluster(seed, **storm_of(seed), faults=False)
    assert run.outcomes["failed"] + run.outcomes["degraded"] == 0 or run.reasons
    assert not run.reasons.keys() - {"no_room", "quota", "pending"}, "only the room may be too small, or another writer at work"
    assert run.reads > 0


def test_storms_bring_about_what_they_are_for(storms: Storms) -> None:
    """Otherwise a simulation that never disturbs anybody would pass for a proof."""
    outcomes: dict[str, int] = {}
    reasons: set[str] = set()
    reads = 0
    for seed in range(QUICK):
        seen_outcomes, seen_reasons, seen_reads = storms.seen(seed)
        for outcome, count in seen_outcomes.items():
            outcomes[outcome] = outcomes.get(outcome, 0) + count
        reasons |= seen_reasons
        reads += seen_reads
    assert all(outcomes.values()), outcomes
    assert reasons >= {"unreachable", "timeout", "circuit_open", "no_room", "read"}
    assert reads > 100


def test_the_same_seed_gives_the_same_cluster_run_in_every_process(run_cluster: Callable[..., Any]) -> None:
    """A set of strings that decided an order would show here: another process, another order."""
    here = run_cluster(11, nodes=5).story()
    script = "from sim.cluster import Storm, run_cluster; print('\\n'.join(run_cluster(11, Storm(nodes=5)).story()))"
    paths = os.pathsep.join(path for path in (str(Path(__file__).parents[1]), *sys.path) if path)
    there = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert len(here) > 100
    assert there.stdout.splitlines() == here, there.stderr
