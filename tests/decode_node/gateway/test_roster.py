"""The nodes of one role, and what is known of each since it started."""

from __future__ import annotations

import asyncio
import dataclasses

from decode_node.gateway.roster import Roster
from kvstore.clock import SystemClock
from kvstore.core.view import Member, MemberState, Role
from kvstore.ids import BootId, NodeId
from kvstore.units import milliseconds


class Connection:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def close(self) -> None:
        self.closed.set()


def test_a_node_that_is_back_at_the_same_address_is_a_new_one_of_which_nothing_is_known() -> None:
    async def scenario() -> None:
        polled = asyncio.Event()

        async def poll(connection: Connection) -> int:
            polled.set()
            return 7

        roster = Roster(
            "decode",
            roles={Role.DECODE},
            connect=lambda node_id, address: Connection(),
            poll=poll,
            poll_every=milliseconds(1),
            clock=SystemClock(),
        )
        before = Member(node_id=NodeId("d"), boot_id=BootId(b"a" * 16), role=Role.DECODE, address="127.0.0.1:1", state=MemberState.ACTIVE)
        async with asyncio.TaskGroup() as group:
            roster.follow([before], group)
            old = roster.nodes[before.node_id]
            await polled.wait()
            old.on_call_failed(SystemClock().now(), silent=True)
            roster.follow([dataclasses.replace(before, state=MemberState.SUSPECT)], group)
            assert roster.nodes[before.node_id] is old, "another state is no other node"
            with old.busy():
                roster.follow([dataclasses.replace(before, boot_id=BootId(b"b" * 16))], group)
                new = roster.nodes[before.node_id]
                assert new is not old
                assert (new.load, new.misses, new.in_flight) == (None, 0, 0)
                assert not old.backend.closed.is_set(), "its stream may be going on"
            await old.backend.closed.wait()
            roster.follow([], group)
            await new.backend.closed.wait()

    asyncio.run(asyncio.wait_for(scenario(), 30))
