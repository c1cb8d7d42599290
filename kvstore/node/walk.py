"""A walk through every block that a node has, without holding up its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from kvstore.core.events.questions import AnswerList, ListRequested, OwnedBlock
from kvstore.ids import KeySpace

if TYPE_CHECKING:
    from kvstore.node.node import Node

_STEP = 256
"""Blocks: a millisecond or two."""


async def walk(node: Node) -> AsyncGenerator[tuple[KeySpace, OwnedBlock], None]:
    """Blocks that are here all the time come exactly once, those of one key space after another; others of the loop have their turn after
    each step."""
    cursor = None
    while True:
        answer = await node.ask(ListRequested(request_id=node.next_request_id(), cursor=cursor, at_most=_STEP), AnswerList)
        for owned in answer.blocks:
            assert answer.key_space is not None
            yield answer.key_space, owned
        cursor = answer.cursor
        if cursor is None:
            return
        await asyncio.sleep(0)
