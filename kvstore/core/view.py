"""View: who is a member, in which state, at which epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.ids import BootId, Epoch, NodeId, StripeId
from kvstore.units import Bytes


class Role(StrEnum):
    STORE = "store"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """Prefill and decode in one process."""


PREFILL_ROLES = frozenset({Role.PREFILL, Role.BOTH})
DECODE_ROLES = frozenset({Role.DECODE, Role.BOTH})


class MemberState(StrEnum):
    JOINING = "joining"
    ACTIVE = "active"
    SUSPECT = "suspect"
    """Missed its lease: still owns its stripes, but is not read from first."""
    DRAINING = "draining"
    """Serves what it has, takes nothing new."""
    LEFT = "left"
    DEAD = "dead"
    """Removed by the others; repair makes new copies of what it had."""


class MemberEvent(StrEnum):
    SERVES = "serves"
    LEASE_MISSED = "lease_missed"
    LEASE_RENEWED = "lease_renewed"
    DECLARED_DEAD = "declared_dead"
    DRAINS = "drains"
    LEAVES = "leaves"


TRANSITIONS: dict[tuple[MemberState, MemberEvent], MemberState] = {
    (MemberState.JOINING, MemberEvent.SERVES): MemberState.ACTIVE,
    (MemberState.JOINING, MemberEvent.LEASE_MISSED): MemberState.DEAD,
    (MemberState.JOINING, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.ACTIVE, MemberEvent.LEASE_RENEWED): MemberState.ACTIVE,
    (MemberState.ACTIVE, MemberEvent.LEASE_MISSED): MemberState.SUSPECT,
    (MemberState.ACTIVE, MemberEvent.DRAINS): MemberState.DRAINING,
    (MemberState.ACTIVE, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.SUSPECT, MemberEvent.LEASE_RENEWED): MemberState.ACTIVE,
    (MemberState.SUSPECT, MemberEvent.DECLARED_DEAD): MemberState.DEAD,
    (MemberState.SUSPECT, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.DRAINING, MemberEvent.LEASE_RENEWED): MemberState.DRAINING,
    (MemberState.DRAINING, MemberEvent.LEASE_MISSED): MemberState.DEAD,
    (MemberState.DRAINING, MemberEvent.LEAVES): MemberState.LEFT,
}
"""A pair without a row is refused. LEFT and DEAD have no way out: who comes back joins anew, with a new boot id."""

MOST_HOT_STRIPES = 64
"""Of a cluster at one time: they are part of every view."""

PLACED_STATES = frozenset({MemberState.ACTIVE, MemberState.SUSPECT})
"""States whose stores own stripes. A missed lease alone moves no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    node_id: NodeId
    boot_id: BootId
    role: Role
    address: str
    """host:port of its gRPC server."""
    zone: str = ""
    weight: float = 1.0
    """Share of stripes relative to the others; above 0."""
    capacity_bytes: Bytes = Bytes(0)
    takeover: float = 1.0
    """How much of the stripes that fall to it it has taken over by now, 0 to 1. A new store grows into its place: see placement.py."""
    state: MemberState = MemberState.ACTIVE


@dataclass(frozen=True, slots=True)
class View:
    epoch: Epoch
    members: tuple[Member, ...] = ()
    hot: Mapping[StripeId, int] = field(default_factory=dict)
    """Stripes that many read, each with how many replicas it has for a time beside those of its owners. At most MOST_HOT_STRIPES."""

    stores: tuple[Member, ...] = field(init=False, repr=False, compare=False)
    """Of the members. Made once: who keeps the copies in order looks at it many times a second."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stores", tuple(member for member in self.members if member.role == Role.STORE))

    def member(self, node_id: NodeId) -> Member | None:
        return next((member for member in self.members if member.node_id == node_id), None)
