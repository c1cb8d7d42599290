"""The forward pass as transformers runs the module, on any torch device, with attention over the paged pool."""

from __future__ import annotations

import numpy as np
import torch

from prefill_node.engine.attention import GatheredAttention, plug_into
from prefill_node.engine.batch import Batch
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.model.load import LoadedModel


class ModuleForward:
    row_multiple = 16
    """Decode rows are padded to a multiple of this: a matrix product keeps the shape in which its rows are independent (on the CPU,
    products of 1 to 15 fp32 rows differ in their last bits, from 16 on they do not)."""

    def __init__(self, model: LoadedModel, pool: PoolTensor) -> None:
        plug_into(model.module)
        self._model = model
        self._pool = pool

    def rows(self, batch: Batch, last: list[int]) -> np.ndarray:
        """float32 [len(last), vocabulary]: the logits after these rows of the batch."""
        hidden = self._hidden(batch, rows_alone=True)
        if not last:
            return np.empty((0, self._model.vocab_size), np.float32)
        padded = last + [last[0]] * (-len(last) % self.row_multiple)
        logits: np.ndarray = self._model.module.lm_head(hidden[torch.tensor(padded, device=hidden.device)]).float().cpu().numpy()
        return logits[: len(last)]

    def chunk(self, batch: Batch) -> None:
        """Only the keys and values in the pool."""
        self._hidden(batch, rows_alone=False)

    def close(self) -> None:
        pass

    def _hidden(self, batch: Batch, *, rows_alone: bool) -> torch.Tensor:
        device = self._model.device
        out = self._model.module.model(
            input_ids=torch.from_numpy(batch.token_ids)[None].to(device),
            position_ids=torch.from_numpy(batch.positions)[None].to(device),
            use_cache=False,
            larder=GatheredAttention(self._pool.kv, batch, rows_alone=rows_alone),
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden
