"""The engine's tokens against transformers' own `generate`."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM


def _generate(folder, prompt, count):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def _prompt(seed, length):
    generator = random.Random(seed)
    return [generator.randrange(3, 512) for _ in range(length)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_equal_those_of_transformers(architecture, tiny, tiny_folder, running):
    with running(tiny(architecture)) as driver:
        for length in (1, 7, 8, 9, 70, 100):
            prompt = _prompt(length, length)
            assert driver.tokens(prompt, max_new_tokens=20) == _generate(tiny_folder(architecture), prompt, 20)
