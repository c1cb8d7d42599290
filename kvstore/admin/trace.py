"""Request traces: which blocks each request of a served day asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.chain import BLOCKS_PER_STRIPE
from kvstore.errors import ConfigError
from kvstore.ids import HASH_BYTES, BlockHash, BlockRef, StripeId

BLOCK_TOKENS = 512
"""Of the public traces of the Mooncake paper: one id per 512 prompt tokens."""
_MAX_ID = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    input_tokens: int
    ids: tuple[int, ...]
    """One per block of BLOCK_TOKENS, the last one maybe not full. Chained: an equal id means an equal whole prefix."""

    def tokens_of(self, blocks: int) -> int:
        """In its first `blocks` blocks."""
        return min(blocks * BLOCK_TOKENS, self.input_tokens)


def load_trace(path: Path) -> tuple[TracedRequest, ...]:
    """One JSON object a line with `input_length` and `hash_ids`; other keys are not looked at. Raises ConfigError with the line."""
    requests: list[TracedRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_parse(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests; a trace has one JSON object a line with input_length and hash_ids")
    return tuple(requests)


def _parse(line: str, where: str) -> TracedRequest:
    try:
        row = json.loads(line)
        tokens, ids = row["input_length"], row["hash_ids"]
        good = isinstance(tokens, int) and tokens >= 0 and all(isinstance(one, int) and 0 <= one < _MAX_ID for one in ids)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good or len(set(ids)) != len(ids) or len(ids) * BLOCK_TOKENS < tokens:
        raise ConfigError(f"{where}: needs input_length (tokens) and hash_ids (one different number per {BLOCK_TOKENS} tokens)")
    return TracedRequest(input_tokens=tokens, ids=tuple(ids))


def chain_of_ids(ids: Sequence[int]) -> tuple[BlockRef, ...]:
    """The chain of blocks that the ids stand for: an id is as good as a chain hash, for equal ids mean equal prefixes."""
    hashes = [BlockHash(one.to_bytes(HASH_BYTES, "little")) for one in ids]
    root = BlockHash(b"\xff" * HASH_BYTES)
    return tuple(
        BlockRef(hash=block, parent=hashes[at - 1] if at else root, stripe=StripeId(hashes[at - at % BLOCKS_PER_STRIPE]), index=at)
        for at, block in enumerate(hashes)
    )
