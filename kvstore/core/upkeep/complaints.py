"""Complaints about other stores: said when they begin, and not with every call while one is away."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.core.view import Member
from kvstore.errors import LarderError
from kvstore.units import Nanos, seconds

_AGAIN_AFTER = seconds(60)


class Complaints:
    def __init__(self, logger: logging.Logger, now: Callable[[], Nanos]) -> None:
        self._logger = logger
        self._now = now
        self._said: dict[str, tuple[Member, Nanos]] = {}
        self._unsaid = 0

    def about(self, member: Member, what: str, error: LarderError) -> None:
        """Logged once for each state of the member (its boot, address and what the view says of it), and then at most every minute."""
        key, now = f"{member.node_id} {what}", self._now()
        said = self._said.get(key)
        if said is not None and said[0] == member and now - said[1] < _AGAIN_AFTER:
            self._unsaid += 1
            return
        self._said[key] = member, now
        more = f" ({self._unsaid} more since the last word of this kind)" if self._unsaid else ""
        self._unsaid = 0
        self._logger.warning("%s: %s%s", key, error, more)
