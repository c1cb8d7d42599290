"""Several pieces of work at once, and one without the cost of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def all_of(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Until all have ended. The first that raises ends the others; what it raised comes in a group when there were several."""
    if len(parts) == 1:
        await parts[0]
        return
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(part)
