"""What an operator can set on a decode node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstore.errors import ConfigError
from kvstore.units import Nanos, milliseconds
from prefill_node.config import ComputeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(ComputeConfig):
    node_id: str = "decode"
    """Name of this member, stable over restarts. Unique in the cluster."""
    roles: Literal["decode", "both"] = "decode"
    """both: takes prompts as a prefill node does, too; answers go first, prompts fill the rest of each step."""
    heartbeat_every: Nanos = milliseconds(200)
    """A stream without a token for this long gives a sign of life; at most 250ms, since the gateway takes silence for death."""
    load_patience: float = 0.25
    """Share of what computing a prefix takes that may be lost to a store that turns out slow, before the rest is computed."""

    def __post_init__(self) -> None:
        ComputeConfig.__post_init__(self)
        if not 0 < self.heartbeat_every <= milliseconds(250):
            raise ConfigError(f"heartbeat_every must be above 0 and at most 250ms: {self.heartbeat_every} ns")
        if not 0 < self.load_patience <= 1:
            raise ConfigError(f"load_patience must be above 0 and at most 1: {self.load_patience}")
