"""A bound on bytes that are under way."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Whoever takes more than is left waits, in order of arrival, unless nothing is taken: one that is larger than all passes alone.

    Not a Condition: every block of a read gives back, and hardly ever does anybody wait.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        return self._taken

    def fits(self, size: int) -> bool:
        return self._taken == 0 or self._taken + size <= self._total

    async def take(self, size: int) -> None:
        if not self._waiting and self.fits(size):
            self._taken += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(size)  # it was let in while it was being cancelled
            else:
                self._let_in()  # those behind it
            raise

    def take_if_free(self, size: int) -> bool:
        """Without waiting, and not ahead of anybody who waits. False: nothing was taken."""
        if size and (self._waiting or not self.fits(size)):
            return False
        self._taken += size
        return True

    def take_now(self, size: int) -> None:
        """Without waiting, over the bound if need be: the caller has looked at `fits`."""
        self._taken += size

    def give_back(self, size: int) -> None:
        self._taken -= size
        assert self._taken >= 0
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self.fits(size):
                self._waiting.popleft()
                self._taken += size
                turn.set_result(None)
            else:
                break
