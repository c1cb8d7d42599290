"""Runs a step plan on the device: at most one forward pass for the decode rows and one for the prefill chunks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

import prefill_node.model.offline  # noqa: F401  before torch
from kvstore.codec import compiling_alone
from prefill_node.engine import kernels
from prefill_node.engine.attention import Attention, GatheredAttention, plug_into
from prefill_node.engine.batch import Batch, make_batch
from prefill_node.engine.kernel_attention import KernelAttention
from prefill_node.engine.packed_layers import can_pack, pack
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.scheduler import Span
from prefill_node.engine.team import Team
from prefill_node.model.load import LoadedModel

ROW_TILE = 16
"""Where torch computes the linear layers, decode rows are padded to a multiple of this: a matrix product keeps the shape in which its
rows are independent (on the CPU, products of 1 to 15 fp32 rows differ in their last bits, from 16 on they do not)."""


class Runner:
    """Used by the engine thread alone."""

    def __init__(self, model: LoadedModel, pool: PoolTensor, *, threads: int) -> None:
        self._model = model
        self._pool = pool
        self._threads = threads
        self._block_tokens = model.layout.block_tokens
        self._team: Team | None = None
        plug_into(model.module)
        if can_pack(model.module, model.layout, device=model.device):
            self._team = Team(threads)
            pack(model.module, model.layout, self._team)
            with compiling_alone(kernels.__file__):
                KernelAttention.compile(pool, self._team)
        self._tile = 1 if self._team else ROW_TILE

    @property
    def uses_kernels(self) -> bool:
        """Our own kernels compute; otherwise torch's operators do."""
        return self._team is not None

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Everything below runs inside this, in one thread."""
        # Beside our own team a second one of torch's would only fight for the cores: what is left to torch is element by element.
        torch.set_num_threads(1 if self._team else self._threads)
        yield

    def close(self) -> None:
        if self._team:
            self._team.close()

    def run_rows(self, spans: Items[Span]) -> dict[int, np.ndarray]:
        """Compute the spans as decode rows. Returns the float32 logits [vocab] after the last row of each span that ends its
        sequence's tokens, by index of the span."""
        batch = make_batch(spans, block_tokens=self._block_tokens, row_multiple=self._tile)
        wanted = [index for index, span in enumerate(spans) if span.start + span.count == len(span.sequence.tokens)]
        last = [batch.spans[index][0] + batch.spans[index][1] - 1 for index in wanted]
        with self._awake():
            hidden = self._forward(batch, rows_alone=True)
            if not wanted:
                return {}
            chosen = hidden[torch.tensor(last + [last[0]] * (-len(last) % self._tile), device=hidden.device)]
            logits = self._model.module.lm_head(chosen)[: len(wanted)].float().cpu().numpy()
        return dict(zip(wanted, logits, strict=True))

    def run_chunks(self, spans: Items[Span]) -> None:
        """Compute the spans as prefill chunks; only their KV is wanted."""
        batch = make_batch(spans, block_tokens=self._block_tokens)
        with self._awake():
            self._forward(batch, rows_alone=False)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        with torch.inference_mode(), self._team.awake() if self._team else nullcontext():
            yield

    def _forward(self, batch: Batch, *, rows_alone: bool) -> torch.Tensor:
        device = self._model.device
        attention: Attention
        if self._team:
            attention = KernelAttention(self._pool, batch, self._team)
        else:
            attention = GatheredAttention(self._pool.kv, batch, rows_alone=rows_alone)
        out = self._model.module.model(
            input_ids=torch.from_numpy(batch.token_ids)[None].to(device),
            position_ids=torch.from_numpy(batch.positions)[None].to(device),
            use_cache=False,
            larder=attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden
