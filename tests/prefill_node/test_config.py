from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.codec import Rung
from kvstore.errors import ConfigError
from prefill_node.config import PrefillConfig


def test_rung_klt_needs_its_tables_and_a_step_that_a_header_can_hold() -> None:
    assert PrefillConfig(rung=Rung.KLT, calibration=Path("tables.klt")).klt_step == 3
    with pytest.raises(ConfigError, match="kvctl calibrate"):
        PrefillConfig(rung=Rung.KLT)
    for step in (0, 256):
        with pytest.raises(ConfigError, match="klt_step"):
            PrefillConfig(klt_step=step)
