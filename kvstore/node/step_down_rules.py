"""Step-down rules as an operator writes them. Pure."""

from __future__ import annotations

import re

from kvstore.codec.rung_code import parse_target
from kvstore.core.step_down import StepDownRule
from kvstore.errors import ConfigError
from kvstore.units import Nanos, parse_duration

_RULE = re.compile(r"\s*(\S+)(?:\s+after\s+(\S+))?(?:\s+behind\s+(\d+))?\s*")


def parse_step_down(text: str) -> tuple[StepDownRule, ...]:
    """`int5, int4 after 1h behind 16` as rules, in the order given. Raises ConfigError."""
    rules = []
    for part in text.split(","):
        match = _RULE.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"step_down: a rule is RUNG [after TIME] [behind BLOCKS], such as 'int4 after 10m behind 16', not {part.strip()!r}"
            )
        after = Nanos(0) if match[2] is None else parse_duration(match[2])
        rules.append(StepDownRule(rung=parse_target(match[1]), after=after, keep_last=int(match[3] or 0)))
    return tuple(rules)
