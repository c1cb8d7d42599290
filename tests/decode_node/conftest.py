"""A small cluster in one process: real stores over real gRPC on loopback, real engines on a tiny random model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _sibling(name: str) -> ModuleType:
    """A module of tests/: with importlib import mode it is on no path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = _sibling("tiny_model").build_tiny_model(tmp_path_factory.mktemp("tiny"))
    return folder


@pytest.fixture(scope="session")
def compute_cluster() -> ModuleType:
    return _sibling("compute_cluster")


@pytest.fixture(scope="session")
def session_kitchen(compute_cluster: ModuleType) -> ModuleType:
    return _sibling("session_kitchen")


@pytest.fixture
def cluster(compute_cluster: ModuleType, tiny_folder: Path) -> Callable[..., Any]:
    """`async with cluster(stores=3) as c:`"""
    return partial(compute_cluster.opened_cluster, tiny_folder)


@pytest.fixture
def idle(compute_cluster: ModuleType) -> Callable[..., Any]:
    """Wait until the engine of a node holds nothing."""
    wait: Callable[..., Any] = compute_cluster.wait_until_idle
    return wait
