from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from safetensors.torch import load_file

from kvstore.errors import ConfigError
from prefill_node.model.gguf_folder import hf_name
from prefill_node.model.load import load_model
from prefill_node.model.resolve import model_name, resolve_model
from prefill_node.model.tokenizer import load_tokenizer

PARTS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)


def write_tiny_gguf(folder, path, *, architecture, rope_scaling=None):
    """The tiny model in `folder` as llama.cpp would store it: names of its own, and a llama's rotary halves interleaved."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["head_dim"])
    if rope_scaling is not None:
        writer.add_rope_scaling_type(rope_scaling)
        writer.add_rope_scaling_factor(4.0)
    writer.add_vocab_size(config["vocab_size"])
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token.startswith("<|") else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    names |= {
        hf_name(f"blk.{i}.{part}.weight").removesuffix(".weight"): f"blk.{i}.{part}"
        for i in range(config["num_hidden_layers"])
        for part in PARTS
    }
    for name, weight in load_file(folder / "model.safetensors").items():
        array = weight.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = np.ascontiguousarray(array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape))
        module, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names[module]}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tiny_folder, tmp_path_factory):
    return write_tiny_gguf(tiny_folder("llama"), tmp_path_factory.mktemp("gguf") / "Tiny.gguf", architecture="llama")


def test_a_gguf_file_is_converted_once_into_an_equal_model(tiny_gguf, tiny_folder, tmp_path):
    folder = resolve_model(str(tiny_gguf), cache_dir=tmp_path)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tiny_gguf), cache_dir=tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert model_name(folder) == "Tiny"
    original, converted = load_file(tiny_folder("llama") / "model.safetensors"), load_file(folder / "model.safetensors")
    assert original.keys() == converted.keys()
    for name, weight in original.items():
        assert torch.equal(weight.to(torch.bfloat16), converted[name]), name
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = load_model(folder)
    assert model.eos_token_ids == {2}
    tokenizer = load_tokenizer(folder)
    for text in ("Hello, larder.", "你好，世界！🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_gguf_file_with_biases_or_head_norms_gives_the_same_logits(architecture, tiny_folder, tmp_path):
    original = tiny_folder(architecture)
    folder = resolve_model(str(write_tiny_gguf(original, tmp_path / "Tiny.gguf", architecture=architecture)), cache_dir=tmp_path)
    tokens = torch.arange(3, 40)[None]
    ours, theirs = (load_model(path).module(tokens).logits for path in (folder, original))
    assert torch.equal(ours, theirs)


def test_a_gguf_file_that_scales_its_positions_is_refused(tiny_folder, tmp_path):
    scaled = write_tiny_gguf(tiny_folder("qwen2"), tmp_path / "Long.gguf", architecture="qwen2", rope_scaling=RopeScalingType.YARN)
    with pytest.raises(ConfigError, match=r"Long\.gguf scales its positions \(yarn\)"):
        resolve_model(str(scaled), cache_dir=tmp_path)
    plain = write_tiny_gguf(tiny_folder("qwen2"), tmp_path / "Plain.gguf", architecture="qwen2", rope_scaling=RopeScalingType.NONE)
    assert resolve_model(str(plain), cache_dir=tmp_path).is_dir()


def test_processes_that_start_together_share_one_conversion(tiny_gguf, tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model(str(tiny_gguf), cache_dir=tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert sorted(path.suffix for path in (tmp_path / "models").iterdir()) == ["", ".lock"]


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        resolve_model(str(broken), cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_folder_is_taken_as_it_is(tiny_folder, tmp_path):
    assert resolve_model(str(tiny_folder()), cache_dir=tmp_path) == tiny_folder()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_is_refused_and_the_message_says_why(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text("{}")
    for name, message in (
        ("empty", r"no config\.json"),
        ("no_weights", r"no weights"),
        ("absent", "no folder"),
        ("absent.gguf", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_model(str(tmp_path / name), cache_dir=tmp_path)


def test_finding_a_model_and_its_tokenizer_imports_no_torch(tiny_folder):
    code = (
        "import sys; from pathlib import Path; from prefill_node.model.resolve import resolve_model, default_gguf; default_gguf();"
        "from prefill_node.model.tokenizer import load_tokenizer;"
        f"load_tokenizer(resolve_model({str(tiny_folder())!r}, cache_dir=Path('/nonexistent'))).encode('x');"
        "print([name for name in ('torch', 'transformers', 'llama_cpp') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
