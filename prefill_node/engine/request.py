"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.ids import BlockHash, BlockRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one token is chosen from the logits, the prompt and the answer so far. The draw at a position depends on (seed, position)
    alone. Raises InvalidRequest for what is out of range."""

    temperature: float = 0.0
    """0: greedy, the most likely token, the smallest id of equals."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    """0 or 1: off."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are left out. 0: off."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token of the answer so far."""
    frequency_penalty: float = 0.0
    """Taken as often as the token stands in the answer so far."""
    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt and the answer so far are divided by it when positive, else multiplied. 1: off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit), first of all."""
    seed: int = 0

    def __post_init__(self) -> None:
        for key, low, high in _RANGES:
            if not low <= getattr(self, key) <= high:
                raise InvalidRequest(f"{key} must be from {low:g} to {high:g}, not {getattr(self, key)}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be at least 0, not {self.top_k}")
        for token_id, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise InvalidRequest(f"logit_bias of token {token_id} must be finite, not {bias}")

    @property
    def penalizes(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("repetition_penalty", 0.01, 100.0),
)

MAX_TOP_LOGPROBS = 20


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
    recoded: bool = False
    """Some of its blocks have other numbers than those that a sequence attends to which computed them: they were stepped down in the
    store, or computed behind such blocks."""


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
    top_logprobs: int | None = None
    """None: no logprobs; else each token comes with its own and so many of the likeliest."""
    stop_token_ids: frozenset[int] = frozenset()
    """Generating one of these ends the answer; it is not part of it. The caller adds the model's eos ids, or not (ignore_eos)."""
    priority: int = 0
    """Larger goes first."""
    refetch: bool = False
    """When its turn comes and sealed blocks are lacking, ask for them with PrefixWantedOut and wait for Engine.resume, instead of
    computing them at once."""
    fetchable: int = 0
    """With `refetch`: leading blocks that could be fetched as soon as there is room."""
    as_sealed: bool = False
    """Its tokens so far were computed from canonical numbers: no re-coded block of the pool is taken for it."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    PREFILLED = "prefilled"
    """A prefill-only request: all full blocks are sealed."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities as the model gives them, before temperature, penalties, bias and cuts."""

    logprob: float
    """Of the token itself."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), likeliest first, equals by id."""


@dataclass(frozen=True, slots=True)
class TokenOut:
    token_id: int
    position: int
    """Index in the answer, from 0; tokens handed in as the answer so far count."""
    logprobs: Logprobs | None = None
    """When the request asks for them."""


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
    def seal(self, ref: BlockRef, block: np.ndarray, start_position: int, request_id: str, *, behind_recoded: bool) -> None:
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
