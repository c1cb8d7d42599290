"""Runs a step plan on the device: at most one forward pass for the decode rows and one for the prefill chunks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager

import numpy as np
import torch

import prefill_node.model.offline  # noqa: F401  before torch
from prefill_node.engine.batch import make_batch
from prefill_node.engine.module_forward import ModuleForward
from prefill_node.engine.packed_forward import PackedForward
from prefill_node.engine.packed_model import can_pack
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.scheduler import Span
from prefill_node.model.load import LoadedModel


class Runner:
    """Used by the engine thread alone."""

    def __init__(self, model: LoadedModel, pool: PoolTensor, *, threads: int) -> None:
        self._block_tokens = model.layout.block_tokens
        self._forward: PackedForward | ModuleForward
        if can_pack(model.module, model.layout, device=model.device):
            self._forward = PackedForward(model, pool, threads=threads)
            # Beside our own team a second one of torch's would only fight for the cores: what is left to torch is element by element.
            self._torch_threads = 1
        else:
            self._forward = ModuleForward(model, pool)
            self._torch_threads = threads

    @property
    def uses_kernels(self) -> bool:
        """Our own kernels compute; otherwise torch's operators do."""
        return isinstance(self._forward, PackedForward)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Everything below runs inside this, in one thread."""
        torch.set_num_threads(self._torch_threads)
        with torch.inference_mode():
            yield

    def close(self) -> None:
        self._forward.close()

    def run_rows(self, spans: Items[Span]) -> dict[int, np.ndarray]:
        """Compute the spans as decode rows. Returns the float32 logits [vocab] after the last row of each span that ends its
        sequence's tokens, by index of the span."""
        batch = make_batch(spans, block_tokens=self._block_tokens, row_multiple=self._forward.row_multiple)
        wanted = [index for index, span in enumerate(spans) if span.start + span.count == len(span.sequence.tokens)]
        logits = self._forward.rows(batch, [sum(batch.spans[index]) - 1 for index in wanted])
        return dict(zip(wanted, logits, strict=True))

    def run_chunks(self, spans: Items[Span]) -> None:
        """Compute the spans as prefill chunks; only their KV is wanted."""
        self._forward.chunk(make_batch(spans, block_tokens=self._block_tokens))
