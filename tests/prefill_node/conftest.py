"""Tiny random models, built once a test session, and an engine driver."""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from kvstore.ids import BlockHash
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.loop import Engine
from prefill_node.engine.request import EngineEvent, EngineRequest, FailedOut, FinishedOut, SamplingParams, Sealer, TokenOut
from prefill_node.model.load import LoadedModel, load_model

torch.set_num_threads(1)


def _tiny_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_model", Path(__file__).parents[1] / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def folder(architecture: str = "llama") -> Path:
        if architecture not in built:
            built[architecture] = _tiny_model().build_tiny_model(tmp_path_factory.mktemp(architecture), architecture=architecture)
        return built[architecture]

    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """A new LoadedModel each call: engines change the module."""

    def load(architecture: str = "llama", dtype: str = "float32", *, block_tokens: int = 8) -> LoadedModel:
        return load_model(tiny_folder(architecture), dtype=dtype, block_tokens=block_tokens)

    return load


class Driver:
    """One engine, driven and listened to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._count = 0
        self._lock = threading.Lock()

    def submit(self, token_ids: list[int], *, max_new_tokens: int = 0, **fields: object) -> queue.SimpleQueue[EngineEvent]:
        with self._lock:
            self._count += 1
            name = str(fields.pop("request_id", f"r{self._count}"))
        events: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        fields.setdefault("first_output", len(token_ids))
        fields.setdefault("chain_root", BlockHash(b"r" * 32))
        request = EngineRequest(request_id=name, token_ids=token_ids, max_new_tokens=max_new_tokens, **fields)  # type: ignore[arg-type]
        self.engine.submit(request, events.put)
        return events

    @staticmethod
    def collect(events: queue.SimpleQueue[EngineEvent]) -> list[EngineEvent]:
        found = []
        while True:
            found.append(events.get(timeout=30))
            if isinstance(found[-1], FinishedOut | FailedOut):
                return found

    def tokens(self, token_ids: list[int], *, max_new_tokens: int, **fields: object) -> list[int]:
        events = self.collect(self.submit(token_ids, max_new_tokens=max_new_tokens, **fields))
        assert isinstance(events[-1], FinishedOut), events[-1]
        return [event.token_id for event in events if isinstance(event, TokenOut)]


@pytest.fixture
def running() -> Callable[..., object]:
    """`with running(model, sealer=..., **config) as driver:` an engine that is stopped at the end."""

    @contextmanager
    def run(model: LoadedModel, *, sealer: Sealer | None = None, **config: int) -> Iterator[Driver]:
        fields = {"pool_blocks": 64, "max_batch": 16, "chunk_tokens": 32, "step_tokens": 64, "threads": 1, **config}
        engine = Engine(model, EngineConfig(**fields), sealer=sealer)
        engine.start()
        try:
            yield Driver(engine)
        finally:
            engine.stop()

    return run


@pytest.fixture(scope="session")
def sampled() -> SamplingParams:
    return SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=7)
