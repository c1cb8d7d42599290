"""One short line for an event or an instruction, for the log that a failed run prints."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum

from kvstore.core.events.notes import Note
from kvstore.ids import BlockRef, KeySpace


def describe(what: object) -> str:
    """Names and values, hashes by their first digits, long batches by their first items."""
    if isinstance(what, bytes):
        return what.hex()[:6] if len(what) <= 32 else f"<{len(what)} bytes>"
    if isinstance(what, Enum):
        return str(what.name)
    if is_dataclass(what):
        return f"{type(what).__name__}({', '.join(f'{f.name}={describe(getattr(what, f.name))}' for f in fields(what))})"
    if isinstance(what, Note):
        return f"Note{describe(tuple(what))}"
    if isinstance(what, BlockRef):
        return f"{what.index}:{describe(what.hash)}"
    if isinstance(what, KeySpace):
        return what.namespace
    if isinstance(what, tuple):
        return f"({', '.join(map(describe, what[:6]))}{', ...' if len(what) > 6 else ''})"
    return repr(what)
