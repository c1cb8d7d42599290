"""Placement: which stores own a stripe. Weighted rendezvous hashing, one replica per zone first, a newcomer by and by."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

from kvstore.core.view import PLACED_STATES, Member, View
from kvstore.ids import NodeId, StripeId

_WORD = (1 << 64) - 1


def place(stripe: StripeId, view: View, *, replicas: int) -> tuple[NodeId, ...]:
    """Owners of the stripe, first replica first; fewer than `replicas` when there are fewer stores.

    Depends on the ids, weights, zones and takeovers of the placed stores alone: not on their order, addresses, boots, or the epoch. A
    join moves to the new store only what it wins, a leave moves only what the leaver had. Zones come before rank: while a zone has no
    replica, no other zone gets its second.

    A store whose takeover is below 1 takes part for that share of the stripes only, chosen by a hash of its own and growing with the
    takeover, so each step moves stripes to it and none elsewhere; where too few others are left, it takes part all the same. (Raising a
    weight step by step does less: a store that is alone in its zone gets a replica of every stripe whatever its weight.)

    Cost: one mix of 64 bits and one logarithm per store, about 1 us.
    Source: Thaler and Ravishankar, rendezvous hashing, 1998; weights by -w / ln(u) (Schindelhauer and Schomaker, 2005).
    """
    stores = [member for member in view.members if member.role == "store" and member.state in PLACED_STATES]
    if any(member.takeover < 1 for member in stores):
        taking = [member for member in stores if takes_over(stripe, member)]
        if len(taking) >= min(replicas, len(stores)):
            stores = taking
    return _rank(stripe, stores)[:replicas]


def rank_all(stripe: StripeId, members: tuple[Member, ...]) -> tuple[NodeId, ...]:
    """All of these stores, owned by them or not, in the order in which they would hold replicas."""
    return _rank(stripe, list(members))


def takes_over(stripe: StripeId, member: Member) -> bool:
    """Whether the stripe is among those that a newcomer takes part in already."""
    if member.takeover >= 1:
        return True
    return mixed(int.from_bytes(stripe[8:16], "little") ^ node_key(member.node_id)) < member.takeover * _WORD


def _rank(stripe: StripeId, stores: list[Member]) -> tuple[NodeId, ...]:
    word = int.from_bytes(stripe[:8], "little")
    scored = sorted((-_score(word, member), member.node_id, member.zone) for member in stores)
    first_of_zone: list[NodeId] = []
    others: list[NodeId] = []
    zones: set[str] = set()
    for _, node_id, zone in scored:
        if zone in zones:
            others.append(node_id)
        else:
            zones.add(zone)
            first_of_zone.append(node_id)
    return (*first_of_zone, *others)


def _score(word: int, member: Member) -> float:
    uniform = ((mixed(word ^ node_key(member.node_id)) >> 11) + 0.5) / (1 << 53)
    return -max(member.weight, 1e-9) / math.log(uniform)


@lru_cache(maxsize=4096)
def node_key(node_id: NodeId) -> int:
    """64 bits of the node's name."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "little")


def mixed(word: int) -> int:
    """64 bits in, 64 bits out, each of which depends on all. Stripe ids are hashes already, so a keyed hash would mix no better and takes
    three times as long.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
