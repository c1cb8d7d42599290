"""A model's forward pass as records of kernel operations, made once and run in one call: between the layers of a decode step nothing
of Python is left (it took a third of the step)."""

from __future__ import annotations

import numpy as np
import torch

from prefill_node.engine.batch import Batch
from prefill_node.engine.operations import operations
from prefill_node.engine.packed_linear import PackedLinear
from prefill_node.engine.packed_model import PackedLayer, PackedModel, PackedNorm
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.record import ARGUMENT, ITEMS, RECORD, ROWS, ROWS_OF_ITEM, address, float_bits, record

HEADS, ATTEND, OF_LAYER = 2, 3, 9
"""Places among the operations of a layer, and their number."""


class Program:
    """For batches of up to `capacity` rows. Holds the activations: what a pass leaves in `logits` is there until the next one."""

    def __init__(self, model: PackedModel, pool: PoolTensor, *, capacity: int, threads: int) -> None:
        self._model, self._pool, self._threads = model, pool, threads
        self.capacity = capacity
        first = model.layers[0]
        self.hidden = torch.empty(capacity, model.width)
        self._normed = torch.empty(capacity, model.width)
        self._heads = torch.empty(capacity, first.qkv.width)
        self._mixed = torch.empty(capacity, first.out.inputs)
        self._both = torch.empty(capacity, first.gate_up.width)
        self._gated = torch.empty(capacity, model.mlp_width)
        self._delta = torch.empty(capacity, first.down.width)
        self.logits = torch.empty(0, model.head.width)
        records = [operation for index, layer in enumerate(model.layers) for operation in self._layer(index, layer)]
        records += [self._norm(model.norm, behind=True), self._linear(model.head, self._normed, self.logits)]
        self._records = np.stack(records)
        body, self._end = len(model.layers) * OF_LAYER, len(records)
        layers = self._records[:body].reshape(len(model.layers), OF_LAYER, RECORD)
        self._heads_records, self._attend_records = layers[:, HEADS], layers[:, ATTEND]
        self._tail = self._records[body:]
        self._only_kv = body - OF_LAYER + HEADS + 1
        """Operations up to the last layer's keys and values."""
        # Items of a pass: the rows in units of these, times so many for each unit.
        linear = self._records[:, 0] == operations().linear
        self._unit = np.where(linear, self._records[:, ARGUMENT + 8], ROWS_OF_ITEM)
        panels, group = self._records[:, ARGUMENT + 4], np.maximum(self._records[:, ARGUMENT + 9], 1)
        self._each = np.where(linear, -(-panels // group), 1)

    def prepare(self, batch: Batch, cos: torch.Tensor, sin: torch.Tensor, chosen: np.ndarray) -> np.ndarray:
        """The records of one pass over the rows in `hidden`: those that leave logits of the `chosen` rows (int32) in order, or, when
        there are none, those that leave only keys and values in the pool. What is passed must stay alive until they have run.

        cos and sin: float32 [rows, head_dim], contiguous.
        """
        records, count = self._records, len(chosen)
        assert batch.rows <= self.capacity
        records[:, ROWS] = batch.rows
        self._tail[:, ROWS] = count
        records[:, ITEMS] = -(-records[:, ROWS] // self._unit) * self._each
        passing = (address(cos), address(sin), address(batch.write_blocks), address(batch.write_offsets))
        self._heads_records[:, ARGUMENT + 12 : ARGUMENT + 16] = passing
        tables = (address(batch.tables), batch.tables.shape[1], address(batch.table_of), address(batch.lengths), address(batch.groups))
        self._attend_records[:, ARGUMENT + 11 : ARGUMENT + 16] = tables
        self._attend_records[:, ITEMS] = len(batch.groups) * self._pool.layout.kv_heads
        if not count:
            return records[: self._only_kv]
        if count > len(self.logits):
            self.logits = torch.empty(count, self.logits.shape[1])
            self._tail[1, ARGUMENT + 5] = address(self.logits)
        self._tail[0, ARGUMENT + 7] = address(chosen)
        return records

    def _layer(self, index: int, layer: PackedLayer) -> list[np.ndarray]:
        model, pool, kernels = self._model, self._pool, operations()
        layout = pool.layout
        size = pool.array.itemsize
        here = address(pool.array) + index * 2 * layout.kv_heads * layout.block_tokens * layout.head_dim * size
        in_pool = (here, layout.block_bytes, layout.block_tokens, int(size == 2))
        query, key = layer.head_norms or (None, None)
        heads = record(
            kernels.heads,
            *(address(self._heads), layer.qkv.width, model.query_heads, layout.kv_heads, layout.head_dim),
            *(address(query and query.weight), address(key and key.weight), float_bits(query.epsilon if query else 0.0)),
            *in_pool,
        )
        attend = record(
            kernels.attend,
            *(address(self._heads), layer.qkv.width, model.query_heads // layout.kv_heads, layout.kv_heads, layout.head_dim),
            *in_pool,
            *(float_bits(layer.scaling), address(self._mixed)),
        )
        return [
            self._norm(layer.before_attention, behind=index > 0),
            self._linear(layer.qkv, self._normed, self._heads),
            heads,
            attend,
            self._linear(layer.out, self._mixed, self._delta),
            self._norm(layer.before_mlp, behind=True),
            self._linear(layer.gate_up, self._normed, self._both),
            record(kernels.gate, address(self._both), layer.gate_up.width, model.mlp_width, address(self._gated)),
            self._linear(layer.down, self._gated, self._delta),
        ]

    def _norm(self, norm: PackedNorm, *, behind: bool) -> np.ndarray:
        """`behind` another layer, whose output is to be added."""
        delta = (address(self._delta), self._delta.shape[1]) if behind else (0, 0)
        width = self._model.width
        return record(
            operations().norm,
            *(address(self.hidden), *delta, address(norm.weight), address(self._normed), width, float_bits(norm.epsilon)),
        )

    def _linear(self, linear: PackedLinear, x: torch.Tensor, out: torch.Tensor) -> np.ndarray:
        return linear_record(linear, x, out, threads=self._threads)


def linear_record(linear: PackedLinear, x: torch.Tensor, out: torch.Tensor, *, threads: int) -> np.ndarray:
    """x float32 [rows, inputs], out float32 [rows, at least linear.width]."""
    return record(
        operations().linear,
        *(address(x), x.shape[1], linear.inputs, address(linear.weight), linear.panels, address(out), out.shape[1]),
        *(int(linear.weight.dtype == torch.bfloat16), linear.row_block, linear.panels_of_item(threads), address(linear.bias)),
    )
