"""The node's end of a control line: what it waits for, and for how long."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from kvstore.node.control_line import ControlLine
from kvstore.transport.frames import FrameKind, Header
from kvstore.transport.stream import StoodStill, Stream
from kvstore.units import milliseconds, seconds


class Echo:
    """Answers each question with its own words."""

    def handle(self, kind, body, reply):
        reply(body)


@asynccontextmanager
async def line(*, rest_of_request):
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        end = ControlLine(Stream(here), Echo(), next_number=0, idle=seconds(60), rest_of_request=rest_of_request)
        serving = asyncio.ensure_future(end.serve())
        try:
            yield end, there, serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def _question(number):
    return Header(FrameKind.ACQUIRE, number, 10).pack() + b"question%02d" % number


def test_a_line_that_is_never_between_two_messages_has_the_time_of_each_and_not_of_all(eventually):
    """A busy client sends so much at a time that something is always halfway."""

    async def test():
        async with line(rest_of_request=seconds(60)) as (end, there, _):
            there.send(_question(0)[:30])
            first = await eventually(lambda: end._rest_timer)
            there.send(_question(0)[30:] + _question(1)[:30])
            second = await eventually(lambda: end._rest_timer is not first and end._rest_timer)
            assert first.cancelled()
            assert second.when() > first.when()
            there.send(_question(1)[30:])
            await eventually(lambda: end._rest_timer is None)

    asyncio.run(test())


def test_a_message_that_does_not_come_to_its_end_ends_the_line(eventually):
    async def test():
        async with line(rest_of_request=milliseconds(50)) as (_, there, serving):
            there.send(_question(0) + _question(1)[:30])
            with pytest.raises(StoodStill):
                await serving

    asyncio.run(test())
