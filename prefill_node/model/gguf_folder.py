"""A GGUF file written out as a Hugging Face folder: weights in bf16 safetensors, config, tokenizer, chat template.

Done by hand because the transformers reader needs the accelerate package and keeps a quantization_config that makes other
engines dequantize weights that are not quantized any more.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

import prefill_node.model.offline  # noqa: F401  before transformers
from kvstore.errors import ConfigError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def write_folder(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into the existing `folder`. Deterministic: the same file gives the same bytes.

    Raises ConfigError for an architecture or tensor that this project does not run.
    """
    reader = GGUFReader(gguf)
    field = reader.get_field("general.architecture")
    architecture = str(field.contents()) if field else "unknown"
    if architecture not in _ARCHITECTURES:
        raise ConfigError(f"model: {gguf.name} has architecture {architecture!r}; supported are {', '.join(_ARCHITECTURES)}")
    scaling = reader.get_field(f"{architecture}.rope.scaling.type")
    if scaling is not None and scaling.contents() != "none":  # the transformers reader leaves it out without a word
        raise ConfigError(
            f"model: {gguf.name} scales its positions ({scaling.contents()}), which is read from Hugging Face folders only: use one"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    weights = {
        hf_name(tensor.name): _bf16(dequantize(tensor.data, tensor.tensor_type), tensor.name, architecture=architecture, config=config)
        for tensor in reader.tensors
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    fields = _without_origin(config.to_dict())
    fields |= {"architectures": [_ARCHITECTURES[architecture]], "dtype": "bfloat16", "tie_word_embeddings": "lm_head.weight" not in weights}
    fields.pop("quantization_config", None)
    if head_dim := reader.get_field(f"{architecture}.attention.key_length"):
        fields["head_dim"] = int(head_dim.contents())  # transformers reads it for some architectures only, and else has a default
    (folder / "config.json").write_text(json.dumps(fields, indent=1, sort_keys=True, default=str))
    special = {key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if fields.get(key) is not None}
    (folder / "generation_config.json").write_text(json.dumps(special, indent=1, sort_keys=True))
    tokenizer.save_pretrained(folder)
    saved = folder / "tokenizer_config.json"
    saved.write_text(json.dumps(_without_origin(json.loads(saved.read_text())), indent=1, sort_keys=True))


def hf_name(name: str) -> str:
    """The transformers name of a GGUF tensor. Raises ConfigError for one that has none."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        if match[2] in _IN_LAYER:
            return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    elif (match := re.fullmatch(r"(\w+)\.(weight|bias)", name)) and match[1] in _TOP:
        return f"{_TOP[match[1]]}.{match[2]}"
    raise ConfigError(f"model: the GGUF tensor {name} has no counterpart in the supported architectures")


def _bf16(weight: np.ndarray[Any, Any], name: str, *, architecture: str, config: Any) -> torch.Tensor:
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        # llama.cpp stores the two halves of each rotary pair side by side; transformers keeps them apart.
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        weight = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return torch.from_numpy(np.array(weight, dtype=np.float32, order="C")).to(torch.bfloat16)


def _without_origin(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what tells where and how the files were read: the same model has the same digest on every machine."""
    origin = {"_name_or_path", "_model_name_or_path", "is_local", "local_files_only", "gguf_file", "name_or_path"}
    return {key: value for key, value in fields.items() if key not in origin}
