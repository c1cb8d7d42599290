"""Real processes on loopback: a tiny random model, and clusters of it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvstore.admin.local_cluster import ClusterPlan, LocalCluster
from kvstore.admin.stream_client import Stream, stream_chat

TINY_MODEL = Path(__file__).parents[1] / "tiny_model.py"
COMPUTE = (("threads", 1), ("pool_blocks", 128))
"""Two cores carry six processes here."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("tiny_model", TINY_MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = module.build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    assert isinstance(folder, Path)
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one of the machine for a real model, else a folder of this session."""
    named = os.environ.get("LARDER_CACHE_DIR")
    return Path(named) if named else tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def start_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LocalCluster]]:
    """Starts a cluster of the tiny model with the given plan; all are stopped at the end of the module."""
    started: list[LocalCluster] = []

    def start(**plan: object) -> LocalCluster:
        settings = {"folder": tmp_path_factory.mktemp("cluster"), "model": str(tiny_model), "compute": COMPUTE, **plan}
        cluster = LocalCluster(ClusterPlan(**settings))  # type: ignore[arg-type]
        started.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in started:
        cluster.stop()


class Client:
    """Asks the gateway of one cluster."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self.http = http
        self.model = model

    async def stream(self, text: str, *, max_tokens: int, on_token: Callable[[Stream], None] = lambda _: None, **body: object) -> Stream:
        messages = [{"role": "user", "content": text}]
        request = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **body}
        return await stream_chat(self.http, request, on_token=on_token)


@pytest.fixture(scope="session")
def connect() -> Callable[[LocalCluster], object]:
    @asynccontextmanager
    async def connected(cluster: LocalCluster) -> AsyncIterator[Client]:
        async with httpx.AsyncClient(base_url=cluster.gateway_url, timeout=60, trust_env=False) as http:
            yield Client(http, (await http.get("/v1/models")).json()["data"][0]["id"])

    return connected
