"""python tests/tiny_model.py OUT_DIR [--architecture llama|qwen2|qwen3|mistral]: a tiny random model as a Hugging Face folder.

Real in every part that the service looks at: safetensors weights, a byte-level BPE tokenizer trained on the texts below (so every
script survives encode and decode), special tokens, a chat template, a generation config. Runs on a CPU in about a second.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = (
    "The larder keeps what the kitchen has cooked. A cook who comes back finds it on the shelf and goes on.",
    "The quick brown fox jumps over the lazy dog, and the dog, being lazy, lets the fox jump again and again.",
    "A block is 32 tokens of keys and values; a chain of blocks is a prefix; a prefix is worth more than its parts.",
    "储藏室里放着厨房做好的东西。回来的厨师在架子上找到它，继续工作。你好，世界！",
    "Привет, мир. Γειά σου Κόσμε. こんにちは世界。 🙂🚀",
)
SIZE: dict[str, int] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}


def build_tiny_model(out: Path, *, architecture: str = "llama", seed: int = 0, **size: int) -> Path:
    """Write the folder and return it. `size` overrides entries of SIZE. The same arguments give the same weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    configs: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}
    fields: dict[str, Any] = {**SIZE, **size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    if architecture == "mistral":
        fields["sliding_window"] = None
    # Wide weights: random logits of a small model are else so flat that every greedy choice is a near tie.
    config = configs[architecture](**fields, initializer_range=0.15)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(0.0, 0.1)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    save_tiny_tokenizer(out, vocab_size=fields["vocab_size"])
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}))
    return out


def save_tiny_tokenizer(out: Path, *, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llama")
    arguments = parser.parse_args()
    print(build_tiny_model(arguments.out, architecture=arguments.architecture))


if __name__ == "__main__":
    main()
