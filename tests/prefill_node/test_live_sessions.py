"""A drain: nothing new, and what runs is let go after its sealed blocks are published."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import LarderError, Unavailable
from kvstore.units import Nanos, seconds
from prefill_node.live_sessions import LiveSessions


class Flusher:
    """Stands where the publisher stands; notes when it was asked to flush."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def flush(self, *, timeout: Nanos) -> bool:
        self._log.append("flush")
        return True


class Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def halt(self) -> None:
        self._log.append("halt")

    def end(self, error: LarderError) -> None:
        self._log.append("end")
        if not self._ended.done():
            self._ended.set_exception(error)

    async def run(self, live: LiveSessions) -> None:
        with live.entered(self):
            await self._ended


def test_a_drain_halts_then_flushes_then_ends_every_session() -> None:
    async def main() -> None:
        log: list[str] = []
        live = LiveSessions()
        streams = [asyncio.create_task(Stream(log).run(live)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(live) == 3
        await live.drain(Flusher(log), flush=seconds(1))
        assert log == ["halt"] * 3 + ["flush"] + ["end"] * 3
        assert len(live) == 0
        for stream in streams:
            with pytest.raises(Unavailable, match="draining"):
                await stream

    asyncio.run(main())


def test_a_draining_node_refuses_new_sessions() -> None:
    async def main() -> None:
        live = LiveSessions()
        await live.drain(Flusher([]), flush=seconds(1))
        with pytest.raises(Unavailable, match="draining"):
            await Stream([]).run(live)

    asyncio.run(main())


def test_a_session_that_does_not_end_holds_the_drain_up_for_a_bounded_time() -> None:
    async def main() -> None:
        live = LiveSessions()
        with live.entered(Stream([])):
            await live.drain(Flusher([]), flush=seconds(1), leave=0.01)
        assert len(live) == 0

    asyncio.run(main())
