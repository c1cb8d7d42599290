"""What an operator can set on repair: how fast copies are made for new owners, and how often replicas are compared."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.units import MIB, Bytes, Nanos, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairConfig:
    rate: Bytes = Bytes(64 * MIB)
    """Bytes a second that this node sends to new owners, beside its readers; 0: it repairs nothing by itself."""
    delay: Nanos = seconds(2)
    """After a change of the view, before copies are made: a node that only restarts is back by then, and changes that come together are
    one."""
    anti_entropy_every: Nanos = seconds(60)
    """In this time all replicas of what is here are compared once; 0: never."""
    drop_surplus: bool = True
    """Whether copies that are not this node's by the present view go, once each owner has read its own back."""
    takeover_steps: int = 4
    """In how many steps a new node takes over the stripes that fall to it, each when the one before is filled; 1: all at once."""
    takeover_step_limit: Nanos = seconds(120)
    """A step is not waited for longer than this."""

    hot_rate: int = 100
    """Acquires a second of one stripe on one node from which it is hot: its readers take turns among its replicas, and it gets more of
    them for a time, where there is spare room."""
    hot_replicas: int = 1
    """How many more replicas a hot stripe may get; 0: none."""
    hot_ttl: Nanos = seconds(60)
    """How long after it was last found hot. At most 64 stripes of a cluster are hot at one time."""

    def __post_init__(self) -> None:
        if self.rate < 0 or self.delay < 0 or self.anti_entropy_every < 0:
            raise ConfigError("repair.rate, repair.delay and repair.anti_entropy_every must not be negative")
        if self.hot_rate < 1 or not 0 <= self.hot_replicas <= 8 or self.hot_ttl < seconds(1):
            raise ConfigError("repair.hot_rate must be at least 1, repair.hot_replicas 0 to 8, repair.hot_ttl at least 1s")
        if not 1 <= self.takeover_steps <= 100 or self.takeover_step_limit <= 0:
            raise ConfigError("repair.takeover_steps must be 1 to 100, repair.takeover_step_limit above 0")
