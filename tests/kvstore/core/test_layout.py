from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core.layout import Layout
from kvstore.errors import ConfigError

LAYOUT = Layout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", rope=(("theta", "100000"), ("type", "default")))


@pytest.mark.parametrize(
    "changed",
    [
        {"layers": 31},
        {"kv_heads": 6},
        {"head_dim": 128},
        {"dtype": "float16"},
        {"block_tokens": 16},
        {"rope": (("theta", "10000"), ("type", "default"))},
        {"rope": ()},
        {"tensor_parallel": 3},
        {"precision": "int8"},
    ],
)
def test_each_part_of_the_layout_changes_the_fingerprint(changed: dict) -> None:
    assert replace(LAYOUT, **changed).fingerprint != LAYOUT.fingerprint


def test_the_fingerprint_is_the_same_for_ever() -> None:
    assert len(LAYOUT.fingerprint) == 32
    assert LAYOUT.fingerprint.hex() == "b97571a1e3f70709f3369ac0d9c6d05b53c29d691b404af2387dcdec2d8031b2"


def test_a_block_of_the_small_model_takes_as_many_bytes_as_the_design_says() -> None:
    assert LAYOUT.block_bytes == 32 * 23040
    assert replace(LAYOUT, tensor_parallel=3).block_bytes == LAYOUT.block_bytes // 3


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"dtype": "int7"}, {"tensor_parallel": 2}, {"rope": (("b", "1"), ("a", "2"))}, {"head_dim": -1}]
)
def test_an_impossible_layout_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="layout"):
        replace(LAYOUT, **wrong)
