"""Simulations in pytest's clothes; `sim.one_node` and its neighbours are the simulations themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim import one_node


@pytest.fixture
def run_node() -> Callable[..., one_node.SimulatedNode]:
    """run_node(seed, steps=..., ssd=..., faults=...): the finished run, or AssertionError with the seed and the last events."""
    return one_node.run
