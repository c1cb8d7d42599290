"""What travels between a simulated client and a simulated store besides the events of the core, which go as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstore.errors import LarderError
from kvstore.ids import BootId, NodeId, WriteToken


class Hello(NamedTuple):
    """Answered with a Greeting."""


class Greeting(NamedTuple):
    node_id: NodeId
    boot_id: BootId


class WriteBytes(NamedTuple):
    """Whole payloads for write tokens. Answered with the refused tokens, a tuple."""

    writes: tuple[tuple[WriteToken, bytes], ...]


class UpkeepCall(NamedTuple):
    """A call of the peer service: what PeerAnswers answers, or Failed."""

    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()


class ReadPayload(NamedTuple):
    """One item of the answer to a ReadRequested."""

    outcome: str
    """"ok", or why not."""
    payload: bytes


class Failed(NamedTuple):
    """Comes in place of an answer: the call broke off, or its deadline passed."""

    reason: str
    deadline_passed: bool = False
    error: LarderError | None = None
    """What a peer answered with."""


UNREACHABLE = Failed("unreachable")
TIMEOUT = Failed("timeout", deadline_passed=True)
