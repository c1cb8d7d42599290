"""A bound on bytes that are under way."""

from __future__ import annotations

import asyncio


class ByteBudget:
    """Whoever takes more than is left waits, in order of arrival, unless nothing is taken: one that is larger than all passes alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._freed = asyncio.Condition()

    @property
    def taken(self) -> int:
        return self._taken

    def fits(self, size: int) -> bool:
        return self._taken == 0 or self._taken + size <= self._total

    async def take(self, size: int) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: self.fits(size))
            self._taken += size

    def take_now(self, size: int) -> None:
        """Without waiting, over the bound if need be: the caller has looked at `fits`."""
        self._taken += size

    async def give_back(self, size: int) -> None:
        async with self._freed:
            self._taken -= size
            assert self._taken >= 0
            self._freed.notify_all()
