"""The parts of a transformers decoder layer on the CPU kernels, put in place of the originals: the model's structure stays theirs.

Fewer, larger calls: a decode step of one row is some 1,400 torch operators in the original, and these took as long as all arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvstore.core.layout import Layout
from prefill_node.engine.attention import Attention
from prefill_node.engine.kernels import GATE, GATE_ROWS, normalize, rotate_rows
from prefill_node.engine.packed_linear import PackedLinear
from prefill_node.engine.team import Team
from prefill_node.engine.vector_ir import LANES


class WideEmbedding(nn.Module):
    """Stands in for an nn.Embedding: the table stays in the model's dtype, what is looked up is float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._table = embedding.weight.detach()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self._table).float()


class PackedNorm(nn.Module):
    """Stands in for a root-mean-square norm. float32 [..., width] -> the same shape."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self._weight = norm.weight.detach().float()
        self._epsilon = float(norm.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        normalize(x.data_ptr(), self._weight.data_ptr(), out.data_ptr(), x.numel() // width, width, self._epsilon)
        return out


class PackedMlp(nn.Module):
    """Stands in for a gated MLP with SiLU."""

    def __init__(self, mlp: Any, team: Team) -> None:
        super().__init__()
        self._team = team
        self._width = mlp.gate_proj.out_features
        self._gate_up = PackedLinear([mlp.gate_proj, mlp.up_proj], team)
        self._down = PackedLinear([mlp.down_proj], team)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self._gate_up(x)
        out = torch.empty(*x.shape[:-1], self._width)
        rows = out.numel() // self._width
        self._team.run(GATE, (both.data_ptr(), rows, self._width, out.data_ptr()), items=-(-rows // GATE_ROWS))
        down: torch.Tensor = self._down(out)
        return down


class PackedAttention(nn.Module):
    """Stands in for self-attention with rotary positions, with or without norms of queries and keys."""

    def __init__(self, attention: Any, team: Team, *, query_heads: int, kv_heads: int) -> None:
        super().__init__()
        self._layer = int(attention.layer_idx)
        self._scaling = float(attention.scaling)
        self._head_dim = int(attention.head_dim)
        self._heads = (query_heads, kv_heads, kv_heads)
        self._qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj], team)
        self._out = PackedLinear([attention.o_proj], team)
        self._norms = (PackedNorm(attention.q_norm), PackedNorm(attention.k_norm)) if hasattr(attention, "q_norm") else None

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], larder: Attention, **_: Any
    ) -> tuple[torch.Tensor, None]:
        rows, dim = hidden_states.shape[1], self._head_dim
        query_heads, kv_heads, _v = self._heads
        cos, sin = (x.data_ptr() for x in position_embeddings)
        qkv = self._qkv(hidden_states)[0].view(rows, sum(self._heads), dim)
        query, key, value = qkv.split(self._heads, dim=1)
        if self._norms is None:
            rotate_rows(qkv.data_ptr(), qkv.stride(0), rows, query_heads + kv_heads, dim, cos, sin)
        else:
            query, key = self._norms[0](query), self._norms[1](key)
            for part in (query, key):
                rotate_rows(part.data_ptr(), part.stride(0), rows, part.shape[1], dim, cos, sin)
        mixed = larder.attend(self._layer, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), self._scaling)
        return self._out(mixed.view(1, rows, query_heads * dim)), None


def can_pack(module: Any, layout: Layout, *, device: torch.device) -> bool:
    """The kernels work on the CPU in whole vectors, and know no float16 and no activation but SiLU."""
    config = module.config
    widths = (layout.block_tokens, layout.head_dim // 2, config.hidden_size, config.intermediate_size)
    return (
        device.type == "cpu"
        and layout.dtype != "float16"
        and config.hidden_act in ("silu", "swish")
        and all(width % LANES == 0 for width in widths)
    )


def pack(module: Any, layout: Layout, team: Team) -> None:
    """Replace the parts of a transformers causal language model; its weights stay in their dtype, everything else becomes float32.

    `forward` of its `model` needs contiguous position embeddings and `larder=` an Attention, and takes one batch row of tokens.
    """
    query_heads = module.config.num_attention_heads
    for layer in module.model.layers:
        layer.self_attn = PackedAttention(layer.self_attn, team, query_heads=query_heads, kv_heads=layout.kv_heads)
        layer.mlp = PackedMlp(layer.mlp, team)
        layer.input_layernorm = PackedNorm(layer.input_layernorm)
        layer.post_attention_layernorm = PackedNorm(layer.post_attention_layernorm)
    module.model.norm = PackedNorm(module.model.norm)
    head = PackedLinear([module.lm_head], team)
    module.model.embed_tokens = WideEmbedding(module.model.embed_tokens)
    module.lm_head = head
    module.float()
