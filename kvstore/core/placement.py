"""Placement: which stores own a stripe. Weighted rendezvous hashing, one replica per zone first, a newcomer by and by."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from kvstore.core.view import PLACED_STATES, Member, View
from kvstore.ids import NodeId, StripeId

_WORD = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UNIT = 1 / (1 << 53)


def place(stripe: StripeId, view: View, *, replicas: int) -> tuple[NodeId, ...]:
    """Owners of the stripe, first replica first; fewer than `replicas` when there are fewer stores.

    Depends on the ids, weights, zones and takeovers of the placed stores alone: not on their order, addresses, boots, or the epoch. A
    join moves to the new store only what it wins, a leave moves only what the leaver had. Zones come before rank: while a zone has no
    replica, no other zone gets its second.

    A store whose takeover is below 1 takes part for that share of the stripes only, chosen by a hash of its own and growing with the
    takeover, so each step moves stripes to it and none elsewhere; where too few others are left, it takes part all the same. (Raising a
    weight step by step does less: a store that is alone in its zone gets a replica of every stripe whatever its weight.)

    Cost: one mix of 64 bits and one logarithm per store.
    Source: Thaler and Ravishankar, rendezvous hashing, 1998; weights by -w / ln(u) (Schindelhauer and Schomaker, 2005).
    """
    ring = _ring_of(view)
    stores = ring.stores
    if ring.has_newcomers:
        word = int.from_bytes(stripe[8:16], "little")
        taking = [store for store in stores if store[4] >= 1 or mixed(word ^ store[0]) < store[4] * _WORD]
        if len(taking) >= min(replicas, len(stores)):
            stores = taking
    return tuple(_rank(stripe, stores)[:replicas])


def reading_places(stripe: StripeId, view: View, *, replicas: int) -> tuple[NodeId, ...]:
    """The owners, and behind them the stores that hold a hot stripe for a time: the next ones in the same order."""
    owners = place(stripe, view, replicas=replicas)
    extra = view.hot.get(stripe)
    if not extra:
        return owners
    more = place(stripe, view, replicas=replicas + extra)
    return (*owners, *(node_id for node_id in more if node_id not in owners))


def rank_all(stripe: StripeId, members: Iterable[Member]) -> tuple[NodeId, ...]:
    """All of these stores, owned by them or not, in the order in which they would hold replicas."""
    return tuple(_rank(stripe, [_store_of(member) for member in members]))


_Store = tuple[int, float, NodeId, str, float]
"""(key, weight, node id, zone, takeover): what placement looks at, without the attributes of a Member, which cost more than the hash."""


class _Ring(NamedTuple):
    stores: list[_Store]
    has_newcomers: bool


def _store_of(member: Member) -> _Store:
    return node_key(member.node_id), max(member.weight, 1e-9), member.node_id, member.zone, member.takeover


def _ring_of(view: View) -> _Ring:
    """Made once a view; of the last few, by identity: a view is never changed, and hashing it would cost more than the placement."""
    known = _rings.get(id(view))
    if known is not None:
        return known[1]
    stores = [_store_of(member) for member in view.members if member.role == "store" and member.state in PLACED_STATES]
    ring = _Ring(stores, any(member[4] < 1 for member in stores))
    while len(_rings) >= _MOST_RINGS:
        _rings.pop(next(iter(_rings)), None)
    _rings[id(view)] = (view, ring)  # the view is kept, so that its identity is not another's
    return ring


_MOST_RINGS = 16
_rings: dict[int, tuple[View, _Ring]] = {}


def _rank(stripe: StripeId, stores: list[_Store]) -> list[NodeId]:
    word, log = int.from_bytes(stripe[:8], "little"), math.log
    scored = []
    for key, weight, node_id, zone, _ in stores:
        # As `mixed`, which would cost a call for each.
        x = ((word ^ key) + _STEP) & _WORD
        x = (x ^ (x >> 30)) * _FIRST & _WORD
        x = (x ^ (x >> 27)) * _SECOND & _WORD
        scored.append((weight / log((((x ^ (x >> 31)) >> 11) + 0.5) * _UNIT), node_id, zone))
    scored.sort()
    first_of_zone: list[NodeId] = []
    others: list[NodeId] = []
    zones: set[str] = set()
    for _, node_id, zone in scored:
        if zone in zones:
            others.append(node_id)
        else:
            zones.add(zone)
            first_of_zone.append(node_id)
    return first_of_zone + others


@lru_cache(maxsize=4096)
def node_key(node_id: NodeId) -> int:
    """64 bits of the node's name."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "little")


def mixed(word: int) -> int:
    """64 bits in, 64 bits out, each of which depends on all. Stripe ids are hashes already, so a keyed hash would mix no better.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    word = (word + _STEP) & _WORD
    word = (word ^ (word >> 30)) * _FIRST & _WORD
    word = (word ^ (word >> 27)) * _SECOND & _WORD
    return word ^ (word >> 31)
