"""How the store speaks of rungs: as one number, which it compares and never interprets (`ids.RungCode`). Pure."""

from __future__ import annotations

import re

from kvstore.codec.block_format import MAX_STEP, RUNG_CODES, RUNGS, Rung
from kvstore.errors import ConfigError
from kvstore.ids import AS_SEALED, BEHIND_RECODED, RungCode

_TARGET = re.compile(r"(\w+)(?::(\d+))?")


def rung_code(rung: Rung, *, step: int = 0) -> RungCode:
    """The code in the low byte, the step of rung klt above it. Above BEHIND_RECODED for every rung that is stepped down to."""
    return RungCode(RUNG_CODES[rung] | step << 8)


def rung_of(code: RungCode) -> tuple[Rung, int]:
    """(rung, step) of what `rung_code` made."""
    return RUNGS[code & 0xFF], code >> 8


def rung_name(code: RungCode) -> str:
    """For people."""
    if code in (AS_SEALED, BEHIND_RECODED):
        return "as sealed" if code == AS_SEALED else "behind re-coded"
    if code & 0xFF not in RUNGS:
        return f"rung {code}"
    rung, step = rung_of(code)
    return f"{rung}:{step}" if step else str(rung)


def parse_target(text: str) -> RungCode:
    """`int5`, `int4` or `klt:STEP`, as a rung to step down to. Raises ConfigError for anything else."""
    match = _TARGET.fullmatch(text)
    rung, step = (match[1], match[2]) if match is not None else ("", None)
    if rung == Rung.KLT and step is not None and 0 < int(step) <= MAX_STEP:
        return rung_code(Rung.KLT, step=int(step))
    if rung in (Rung.INT5, Rung.INT4) and step is None:
        return rung_code(Rung(rung))
    raise ConfigError(f"a block can be stepped down to int5, int4 or klt:STEP (STEP from 1 to {MAX_STEP}), not to {text!r}")
