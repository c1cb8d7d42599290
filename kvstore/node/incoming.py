"""Payloads on their way in: which write token may put bytes where, and how many have come."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.core.extent import Extent
from kvstore.ids import WriteToken
from kvstore.tiers.host import HostArena


@dataclass(slots=True)
class _Incoming:
    extent: Extent
    received: int = 0


class IncomingPayloads:
    """Between the grant and the commit (or the discard) of each reservation. Bytes go straight into the reserved extent; a token
    that is not open any more writes nothing, so an extent that was given to another payload is safe from a late writer.
    """

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._open: dict[WriteToken, _Incoming] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, token: WriteToken, extent: Extent) -> None:
        self._open[token] = _Incoming(extent)

    def close(self, token: WriteToken) -> int:
        """How many bytes have come; 0 for a token that is not open."""
        incoming = self._open.pop(token, None)
        return 0 if incoming is None else incoming.received

    def take(self, token: WriteToken, offset: int, data: bytes | memoryview) -> bool:
        """Puts one chunk in place. False (and nothing written) when the token is not open, the chunk is out of order, or it runs past
        the reserved size. A payload may be sent again from offset 0."""
        incoming = self._open.get(token)
        if incoming is None or offset not in (incoming.received, 0) or offset + len(data) > incoming.extent.length:
            return False
        self._arena.view(incoming.extent.offset + offset, len(data))[:] = data
        incoming.received = offset + len(data)
        return True

    def room(self, token: WriteToken, length: int) -> memoryview | None:
        """The extent itself, to be filled from its start; None when the token is not open or means another length. Look at `is_open`
        before every touch, and say `filled` at the end."""
        incoming = self._open.get(token)
        if incoming is None or incoming.extent.length != length:
            return None
        incoming.received = 0
        return self._arena.view(incoming.extent.offset, length)

    def filled(self, token: WriteToken, length: int) -> bool:
        """The whole payload is in its extent. False when the token is not open or means another length."""
        incoming = self._open.get(token)
        if incoming is None or incoming.extent.length != length:
            return False
        incoming.received = length
        return True

    def placed(self, token: WriteToken) -> None:
        """The writer says that it has put the whole payload there itself."""
        incoming = self._open.get(token)
        if incoming is not None:
            incoming.received = incoming.extent.length

    def is_complete(self, token: WriteToken) -> bool:
        incoming = self._open.get(token)
        return incoming is not None and incoming.received == incoming.extent.length

    def is_open(self, token: WriteToken) -> bool:
        return token in self._open

    def received_bytes(self, token: WriteToken) -> int:
        """0 for a token that is not open."""
        incoming = self._open.get(token)
        return 0 if incoming is None else incoming.received
