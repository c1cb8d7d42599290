"""Paged attention on the CPU kernels."""

from __future__ import annotations

import numpy as np
import torch

from prefill_node.engine.batch import Batch
from prefill_node.engine.kernels import ATTEND, write_kv
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.team import Team


class KernelAttention:
    """One forward pass: an `Attention` that reads K and V straight from the pool, by (block table, length), with float32 sums.

    query, key and value are float32 with contiguous heads. The order of a row's sums depends on its length alone.
    """

    def __init__(self, pool: PoolTensor, batch: Batch, team: Team) -> None:
        self._pool = pool.array
        self._batch = batch
        self._team = team
        layout = pool.layout
        self._kv_heads = layout.kv_heads
        layer_elements = 2 * layout.kv_heads * layout.block_tokens * layout.head_dim
        self._layer_bytes = layer_elements * self._pool.itemsize
        self._scaling = np.zeros(1, np.float32)
        self._before = (self._pool.ctypes.data, layout.block_bytes)
        self._shape = (int(self._pool.itemsize == 2), layout.kv_heads)
        self._inside = (layout.block_tokens, layout.head_dim)
        self._rows = (
            batch.tables.ctypes.data,
            batch.tables.shape[1],
            batch.table_of.ctypes.data,
            batch.lengths.ctypes.data,
            batch.groups.ctypes.data,
        )
        self._items = len(batch.groups) * layout.kv_heads

    @staticmethod
    def compile(pool: PoolTensor, team: Team) -> None:
        """Have numba load or compile the kernels now, so that no request waits for it (seconds the first time on a machine)."""
        nothing = np.empty(0, np.int32)
        write_kv(0, 0, 0, 0, 0, 0, pool.array, 0, nothing, nothing)
        team.run(ATTEND, (), items=0)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        write_kv(
            key.data_ptr(),
            value.data_ptr(),
            key.stride(1),
            key.stride(0),
            value.stride(1),
            value.stride(0),
            self._pool,
            layer,
            self._batch.write_blocks,
            self._batch.write_offsets,
        )
        heads, rows, head_dim = query.shape
        out = torch.empty(rows, heads, head_dim)
        self._scaling[0] = scaling
        self._team.run(
            ATTEND,
            (
                query.data_ptr(),
                query.stride(1),
                query.stride(0),
                *self._before,
                layer * self._layer_bytes,
                *self._shape,
                heads // self._kv_heads,
                *self._inside,
                *self._rows,
                out.data_ptr(),
                self._scaling.ctypes.data,
            ),
            items=self._items,
        )
        return out
