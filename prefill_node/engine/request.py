"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.ids import BlockHash, BlockRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one token is chosen. The draw at a position depends on (seed, position) alone."""

    temperature: float = 0.0
    """0: greedy, the most likely token, the smallest id of equals."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    """0 or 1: off."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(f"temperature must be from 0 to 100, not {self.temperature}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be at least 0, not {self.top_k}")
        if not 0.0 <= self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be from 0 to 1, not {self.top_p}")


@dataclass(slots=True, kw_only=True)
class PinnedPrefix:
    """Leading blocks of a chain that sit in the pool and cannot be reused: made by `pin_local`, lengthened by `allocate` and `adopt`,
    ended by `submit` (the sequence takes the references over) or `release`. Owned by one caller at a time."""

    block_ids: list[int] = field(default_factory=list)
    """Pool blocks of the leading blocks, in chain order."""
    refs: list[BlockRef] = field(default_factory=list)
    """One for each of block_ids."""
    reserved: list[int] = field(default_factory=list)
    """Allocated for the loader and not adopted yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    request_id: str
    token_ids: Sequence[int]
    """Prompt and the answer so far."""
    first_output: int
    """How many of token_ids are prompt: the token after them has position 0 in the answer."""
    chain_root: BlockHash
    max_new_tokens: int
    """0: prefill only. The full blocks are computed and sealed, nothing is generated."""
    prefix: PinnedPrefix | None = None
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    """Generating one of these ends the answer; it is not part of it. The caller adds the model's eos ids, or not (ignore_eos)."""
    priority: int = 0
    """Larger goes first."""
    refetch: bool = False
    """When its turn comes and sealed blocks are lacking, ask for them with PrefixWantedOut and wait for Engine.resume, instead of
    computing them at once."""
    fetchable: int = 0
    """With `refetch`: leading blocks that could be fetched as soon as there is room."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    PREFILLED = "prefilled"
    """A prefill-only request: all full blocks are sealed."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenOut:
    token_id: int
    position: int
    """Index in the answer, from 0; tokens handed in as the answer so far count."""


@dataclass(frozen=True, slots=True)
class SealedOut:
    """A block became canonical and shareable. Not sent for blocks that came with the request."""

    ref: BlockRef


@dataclass(frozen=True, slots=True)
class PrefixWantedOut:
    """There is room for the sequence now, and blocks that it gave up, or never had room for, can be fetched: load the prefix of all its
    tokens so far and hand it to Engine.resume, however short it is."""


@dataclass(frozen=True, slots=True)
class FinishedOut:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FailedOut:
    """The engine could not go on with this request; another node may."""

    message: str


EngineEvent = TokenOut | SealedOut | PrefixWantedOut | FinishedOut | FailedOut
"""The last event of a request is exactly one FinishedOut or FailedOut."""

EventSink = Callable[[EngineEvent], None]
"""Called in the engine thread: must not block and must not raise."""


class Sealer(Protocol):
    def seal(self, ref: BlockRef, block: np.ndarray, start_position: int, request_id: str) -> None:
        """Make `block` ([layers, 2, kv_heads, block_tokens, head_dim], bf16 as uint16) canonical in place and hand its payload on.

        Called in the engine thread in the step that fills the block: must not block. What it raises fails the request.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    running: int
    queued: int
    queued_tokens: int
    """Tokens still to compute before their first output, over queued and running requests."""
    free_blocks: int
    """Not referenced; sealed blocks kept for local hits count as free."""
    total_blocks: int
    prefill_tokens_per_s: float
    """0 before the first prompt."""
    itl_ms: float
    """Recent mean time between two tokens of a sequence, 0 before the first."""
