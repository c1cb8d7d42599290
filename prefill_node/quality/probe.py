"""One forward pass of a model over one stretch of text, with everything that calibration and judgement need to see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import prefill_node.model.offline  # noqa: F401  before torch and transformers
from prefill_node.model.load import LoadedModel

_NAME = "larder_probed"


@dataclass(slots=True)
class _Pass:
    """What the attention of one forward pass reads and leaves behind."""

    prefix: torch.Tensor | None
    kv: torch.Tensor
    query_squares: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    kv: torch.Tensor
    """[layers, 2, kv_heads, tokens, head_dim] in the weights' dtype: K after RoPE, V."""
    query_squares: torch.Tensor
    """[layers, query_heads, head_dim] float64: the sum over the tokens of each channel's square, after RoPE."""
    log_probabilities: torch.Tensor | None
    """[tokens, vocabulary] float32: row i is about the token after token i."""


class Probe:
    """Runs the model with an attention of its own. Plugs itself into `model.module`, which no engine may use afterwards."""

    def __init__(self, model: LoadedModel) -> None:
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, _no_mask)
        model.module.set_attn_implementation(_NAME)
        self.model = model

    @torch.inference_mode()
    def observe(self, token_ids: list[int], *, prefix: torch.Tensor | None = None, score: bool = False) -> Observation:
        """Run `token_ids` behind `prefix`, the KV [layers, 2, kv_heads, length, head_dim] of the tokens before them.

        `score` computes the logits too. Cost: one prefill of the tokens; memory for 4 bytes x vocabulary a scored token.
        """
        layout = self.model.layout
        start = 0 if prefix is None else prefix.shape[3]
        dtype = self.model.module.dtype
        shape = (layout.layers, 2, layout.kv_heads, len(token_ids), layout.head_dim)
        seen = _Pass(
            None if prefix is None else prefix.to(dtype),
            torch.empty(shape, dtype=dtype),
            torch.zeros(layout.layers, self.model.query_heads, layout.head_dim, dtype=torch.float64),
        )
        ids = torch.tensor([token_ids])
        positions = torch.arange(start, start + len(token_ids))[None]
        hidden = self.model.module.model(input_ids=ids, position_ids=positions, use_cache=False, larder=seen).last_hidden_state[0]
        logs = torch.log_softmax(self.model.module.lm_head(hidden).float(), dim=-1) if score else None
        return Observation(kv=seen.kv, query_squares=seen.query_squares, log_probabilities=logs)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    larder: _Pass,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    layer = module.layer_idx
    larder.kv[layer, 0], larder.kv[layer, 1] = key[0], value[0]
    larder.query_squares[layer] = query[0].square().sum(1)
    mask = None
    if larder.prefix is not None:
        key = torch.cat([larder.prefix[layer, 0][None], key], dim=2)
        value = torch.cat([larder.prefix[layer, 1][None], value], dim=2)
        rows, length = query.shape[2], key.shape[2]
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """What a row sees follows from the lengths."""
