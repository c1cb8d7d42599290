from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("choice", [{"group": 12}, {"exact_tokens": -1}, {"layer_rungs": "1-:int8"}, {"layer_rungs": "1:raw"}])
def test_a_precision_that_no_payload_can_hold_is_refused_at_start(choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefillConfig(rung=Rung.INT4, **choice)


def test_layers_with_rungs_of_their_own_are_for_the_rungs_with_codes_of_one_width() -> None:
    assert PrefillConfig(rung=Rung.INT4, layer_rungs="0-1:int8, 3:int6").precision.layer_rungs == {0: Rung.INT8, 1: Rung.INT8, 3: Rung.INT6}
    with pytest.raises(ConfigError, match="layer_rungs"):
        PrefillConfig(rung=Rung.RAW, layer_rungs="0:int8")
