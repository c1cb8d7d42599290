"""What is refused before any work, and what the refusal says."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from prefill_node.limits import Limits, check_namespace

LIMITS = Limits(max_positions=100, pool_tokens=320, vocabulary=50)


def test_a_prompt_within_the_limits_passes() -> None:
    LIMITS.check_prompt([0, 49], room_for=1)
    LIMITS.check_prompt([1] * 99, room_for=1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        LIMITS.check_prompt([], room_for=1)


def test_an_over_long_prompt_is_told_the_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"100 tokens; at most 99 fit into the model's context of 100"):
        LIMITS.check_prompt([1] * 100, room_for=1)


def test_a_small_pool_is_a_limit_too_and_named() -> None:
    small = Limits(max_positions=1000, pool_tokens=64, vocabulary=50)
    with pytest.raises(InvalidRequest, match=r"at most 64 fit into this node's pool"):
        small.check_prompt([1] * 65, room_for=0)


@pytest.mark.parametrize("token_id", [-1, 50, 2**31])
def test_an_unknown_token_id_is_named(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"token id {token_id} is unknown: the model's ids are 0 to 49"):
        LIMITS.check_prompt([1, token_id, 2], room_for=0)


@pytest.mark.parametrize("namespace", ["", "n" * 256, "名" * 86])
def test_a_namespace_must_have_1_to_255_bytes(namespace: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 255 bytes"):
        check_namespace(namespace)


def test_a_namespace_of_any_script_passes() -> None:
    check_namespace("名" * 85)
