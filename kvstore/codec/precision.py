"""What of a codec decides the numbers that a sequence attends to: read from a node's configuration, and named in its layout. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.codec.block_format import BITS, MAX_COUNT, MAX_STEP, WHOLE_VECTOR, Rung
from kvstore.errors import ConfigError

GROUP = 64
"""Elements that share a scale: tokens of one key channel, channels of one value token."""

FIRST_EXACT_TOKENS = 4
"""Attention sinks: the first tokens of a sequence stay as they are. Those of later blocks do not."""

DEFAULT_STEP = 3
"""Of rung klt, with the base step that `kvctl calibrate` chooses (LOG.md)."""

_LAYERS = re.compile(r"\s*(\d+)(?:-(\d+))?\s*:\s*(\w+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Raises ConfigError for choices that no payload can hold or that the rung does not have."""

    rung: Rung
    group: int = GROUP
    exact_tokens: int = FIRST_EXACT_TOKENS
    """At the start of a sequence, within its first block."""
    layer_rungs: Mapping[int, Rung] = field(default_factory=dict)
    """Other widths of codes for single layers, of the rungs with codes of one width."""
    step: int = DEFAULT_STEP
    """Of rung klt: a multiple of the tables' base step."""

    def __post_init__(self) -> None:
        if not 0 < self.step <= MAX_STEP:
            raise ConfigError(f"step must be 1 to {MAX_STEP}, not {self.step}")
        if not 0 < self.group <= MAX_COUNT or self.group % WHOLE_VECTOR:
            raise ConfigError(f"group must be a multiple of {WHOLE_VECTOR} up to {MAX_COUNT}, not {self.group}")
        if self.exact_tokens < 0:
            raise ConfigError(f"exact_tokens must not be negative: {self.exact_tokens}")
        if self.layer_rungs and (self.rung not in BITS or not set(self.layer_rungs.values()) <= set(BITS)):
            raise ConfigError(f"layer_rungs gives layers of a rung of {', '.join(BITS)} another one of them")

    def widths(self, layers: int) -> tuple[tuple[int, int], ...]:
        """For each layer the bits of a code of its keys and of its values; empty where codes have no one width."""
        if any(layer >= layers for layer in self.layer_rungs):
            raise ConfigError(f"layer_rungs names layer {max(self.layer_rungs)}; there are {layers}")
        return tuple(BITS[self.layer_rungs.get(layer, self.rung)] for layer in range(layers)) if self.rung in BITS else ()

    def text(self, calibration: bytes) -> str:
        """Equal exactly when sequences attend to equal numbers. `calibration`: digest of the tables, of which only rung klt makes use."""
        if self.rung in (Rung.RAW, Rung.LOSSLESS):
            return "exact"
        parts = [self.rung.value, f"exact={self.exact_tokens}"]
        if self.rung is Rung.KLT:
            parts += [f"step={self.step}", f"tables={calibration.hex()}"]
        elif self.rung in BITS:
            parts += [f"group={self.group}", *(f"{layer}:{rung}" for layer, rung in sorted(self.layer_rungs.items()) if rung != self.rung)]
        return " ".join(parts)


def parse_layer_rungs(text: str) -> dict[int, Rung]:
    """`0-1:int8, 14:int6` as {0: int8, 1: int8, 14: int6}; the empty text as none. Raises ConfigError for anything else."""
    found: dict[int, Rung] = {}
    for part in text.split(",") if text.strip() else ():
        match = _LAYERS.fullmatch(part)
        if match is None or match[3] not in list(BITS) or int(match[2] or match[1]) >= MAX_COUNT:
            raise ConfigError(f"layer_rungs is a list such as 0-1:int8, 14:int6 with rungs of {', '.join(BITS)}; not {part.strip()!r}")
        found |= dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1), Rung(match[3]))
    return found
