"""The codec: KV blocks to self-describing payloads and back.

Names are loaded at first use, so that a store node, which only checks payloads, starts without numba and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.codec.block_codec import BlockCodec
    from kvstore.codec.block_format import BlockHeader, Rung, read_header
    from kvstore.codec.checksum import payload_checksum
    from kvstore.codec.compilation import compiling_alone, warm_up

__all__ = ["BlockCodec", "BlockHeader", "Rung", "compiling_alone", "payload_checksum", "read_header", "warm_up"]

_HOMES = {
    "BlockCodec": "block_codec",
    "BlockHeader": "block_format",
    "Rung": "block_format",
    "payload_checksum": "checksum",
    "read_header": "block_format",
    "compiling_alone": "compilation",
    "warm_up": "compilation",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
