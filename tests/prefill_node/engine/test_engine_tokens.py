"""The engine's tokens against transformers' own `generate`."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefill_node.model.load import load_model


def _generate(folder, prompt, count):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_in_bf16_each_token_is_the_likeliest_of_transformers_but_for_rounding(architecture, tiny, tiny_folder, running):
    """Weights and KV are bf16, sums are float32: against bf16 weights in float32 throughout, only the rounding of KV differs."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(architecture), dtype=torch.bfloat16).float().eval()
    prompt = _prompt(3, 70)
    with running(tiny(architecture, "bfloat16")) as driver:
        answer = driver.tokens(prompt, max_new_tokens=40)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert behind.max() < 0.02 * logits.std()
    assert (behind == 0).float().mean() > 0.8


def test_a_model_in_several_files_with_a_head_of_its_own_gives_the_same_tokens(tiny_folder, running, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("qwen3"), dtype=torch.float32, tie_word_embeddings=False)
    torch.manual_seed(4)
    model.lm_head.weight.data.normal_(0.0, 0.15)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load_model(tmp_path, dtype="float32", block_tokens=8)
    assert not torch.equal(loaded.module.lm_head.weight, loaded.module.model.embed_tokens.weight)
    prompt = _prompt(5, 30)
    expected = _generate(tmp_path, prompt, 20)
    with running(loaded) as driver:
        assert driver.tokens(prompt, max_new_tokens=20) == expected
    assert expected != _generate(tiny_folder("qwen3"), prompt, 20)


def test_a_prompt_of_the_models_whole_context_in_chunks_gives_the_same_token(tiny, tiny_folder, running):
    """A step computes no more rows than its budget, however long the prompt, and the pool holds exactly one such sequence."""
    model = tiny("llama", block_tokens=32)
    prompt = _prompt(6, model.max_positions - 1)
    expected = _generate(tiny_folder("llama"), prompt, 1)
    with running(model, pool_blocks=model.max_positions // 32, chunk_tokens=128, step_tokens=160, exact_blocks=False) as driver:
        widest = []
        forward = driver.engine._runner._forward
        rows, chunk = forward.rows, forward.chunk
        forward.rows = lambda batch, last: (widest.append(batch.rows), rows(batch, last))[1]
        forward.chunk = lambda batch: (widest.append(batch.rows), chunk(batch))[1]
        assert driver.tokens(prompt, max_new_tokens=5) == expected  # one token fits, then the context is full
    assert sum(widest) == len(prompt)
    assert max(widest) <= 160
