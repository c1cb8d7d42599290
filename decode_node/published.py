"""How much of a prompt is readable from the store while a prefill node still publishes it."""

from __future__ import annotations

import asyncio


class PublishedPrefix:
    """Grows until it is over. Lives on the event loop; any number may wait."""

    def __init__(self) -> None:
        self.blocks = 0
        """Leading blocks known to be readable."""
        self.over = False
        """Nothing more will be published."""
        self._changed = asyncio.Event()

    def note(self, blocks: int) -> None:
        if blocks > self.blocks and not self.over:
            self.blocks = blocks
            self._tell()

    def end(self) -> None:
        """Harmless the second time."""
        self.over = True
        self._tell()

    async def beyond(self, blocks: int) -> bool:
        """Wait until more than `blocks` are readable; False: it is over and there are no more."""
        while self.blocks <= blocks and not self.over:
            await self._changed.wait()
        return self.blocks > blocks

    def _tell(self) -> None:
        told, self._changed = self._changed, asyncio.Event()
        told.set()
