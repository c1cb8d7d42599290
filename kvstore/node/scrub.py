"""The background scrub: reads back every copy, one after the other, at a set rate, for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.core.events.verification import AnswerVerify, VerifyRequested
from kvstore.node.walk import walk
from kvstore.units import Bytes, Nanos, to_seconds

if TYPE_CHECKING:
    from kvstore.node.node import Node


async def scrub(node: Node, *, bytes_per_second: Bytes, pause: Nanos) -> None:
    """What does not read back as stored is quarantined by the core, which counts it and says so to the repair layer.

    A pass walks through the blocks in steps; what is gone by the time its turn comes costs nothing.
    `pause`: between two passes. Never returns.
    """
    while True:
        async for key_space, owned in walk(node):
            for tier in owned.tiers:
                verify = VerifyRequested(request_id=node.next_request_id(), key_space=key_space, hash=owned.block.hash, tier=tier)
                verdict = await node.ask(verify, AnswerVerify)
                await asyncio.sleep(verdict.checked_bytes / bytes_per_second)
        await asyncio.sleep(to_seconds(pause))
