"""Paged attention behind the transformers attention interface.

A model calls `larder_paged` once a layer with the K and V of the new rows. These go into the pool first, then every row attends to
the pool by (block table, length) alone: what a row sees does not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import prefill_node.model.offline  # noqa: F401  before torch and transformers
from prefill_node.engine.batch import Batch

NAME = "larder_paged"


class GatheredAttention:
    """On any torch device, from torch's own operators: each sequence's KV is gathered, each row of `rows_alone` batches attends by a
    call of its own. The reference for the kernels, and the path of devices that have none yet. One forward pass over one batch."""

    def __init__(self, kv: torch.Tensor, batch: Batch, *, rows_alone: bool) -> None:
        self._kv = kv
        self._batch = batch
        self._rows_alone = rows_alone
        self._used = int((batch.write_blocks >= 0).sum())  # padding rows stand at the end
        self._blocks = torch.from_numpy(batch.write_blocks[: self._used]).to(kv.device, torch.long)
        self._offsets = torch.from_numpy(batch.write_offsets[: self._used]).to(kv.device, torch.long)
        self._block_tokens = kv.shape[4]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        """query [query_heads, T, head_dim], key and value [kv_heads, T, head_dim], after RoPE. Returns [T, query_heads, head_dim]."""
        kv = self._kv
        kv[self._blocks, layer, 0, :, self._offsets] = key[:, : self._used].transpose(0, 1).to(kv.dtype)
        kv[self._blocks, layer, 1, :, self._offsets] = value[:, : self._used].transpose(0, 1).to(kv.dtype)
        out = torch.zeros(query.shape[1], query.shape[0], query.shape[2], dtype=query.dtype, device=query.device)
        for index, (first, count) in enumerate(self._batch.spans):
            pieces = [(row, 1) for row in range(first, first + count)] if self._rows_alone else [(first, count)]
            for row, rows in pieces:
                length = int(self._batch.lengths[row + rows - 1])
                table = torch.from_numpy(self._batch.tables[index, : -(-length // self._block_tokens)]).to(kv.device, torch.long)
                past = kv[table, layer].transpose(0, 1).transpose(1, 2)  # [2, kv_heads, blocks, block_tokens, head_dim]
                past = past.reshape(2, past.shape[1], -1, past.shape[4])[:, :, :length].to(query.dtype)
                out[row : row + rows] = _attend_span(query[:, row : row + rows], past[0], past[1], scaling).transpose(0, 1)
        return out


def _attend_span(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """The rows of `query` are the last of the sequence: row i of n sees keys [0, length - n + i]."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    rows, length = query.shape[1], keys.shape[1]
    mask = None
    if rows > 1:
        mask = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)
    return torch.nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, scale=scaling)[0]


def _paged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    larder: GatheredAttention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return larder.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Which keys a row sees follows from its length."""


def plug_into(module: Any) -> None:
    """Make a transformers causal language model attend through `larder_paged`; its forward then needs `larder=` a GatheredAttention."""
    AttentionInterface.register(NAME, _paged)
    AttentionMaskInterface.register(NAME, _no_mask)
    module.set_attn_implementation(NAME)
