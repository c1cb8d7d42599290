"""The forward pass on the CPU kernels."""

from __future__ import annotations

import numpy as np
import torch

from prefill_node.engine.batch import Batch
from prefill_node.engine.packed_model import pack
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.program import Program
from prefill_node.engine.team import Team
from prefill_node.model.load import LoadedModel

_NOTHING = np.empty(0, np.int32)


class PackedForward:
    """Takes the model's weights over. A row's bits depend on its own sequence alone, whatever the number of rows."""

    row_multiple = 1

    def __init__(self, model: LoadedModel, pool: PoolTensor, *, threads: int) -> None:
        self._team = Team(threads)
        self._model = pack(model.module)
        self._vocabulary = model.vocab_size
        self._pool = pool
        self._program = self._made(64)

    def rows(self, batch: Batch, last: list[int]) -> np.ndarray:
        """float32 [len(last), vocabulary]: the logits after these rows of the batch."""
        chosen = np.asarray(last, np.int32)
        self._run(batch, chosen)
        return self._program.logits[: len(chosen), : self._vocabulary].numpy().copy()

    def chunk(self, batch: Batch) -> None:
        """Only the keys and values in the pool."""
        self._run(batch, _NOTHING)

    def close(self) -> None:
        self._team.close()

    def _made(self, capacity: int) -> Program:
        return Program(self._model, self._pool, capacity=capacity, threads=self._team.threads)

    def _run(self, batch: Batch, chosen: np.ndarray) -> None:
        with self._team.awake():
            if batch.rows > self._program.capacity:
                self._program = self._made(1 << (batch.rows - 1).bit_length())
            program = self._program
            found = torch.nn.functional.embedding(torch.from_numpy(batch.token_ids), self._model.embedding)
            program.hidden[: batch.rows] = found
            cos, sin = self._model.rotary(program.hidden, torch.from_numpy(batch.positions)[None])
            self._team.run(program.prepare(batch, cos, sin, chosen))
