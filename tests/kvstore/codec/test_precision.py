"""What belongs to a layout's identity, and what does not."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore.codec.block_format import Rung
from kvstore.codec.precision import Precision, parse_layer_rungs
from kvstore.core.layout import Layout
from kvstore.errors import ConfigError

LAYOUT = Layout(layers=4, kv_heads=1, head_dim=8, dtype="bfloat16", rope=(("theta", "1e4"),))


def test_other_numbers_are_another_layout_and_equal_numbers_the_same() -> None:
    different = [
        Precision(rung=Rung.RAW).text(b""),
        Precision(rung=Rung.INT8).text(b""),
        Precision(rung=Rung.INT4).text(b""),
        Precision(rung=Rung.INT4, group=32).text(b""),
        Precision(rung=Rung.INT4, exact_tokens=0).text(b""),
        Precision(rung=Rung.INT4, layer_rungs={0: Rung.INT8}).text(b""),
        Precision(rung=Rung.KLT).text(b"a"),
        Precision(rung=Rung.KLT).text(b"b"),
        Precision(rung=Rung.KLT, step=4).text(b"a"),
    ]
    prints = {dataclasses.replace(LAYOUT, precision=text).fingerprint for text in different}
    assert len(prints | {LAYOUT.fingerprint}) == len(different) + 1
    assert Precision(rung=Rung.LOSSLESS).text(b"") == Precision(rung=Rung.RAW, group=8).text(b"a")
    assert Precision(rung=Rung.INT4, step=7).text(b"a") == Precision(rung=Rung.INT4, layer_rungs={1: Rung.INT4}).text(b"")


def test_a_layer_that_is_not_there_is_a_configuration_error() -> None:
    precision = Precision(rung=Rung.INT4, layer_rungs=parse_layer_rungs("4:int8"))
    assert precision.widths(5) == ((4, 4),) * 4 + ((8, 7),)
    with pytest.raises(ConfigError, match="there are 4"):
        precision.widths(4)


@pytest.mark.parametrize("text", ["int8", "1:int8,", "a:int8", "1-2-3:int8", "1:klt", "99999:int8"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layer_rungs is a list"):
        parse_layer_rungs(text)
