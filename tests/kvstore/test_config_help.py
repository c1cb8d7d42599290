from __future__ import annotations

import re
from pathlib import Path

import pytest

from decode_node.config import DecodeConfig
from decode_node.gateway.config import GatewayConfig
from kvstore.config import load_config
from kvstore.config_help import example_toml
from kvstore.node.config import NodeConfig
from prefill_node.config import PrefillConfig


@pytest.mark.parametrize("cls", [NodeConfig, PrefillConfig, DecodeConfig, GatewayConfig])
def test_an_example_with_every_comment_taken_away_is_the_default(cls: type[object], tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(re.sub(r"^#(\w+ = )", r"\1", example_toml(cls, program="toy"), flags=re.MULTILINE))
    assert load_config(cls, file=file, flags={}, env={}) == cls()
