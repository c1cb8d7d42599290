from __future__ import annotations

import json

import pytest

from kvstore.errors import ConfigError, InvalidRequest
from prefill_node.model.tokenizer import load_tokenizer


@pytest.mark.parametrize("text", ["plain words", "储藏室里放着东西", "🙂🚀 mixed 世界 Привет", "  spaces \n\n\tand tabs", ""])
def test_any_text_survives_encode_and_decode(text, tiny_folder):
    tokenizer = load_tokenizer(tiny_folder())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


def test_half_a_character_decodes_to_the_replacement_sign(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder())
    ids = tokenizer.encode("🚀")
    assert len(ids) > 1
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")


def test_the_chat_template_of_the_model_is_used_and_its_special_tokens_are_single_ids(tiny_folder):
    tokenizer = load_tokenizer(tiny_folder())
    messages = [{"role": "user", "content": "你好"}]
    assert tokenizer.render_chat(messages) == "<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert ids[0] == tokenizer.token_to_id("<|im_start|>") == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(messages)
    assert "<|im_" not in tokenizer.decode(ids)


def test_a_template_that_refuses_or_breaks_is_the_callers_error(tiny_folder, tmp_path):
    for file in tiny_folder().glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ messages[0].content + 1 }}"
    )
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="user first"):
        tokenizer.render_chat([{"role": "system", "content": "x"}])
    with pytest.raises(InvalidRequest):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_says_so(tiny_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_folder() / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([])


def test_a_broken_tokenizer_config_or_chat_template_is_a_config_error(tiny_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_folder() / "tokenizer.json").read_bytes())
    for broken in ("{bad", "[1]", '{"chat_template": [{"name": "default"}]}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"cannot read .*tokenizer_config\.json"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="no Jinja template"):
        load_tokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"nothing": 1}))
    with pytest.raises(ConfigError, match="cannot read"):
        load_tokenizer(tmp_path)
