from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from kvstore.errors import ConfigError
from prefill_node.model.digest import model_digest
from prefill_node.model.load import load_model


@pytest.fixture
def copied(tiny_folder, tmp_path):
    """A tiny model to change."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)

    def change(**fields):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return change


def test_the_layout_says_what_a_block_is(tiny_folder):
    model = load_model(tiny_folder(), dtype="bfloat16", block_tokens=16)
    layout = model.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_tokens) == (3, 2, 16, "bfloat16", 16)
    assert ("rope_type", '"default"') in layout.rope
    assert (model.max_positions, model.vocab_size, model.query_heads) == (2048, 512, 6)
    assert model.eos_token_ids == {2}
    assert len(model.model_digest) == 32


def test_other_dtypes_and_block_sizes_have_other_fingerprints(tiny_folder):
    prints = {
        load_model(tiny_folder(), dtype=dtype, block_tokens=n).layout.fingerprint for dtype in ("bfloat16", "float32") for n in (16, 32)
    }
    assert len(prints) == 4


def test_another_rope_is_another_layout(copied, tiny_folder):
    folder = copied(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    assert load_model(folder).layout.fingerprint != load_model(tiny_folder()).layout.fingerprint


def test_the_digest_follows_the_content_and_not_the_place(copied, tiny_folder):
    folder = copied()
    (folder / "config.json").write_bytes((tiny_folder() / "config.json").read_bytes())
    before = model_digest(folder)
    assert before == model_digest(tiny_folder())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert model_digest(folder) != before


def test_a_digest_is_remembered_and_a_broken_memory_is_ignored(copied):
    folder = copied()
    first = model_digest(folder)
    cache = folder / "larder-digest.json"
    assert bytes.fromhex(json.loads(cache.read_text())["digest"]) == first
    cache.write_text("{")
    assert model_digest(folder) == first


def test_unsupported_architectures_are_refused_by_name(copied):
    with pytest.raises(ConfigError, match="gpt2"):
        load_model(copied(model_type="gpt2"))


def test_a_sliding_window_is_refused_unless_it_never_slides(copied):
    with pytest.raises(ConfigError, match="sliding window of 64"):
        load_model(copied(model_type="mistral", sliding_window=64, architectures=["MistralForCausalLM"]))
    assert load_model(copied(model_type="mistral", sliding_window=4096, architectures=["MistralForCausalLM"])).layout.layers == 3


def test_positions_that_depend_on_the_length_of_the_sequence_are_refused(copied):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    with pytest.raises(ConfigError, match="'longrope', which changes the blocks of a sequence as it grows"):
        load_model(copied(rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors}))


def test_an_impossible_device_or_dtype_is_refused(tiny_folder):
    with pytest.raises(ConfigError, match="device"):
        load_model(tiny_folder(), device="tpu9")
    with pytest.raises(ConfigError, match="dtype"):
        load_model(tiny_folder(), dtype="int8")


def test_truncated_weights_are_refused_in_one_line(copied):
    folder = copied()
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot load the weights") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_config_that_contradicts_itself_is_refused_in_one_line(copied):
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json") as caught:
        load_model(copied(hidden_size=97))
    assert "\n" not in str(caught.value)
    folder = copied(hidden_size=96)
    (folder / "generation_config.json").write_text("{bad")
    with pytest.raises(ConfigError, match=r"cannot read .*generation_config\.json"):
        load_model(folder)


def test_a_model_with_a_tensor_missing_is_refused(copied):
    folder = copied()
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_all_end_tokens_of_the_generation_config_count(copied):
    folder = copied()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model(folder).eos_token_ids == {2, 7}


def test_loading_a_model_leaves_no_file_in_the_temporary_folder(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    program = "import prefill_node.model.offline; import transformers.masking_utils"
    subprocess.run([sys.executable, "-c", program], env={**environment, "TMPDIR": str(tmp_path)}, check=True)
    assert list(tmp_path.iterdir()) == []
