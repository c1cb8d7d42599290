from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.units import parse_duration, parse_size


@pytest.mark.parametrize("text", ["9" * 400, "99999999T", "8388608T"])
def test_a_size_beyond_64_bits_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(ConfigError, match="too large for a size") as refusal:
        parse_size(text)
    assert len(str(refusal.value)) < 80
    assert parse_size("8388607T") == 8388607 << 40


@pytest.mark.parametrize("text", ["9" * 400, "99999999h"])
def test_a_duration_beyond_64_bits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="too large for a duration"):
        parse_duration(text)
