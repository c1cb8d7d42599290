"""A transformers causal language model's weights as the CPU kernels want them. Weights stay in their dtype, activations are float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore.core.layout import Layout
from prefill_node.engine.packed_linear import PackedLinear, WeightRoom
from prefill_node.engine.vector_ir import LANES


@dataclass(frozen=True, slots=True)
class PackedNorm:
    weight: torch.Tensor
    """float32 [width]"""
    epsilon: float

    @classmethod
    def of(cls, norm: Any) -> PackedNorm:
        return cls(norm.weight.detach().to(torch.float32, copy=True), float(norm.variance_epsilon))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    before_attention: PackedNorm
    qkv: PackedLinear
    head_norms: tuple[PackedNorm, PackedNorm] | None
    """Of each head's queries and keys, where the model has them."""
    scaling: float
    out: PackedLinear
    before_mlp: PackedNorm
    gate_up: PackedLinear
    down: PackedLinear

    @classmethod
    def of(cls, layer: Any, room: WeightRoom) -> PackedLayer:
        attention = layer.self_attn
        qkv, out, gate_up, down = (PackedLinear.of(linears, room) for linears in _linears(layer))
        return cls(
            before_attention=PackedNorm.of(layer.input_layernorm),
            qkv=qkv,
            head_norms=(PackedNorm.of(attention.q_norm), PackedNorm.of(attention.k_norm)) if hasattr(attention, "q_norm") else None,
            scaling=float(attention.scaling),
            out=out,
            before_mlp=PackedNorm.of(layer.post_attention_layernorm),
            gate_up=gate_up,
            down=down,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModel:
    layers: tuple[PackedLayer, ...]
    norm: PackedNorm
    head: PackedLinear
    embedding: torch.Tensor
    """[vocabulary, hidden size] in the model's dtype."""
    rotary: Any
    """The model's own module: positions to cosines and sines."""
    query_heads: int
    width: int
    """Of the hidden state."""
    mlp_width: int


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


def pack(module: Any) -> PackedModel:
    """Takes the weights out of the module layer by layer, so that they are not in memory twice; it cannot be called any more. What is made
    are copies: one tensor of a loaded file kept would keep the whole file mapped."""
    room = WeightRoom([*(linears for layer in module.model.layers for linears in _linears(layer)), [module.lm_head]])
    layers = []
    while len(module.model.layers):
        layers.append(PackedLayer.of(module.model.layers[0], room))
        del module.model.layers[0]
    head = PackedLinear.of([module.lm_head], room)
    norm = PackedNorm.of(module.model.norm)
    embedding = module.model.embed_tokens.weight.detach().clone()
    module.lm_head = module.model.norm = module.model.embed_tokens = torch.nn.Identity()
    return PackedModel(
        layers=tuple(layers),
        norm=norm,
        head=head,
        embedding=embedding,
        rotary=module.model.rotary_emb,
        query_heads=module.config.num_attention_heads,
        width=module.config.hidden_size,
        mlp_width=module.config.intermediate_size,
    )


def _linears(layer: Any) -> tuple[list[Any], ...]:
    """Those whose outputs lie side by side, in the order of a pass."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]
