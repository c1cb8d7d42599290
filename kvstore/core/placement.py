"""Placement: which stores own a stripe. Weighted rendezvous hashing, one replica per zone first."""

from __future__ import annotations

import hashlib
import math

from kvstore.core.view import PLACED_STATES, Member, View
from kvstore.ids import NodeId, StripeId


def place(stripe: StripeId, view: View, *, replicas: int) -> tuple[NodeId, ...]:
    """Owners of the stripe, first replica first; fewer than `replicas` when there are fewer stores.

    Depends on the ids, weights and zones of the placed stores alone: not on their order, addresses, boots, or the epoch. A join moves to
    the new store only what it wins, a leave moves only what the leaver had. Zones come before rank: while a zone has no replica, no other
    zone gets its second.

    Cost: one hash per store.
    Source: Thaler and Ravishankar, rendezvous hashing, 1998; weights by -w / ln(u) (Schindelhauer and Schomaker, 2005).
    """
    stores = [member for member in view.members if member.role == "store" and member.state in PLACED_STATES]
    stores.sort(key=lambda member: (-_score(stripe, member), member.node_id))
    first_of_zone: list[Member] = []
    others: list[Member] = []
    zones: set[str] = set()
    for member in stores:
        if member.zone in zones:
            others.append(member)
        else:
            zones.add(member.zone)
            first_of_zone.append(member)
    return tuple(member.node_id for member in (first_of_zone + others)[:replicas])


def _score(stripe: StripeId, member: Member) -> float:
    digest = hashlib.blake2b(stripe, key=hashlib.sha256(member.node_id.encode()).digest(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "little") >> 11) + 0.5) / (1 << 53)
    return -max(member.weight, 1e-9) / math.log(uniform)
