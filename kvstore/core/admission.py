"""Admission: which blocks are worth a write to the SSD, or a place in the host tier again."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.index import Entry
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    demote_after_uses: int = 0
    """Leases a block must have had before it may be written to the SSD; 0: every block."""
    promote_after_uses: int = 2
    """Leases a block on SSD must have had before it is copied back to the host tier: one hit alone proves nothing."""

    def __post_init__(self) -> None:
        if self.demote_after_uses < 0 or self.promote_after_uses < 1:
            raise ConfigError(f"admission: demote_after_uses must be at least 0 and promote_after_uses at least 1: {self}")


class Admission:
    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.counted_uses = max(config.demote_after_uses, config.promote_after_uses)
        """Uses beyond this many make no difference and are not counted."""

    def demotes(self, entry: Entry) -> bool:
        return entry.uses >= self._config.demote_after_uses

    def promotes(self, entry: Entry) -> bool:
        return entry.uses >= self._config.promote_after_uses
