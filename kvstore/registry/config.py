"""What can be set on the membership of one process."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.units import Nanos, milliseconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    cluster: str = "larder"
    """Names the keys in Redis; clusters of different names share a Redis without seeing one another."""
    lease_ttl: Nanos = seconds(6)
    """Of the member's lease. Renewed at a third of it; a member that missed it is suspect."""
    dead_after: Nanos = seconds(15)
    """How long a member stays suspect before it is dead and its stripes are copied."""
    forget_after: Nanos = seconds(600)
    """How long the record of a member that is dead or has left is kept for people to look at."""
    poll_every: Nanos = milliseconds(300)
    """Changes are announced; polling finds those whose announcement was lost."""
    call_timeout: Nanos = seconds(1)
    """Of one call of Redis; a longer one counts as Redis being away."""
    longest_pause: Nanos = seconds(2)
    """Between two attempts while Redis is away."""

    def __post_init__(self) -> None:
        if not self.cluster or any(letter in self.cluster for letter in "{}: \n"):
            raise ConfigError(f"registry.cluster must be a plain word: {self.cluster!r}")
        for key in ("lease_ttl", "dead_after", "forget_after", "poll_every", "call_timeout", "longest_pause"):
            if getattr(self, key) < milliseconds(1):
                raise ConfigError(f"registry.{key} must be at least 1 ms: {getattr(self, key)} ns")

    @property
    def renew_every(self) -> Nanos:
        return Nanos(self.lease_ttl // 3)
