"""A TCP link that can be cut, silenced one way or both, and delayed: what stands in front of a port of a node."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

_PIECE = 64 * 1024

Address = tuple[str, int]


@dataclass(slots=True)
class Weather:
    """What every link of one node goes through. Bytes that are held arrive after the heal, as TCP would send them again."""

    refuses: bool = False
    """Connections break and new ones are refused."""
    delay_s: float = 0.0
    """Of each piece, each way."""
    inward: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: bytes to the node pass."""
    outward: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.clear_up()

    def hold(self, *, inward: bool, outward: bool) -> None:
        if inward:
            self.inward.clear()
        if outward:
            self.outward.clear()

    def clear_up(self) -> None:
        self.refuses, self.delay_s = False, 0.0
        self.inward.set()
        self.outward.set()


class Link:
    """Listens at `front` and passes everything to `back` and from it. `cut` after a change of the weather to `refuses`."""

    def __init__(self, front: Address, back: Address, weather: Weather) -> None:
        self._front, self._back, self._weather = front, back, weather
        self._open: set[asyncio.StreamWriter] = set()
        self._calls: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, *self._front)

    async def stop(self) -> None:
        self._server.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def cut(self) -> None:
        """Every connection breaks."""
        for writer in self._open:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.ensure_future(self._serve(reader, writer))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            if self._weather.refuses:
                return
            back_reader, back_writer = await asyncio.open_connection(*self._back)
            ends.append(back_writer)
            self._open.update(ends)
            await asyncio.gather(
                self._pass(reader, back_writer, self._weather.inward), self._pass(back_reader, writer, self._weather.outward)
            )
        except OSError:
            pass  # one end is gone: so is the other
        finally:
            self._open.difference_update(ends)
            for end in ends:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        while piece := await reader.read(_PIECE):
            if self._weather.delay_s:
                await asyncio.sleep(self._weather.delay_s)
            await gate.wait()
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
