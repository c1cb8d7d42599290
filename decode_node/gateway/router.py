"""Which node does what. Pure: candidates with their measured load come in, a node id or None goes out.

Nodes that answered lately come first; a suspect one (missed polls, failed calls, view says SUSPECT) is used only when no other is
left, because an error from it costs less than a refusal to the user.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvstore.core.chain import BLOCKS_PER_STRIPE
from kvstore.ids import BlockHash, BlockRef, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCandidate:
    node_id: NodeId
    queued_tokens: int
    """Still to compute over all its prompts, with what this gateway has sent since."""
    tokens_per_s: float
    """Measured; 0 when it has computed nothing yet."""
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCandidate:
    node_id: NodeId
    sequences: int
    """Running and queued, with what this gateway has sent since."""
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    min_prefill_tokens: int
    """A shorter uncached tail is computed by the decode node: it costs less than a second node's queue and the way through the store."""
    assumed_prefill_tokens_per_s: float
    """For a node that has measured nothing yet; low enough that a measured idle node goes first."""
    affinity_slack: int
    """Sequences that the node which served this prefix may have beyond the least loaded one and still be preferred."""


def predicted_ttft_s(candidate: PrefillCandidate, *, uncached_tokens: int, policy: RoutingPolicy) -> float:
    speed = candidate.tokens_per_s if candidate.tokens_per_s > 0 else policy.assumed_prefill_tokens_per_s
    return (candidate.queued_tokens + uncached_tokens) / speed


def choose_prefill(
    candidates: Iterable[PrefillCandidate], *, uncached_tokens: int, excluded: Collection[NodeId] = (), policy: RoutingPolicy
) -> NodeId | None:
    """The node with the earliest predicted end of this prompt, or None: the decode node computes the tail itself.

    A suspect node is never worth the wait here, since the decode node can always do without. Ties go to the smallest node id.
    """
    if uncached_tokens < policy.min_prefill_tokens:
        return None
    usable = [candidate for candidate in candidates if not candidate.suspect and candidate.node_id not in excluded]
    if not usable:
        return None
    return min(usable, key=lambda it: (predicted_ttft_s(it, uncached_tokens=uncached_tokens, policy=policy), it.node_id)).node_id


def choose_decode(
    candidates: Iterable[DecodeCandidate],
    *,
    preferred: NodeId | None = None,
    excluded: Collection[NodeId] = (),
    policy: RoutingPolicy,
) -> NodeId | None:
    """The least loaded node, or `preferred` (it has this prefix in its pool) unless it is clearly busier. None: there is no node.

    `excluded` nodes failed this very session: they come last, but before giving up. Ties go to the smallest node id.
    """
    ranks: dict[tuple[bool, bool], list[DecodeCandidate]] = {}
    for candidate in candidates:
        ranks.setdefault((candidate.node_id in excluded, candidate.suspect), []).append(candidate)
    if not ranks:
        return None
    best_rank = ranks[min(ranks)]
    least = min(best_rank, key=lambda it: (it.sequences, it.node_id))
    for candidate in best_rank:
        if candidate.node_id == preferred and candidate.sequences <= least.sequences + policy.affinity_slack:
            return candidate.node_id
    return least.node_id


class PrefixAffinity:
    """Which decode node served a prefix last, by the hashes of its blocks. Holds at most `limit` hashes, the latest ones.

    One entry a stripe plus one for the last block: enough to find a conversation again at its next turn, and a common system prompt
    from its first stripe on.
    """

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self._limit = limit
        self._nodes: OrderedDict[BlockHash, NodeId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def remember(self, chain: Sequence[BlockRef], node_id: NodeId) -> None:
        for ref in _landmarks(chain):
            self._nodes[ref.hash] = node_id
            self._nodes.move_to_end(ref.hash)
        while len(self._nodes) > self._limit:
            self._nodes.popitem(last=False)

    def lookup(self, chain: Sequence[BlockRef]) -> NodeId | None:
        """The node that served the longest known prefix of this chain."""
        for ref in reversed(chain):
            node_id = self._nodes.get(ref.hash)
            if node_id is not None:
                return node_id
        return None


def _landmarks(chain: Sequence[BlockRef]) -> list[BlockRef]:
    heads = list(chain[::BLOCKS_PER_STRIPE])
    return heads if heads[-1:] == [*chain[-1:]] else [*heads, chain[-1]]
