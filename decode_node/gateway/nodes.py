"""What the gateway knows of prefill and decode nodes, without a word of how it talks to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from decode_node.published import PublishedPrefix
from kvstore.ids import LayoutFingerprint, Namespace, NodeId
from kvstore.units import Nanos


class ModelIdentity(NamedTuple):
    """What two nodes must share to share blocks and to go on with each other's answers."""

    layout: LayoutFingerprint
    model_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    identity: ModelIdentity
    model: str
    block_tokens: int
    max_positions: int
    """Prompt and answer together."""
    sequences: int
    """Running and queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    identity: ModelIdentity
    queued_tokens: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    temperature: float
    """0: greedy."""
    top_k: int
    """0: off."""
    top_p: float
    """In (0, 1]; 1: off."""
    seed: int
    """Unsigned, 64 bits."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """1: off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> added to its logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    request_id: str
    """Names this attempt, not the answer: a node may still be busy cancelling an earlier one."""
    namespace: Namespace
    prompt_token_ids: Sequence[int]
    generated_token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    """Of the whole answer, generated_token_ids included."""
    ignore_eos: bool
    """Go on where the model would end; without it the node ends the answer before the model's own end token."""
    stop_token_ids: Sequence[int] = ()
    """End the answer like the model's own end token, ignore_eos or not."""
    top_logprobs: int | None = None
    """None: no logprobs; else each token comes with its own and so many of the likeliest."""
    priority: int = 0
    """Larger goes first."""
    recoded: bool = False
    """A node before had re-coded blocks for these tokens: other nodes may use such too, and else must not."""
    published: PublishedPrefix | None = None
    """How far the prefill stage of this prompt is: the node fetches along, and computes the rest when it is over."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoaded:
    """Where a node found the leading blocks of its tokens."""

    pool_blocks: int
    """In its own pool."""
    store_blocks: int
    recoded: bool = False
    """Some of them are not as sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of probabilities as the model gives them."""

    logprob: float
    """Of the token itself."""
    top: Sequence[tuple[int, float]]
    """(token id, logprob), likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOut:
    token_id: int
    position: int
    """Index in the answer, from 0; tokens of earlier attempts count."""
    logprobs: Logprobs | None = None
    """When the call asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedOut:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


GenerateEvent = PrefixLoaded | TokenOut | FinishedOut | Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    cached_blocks: int
    """Leading blocks that needed no compute."""
    published_blocks: int
    """Leading blocks now readable from the store."""
    done: bool


class DecodeBackend(Protocol):
    """One decode node. Every method raises a LarderError: InvalidRequest, Overloaded, or Unavailable for all the rest."""

    async def load(self, *, timeout: Nanos) -> DecodeLoad: ...

    def generate(self, call: GenerateCall) -> AbstractAsyncContextManager[AsyncIterator[GenerateEvent]]:
        """The stream of one attempt. Leaving the context cancels the work on the node, however it is left."""
        ...

    async def prepare(self, *, namespace: Namespace, token_ids: Sequence[int], recoded: bool, timeout: Nanos) -> int:
        """Have the sealed blocks of these tokens in the node's pool: a stream is about to move there. `recoded` as in a GenerateCall.
        Returns how many there are."""
        ...

    async def close(self) -> None: ...


class PrefillBackend(Protocol):
    """One prefill node. Raises like DecodeBackend."""

    async def load(self, *, timeout: Nanos) -> PrefillLoad: ...

    def prefill(
        self, *, request_id: str, namespace: Namespace, token_ids: Sequence[int], priority: int
    ) -> AbstractAsyncContextManager[AsyncIterator[PrefillProgress]]:
        """Progress until the last message with `done`. Leaving the context cancels the work on the node."""
        ...

    async def close(self) -> None: ...


class StoreBackend(Protocol):
    """One store node, as far as the gateway looks: does it answer?"""

    async def hello(self, *, timeout: Nanos) -> bool:
        """True, or raises Unavailable."""
        ...

    async def close(self) -> None: ...


class Backends(Protocol):
    """Opens a connection to a node; nothing is sent yet."""

    def decode(self, node_id: NodeId, address: str) -> DecodeBackend: ...
    def prefill(self, node_id: NodeId, address: str) -> PrefillBackend: ...
    def store(self, node_id: NodeId, address: str) -> StoreBackend: ...
