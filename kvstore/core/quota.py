"""Quota: how many bytes of copies each namespace has and may have."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.ids import Namespace


class QuotaLedger:
    """Counts a copy from its reservation to the return of its room. A namespace without a limit is not limited."""

    def __init__(self, limits: Mapping[Namespace, int]) -> None:
        self._limits = dict(limits)
        self._used: dict[Namespace, int] = {}
        self.over: dict[Namespace, None] = {}
        """May have more than their limits allow, since these were lowered."""

    def used(self, namespace: Namespace) -> int:
        return self._used.get(namespace, 0)

    def limit(self, namespace: Namespace) -> int | None:
        return self._limits.get(namespace)

    def limits(self) -> dict[Namespace, int]:
        return dict(self._limits)

    def set_limit(self, namespace: Namespace, limit: int | None) -> None:
        """None: no limit."""
        if limit is None:
            self._limits.pop(namespace, None)
        else:
            self._limits[namespace] = limit
        if self.missing(namespace, 0):
            self.over[namespace] = None

    def missing(self, namespace: Namespace, size: int) -> int:
        """How many bytes the namespace must give back before `size` more fit; 0: they fit now."""
        limit = self._limits.get(namespace)
        return 0 if limit is None else max(0, self.used(namespace) + size - limit)

    def could_ever_fit(self, namespace: Namespace, size: int) -> bool:
        limit = self._limits.get(namespace)
        return limit is None or size <= limit

    def charge(self, namespace: Namespace, size: int) -> None:
        self._used[namespace] = self._used.get(namespace, 0) + size

    def refund(self, namespace: Namespace, size: int) -> None:
        left = self.used(namespace) - size
        assert left >= 0
        if left:
            self._used[namespace] = left
        else:
            del self._used[namespace]
