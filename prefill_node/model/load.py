"""A model folder as a module in memory, with everything about it that the store and the engine must agree on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import prefill_node.model.offline  # noqa: F401  before torch and transformers
from kvstore.core.layout import Layout
from kvstore.errors import ConfigError
from prefill_node.model.digest import model_digest
from prefill_node.model.resolve import model_name

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type` values whose blocks are norm, attention with rotary positions, norm, gated MLP, and whose KV is one K and one V a layer."""

ModelDtype = Literal["bfloat16", "float16", "float32"]
_DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    module: Any
    """A transformers *ForCausalLM in eval mode, weights in the layout's dtype."""
    layout: Layout
    model_digest: bytes
    """32 bytes over config and weights."""
    eos_token_ids: frozenset[int]
    max_positions: int
    """Longest sequence, prompt and answer together, that the position encoding was made for."""
    vocab_size: int
    query_heads: int
    name: str
    device: torch.device


def load_model(path: Path, *, device: str = "cpu", dtype: ModelDtype = "bfloat16", block_tokens: int = 32) -> LoadedModel:
    """Load the model in the folder `path` (as `resolve_model` returns it).

    Raises ConfigError for an architecture, a dtype or a device that cannot be used here.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    try:
        target = torch.device(device)
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers checks a config with exceptions of its own, too
        raise ConfigError(f"model: cannot read {path / 'config.json'}: {_one_line(error)}") from None
    _check_supported(config, path)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            str(path), config=config, dtype=_DTYPES[dtype], local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # as above
        raise ConfigError(f"model: cannot load the weights in {path}: {_one_line(error)}") from None
    if info["missing_keys"]:  # transformers would fill these with random numbers
        raise ConfigError(f"model: the weights in {path} lack {min(info['missing_keys'])} and {len(info['missing_keys']) - 1} more tensors")
    module.to(target).eval().requires_grad_(False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LoadedModel(
        module=module,
        layout=Layout(
            layers=config.num_hidden_layers,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_tokens=block_tokens,
            rope=_rope(config),
        ),
        model_digest=model_digest(path),
        eos_token_ids=_eos_token_ids(path, config),
        max_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        query_heads=config.num_attention_heads,
        name=model_name(path),
        device=target,
    )


def _check_supported(config: Any, path: Path) -> None:
    if config.model_type not in SUPPORTED:
        raise ConfigError(f"model: {path} is a {config.model_type!r} model; supported are {', '.join(SUPPORTED)}")
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True) or "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if window is not None and used and window < config.max_position_embeddings:
        raise ConfigError(f"model: {path} attends in a sliding window of {window} tokens, which block sharing does not support")
    # The whole sequence's length decides how its first tokens are rotated: they would be other blocks as it grows.
    if (rope := dict(getattr(config, "rope_parameters", None) or {}).get("rope_type")) == "longrope":
        raise ConfigError(f"model: {path} rotates positions by {rope!r}, which changes the blocks of a sequence as it grows")


def _rope(config: Any) -> tuple[tuple[str, str], ...]:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    return tuple(sorted((str(key), json.dumps(value, sort_keys=True)) for key, value in parameters.items()))


def _eos_token_ids(path: Path, config: Any) -> frozenset[int]:
    """generation_config.json wins: chat models end a turn with more tokens than config.json knows."""
    found = config.eos_token_id
    file = path / "generation_config.json"
    if file.is_file():
        try:
            found = json.loads(file.read_text()).get("eos_token_id", found)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"model: cannot read {file}: {_one_line(error)}") from None
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
