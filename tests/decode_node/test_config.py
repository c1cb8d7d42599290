"""Relations between the keys, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_node.config import DecodeConfig
from kvstore.codec import Rung
from kvstore.config import load_config
from kvstore.errors import ConfigError
from kvstore.units import milliseconds
from prefill_node.config import PrefillConfig


def test_keys_come_from_file_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('node_id = "decode-7"\nrung = "int4"\npool_blocks = 64\n')
    config = load_config(DecodeConfig, file=file, flags={"pool_blocks": "128"}, env={"LARDER_HEARTBEAT_EVERY": "100ms"})
    assert (config.node_id, config.rung, config.pool_blocks) == ("decode-7", Rung.INT4, 128)
    assert config.heartbeat_every == milliseconds(100)


def test_an_unknown_key_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text("pool_block = 64\n")
    with pytest.raises(ConfigError, match="pool_blocks"):
        load_config(DecodeConfig, file=file, flags={}, env={})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("node_id", ""),
        ("port", 70000),
        ("pool_blocks", 0),
        ("threads", -1),
        ("chunk_tokens", 100),
        ("heartbeat_every", milliseconds(300)),
        ("load_patience", 0.0),
    ],
)
def test_an_impossible_value_names_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        DecodeConfig(**{key: value})  # type: ignore[arg-type]


def test_a_prefill_node_checks_the_common_keys_too() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens"):
        PrefillConfig(chunk_tokens=33)
