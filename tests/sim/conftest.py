"""Simulations in pytest's clothes; `sim.one_node` and its neighbours are the simulations themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim import cluster, one_node


@pytest.fixture
def run_node() -> Callable[..., one_node.SimulatedNode]:
    """run_node(seed, steps=..., ssd=..., faults=...): the finished run, or AssertionError with the seed and the last events."""
    return one_node.run


@pytest.fixture
def run_cluster() -> Callable[..., cluster.Cluster]:
    """run_cluster(seed, nodes=..., ...): the finished run of that storm, or AssertionError with the seed and the last events."""
    return lambda seed, **storm: cluster.run_cluster(seed, cluster.Storm(**storm))
