"""Garbage: cycles are looked for among what is new, often, and among everything, rarely.

Python's collector goes through all objects that ever lived through it: 150 ms for a node of 500,000 blocks, while nobody is served.
What has lived through one look here is put aside; it goes when its last reference goes, as nearly everything does, and a cycle of such
objects waits for the next whole look.
"""

from __future__ import annotations

import asyncio
import gc

from kvstore.units import Nanos, milliseconds, seconds, to_seconds


async def collect_garbage(*, every: Nanos = milliseconds(250), all_of_it_every: Nanos = seconds(3600)) -> None:
    """Never returns. Cost of a look: some 80 ns for each object that came since the last one and still lives."""
    try:
        while True:
            gc.unfreeze()
            for _ in range(max(1, all_of_it_every // every)):
                gc.collect()
                gc.freeze()
                await asyncio.sleep(to_seconds(every))
    finally:
        gc.unfreeze()
