"""Taking blocks out: delete and evict."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.ids import BlockHash, KeySpace, Namespace, RequestId
from kvstore.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRequested:
    """Unlist these blocks now, in every tier, and make that last over a restart; wins against a running put, demotion or promotion.
    Leased copies serve their readers to the end of the lease. Comes back: AnswerDelete, when the last EraseRecord it needs has its
    outcome."""

    request_id: RequestId
    key_space: KeySpace
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelete:
    request_id: RequestId
    deleted: tuple[bool, ...]
    """False: was not here, or its record on the medium could not be erased (it is unlisted, but a restart may find it again)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictRequested:
    """Forget copies in every tier: all, or those of one namespace, or the named ones. Leased copies stay. Comes back: AnswerEvict, at
    once."""

    request_id: RequestId
    everything: bool = False
    namespace: Namespace | None = None
    key_space: KeySpace | None = None
    hashes: tuple[BlockHash, ...] = ()
    """With key_space; empty: the whole key space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEvict:
    request_id: RequestId
    evicted_copies: int
    evicted_bytes: Bytes
    leased_copies_kept: int
    """And those of hard pinned blocks."""
