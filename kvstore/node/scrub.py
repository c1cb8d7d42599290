"""The background scrub: reads back every copy, one after the other, at a set rate, for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvstore.core.events import AnswerList, AnswerVerify, ListRequested, VerifyRequested
from kvstore.units import Bytes, Nanos, to_seconds

if TYPE_CHECKING:
    from kvstore.node.node import Node


async def scrub(node: Node, *, bytes_per_second: Bytes, pause: Nanos) -> None:
    """What does not read back as stored is quarantined by the core, which counts it and says so to the repair layer.

    A pass goes by a list of the copies at its start, O(blocks) on the event loop; what is gone by the time its turn comes costs nothing.
    `pause`: between two passes. Never returns.
    """
    while True:
        listed = await node.ask(ListRequested(request_id=node.next_request_id()), AnswerList)
        copies = [(key_space, owned.block.hash, tier) for key_space, blocks in listed.blocks for owned in blocks for tier in owned.tiers]
        for key_space, digest, tier in copies:
            verify = VerifyRequested(request_id=node.next_request_id(), key_space=key_space, hash=digest, tier=tier)
            verdict = await node.ask(verify, AnswerVerify)
            await asyncio.sleep(verdict.checked_bytes / bytes_per_second)
        await asyncio.sleep(to_seconds(pause))
