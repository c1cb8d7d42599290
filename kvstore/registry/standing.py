"""Standing: what this process is to the registry, and what it makes of the registry's answers. Waits for the registry's calls alone, so
that a simulation can run it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

from kvstore.core.view import TRANSITIONS, Member, MemberEvent, MemberState, View
from kvstore.errors import StaleView
from kvstore.ids import Epoch

log = logging.getLogger(__name__)

_GONE = frozenset({MemberState.LEFT, MemberState.DEAD})
_LIFE = (MemberState.JOINING, MemberState.ACTIVE, MemberState.DRAINING)
"""The steps that a member takes by itself, in their order; none leads back."""


class Membership(StrEnum):
    """What this process is to the registry."""

    OBSERVER = "observer"
    """Follows the view only; never joined, or left."""
    MEMBER = "member"
    SUPERSEDED = "superseded"
    """Another process joined under this node id: this one no longer renews."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """What the registry has this process as, from now on."""

    state: MemberState
    takeover: float


class NotRenewed(StrEnum):
    EMPTIED = "emptied"
    """Redis knows nobody at all: it lost everything."""
    ABSENT = "absent"
    """Redis knows others: join again."""
    REMOVED = "removed"
    """Declared dead, or left: join again."""
    SUPERSEDED = "superseded"
    """Another process took the node id over: stand back."""


class RegistryCalls(Protocol):
    """Each checks what it replaces, and raises an Unavailable when the registry is away: then it may have happened all the same."""

    async def join(self, member: Member, *, comes_back: bool) -> float | None:
        """The takeover that it has now: a restart faster than its lease finds that of the old boot. None when another process has the
        node id (only if it `comes_back`)."""
        ...

    async def renew(self, member: Member) -> Renewed | NotRenewed: ...

    async def change(self, member: Member, *, before: MemberState, after: MemberState) -> bool:
        """False when the member is no longer this boot in state `before`."""
        ...

    async def take_over(self, member: Member, *, takeover: float) -> bool:
        """False when the member is no longer this boot, owns nothing, or has another takeover than it thinks."""
        ...

    async def restore(self, members: Sequence[Member], *, known: Epoch) -> None:
        """Write all of them back, unless somebody did already."""
        ...


class Standing:
    """Every method raises what the registry's calls raise."""

    def __init__(self, registry: RegistryCalls) -> None:
        self._registry = registry
        self.member: Member | None = None
        """This process as it last knew itself to be registered."""
        self.membership = Membership.OBSERVER

    async def join(self, member: Member) -> None:
        assert member.state in (MemberState.JOINING, MemberState.ACTIVE), member.state
        assert self.member is None, "joined twice"
        takeover = await self._registry.join(member, comes_back=False)
        assert takeover is not None, "who starts takes its node id over"
        self.member = dataclasses.replace(member, takeover=takeover)
        self.membership = Membership.MEMBER

    async def drain(self) -> None:
        """A second time changes nothing. Raises StaleView."""
        if self.member is None or self.member.state is not MemberState.DRAINING:
            await self.change(MemberEvent.DRAINS)

    async def take_over(self, takeover: float) -> None:
        """Raises StaleView."""
        assert self.member is not None, "not joined"
        if not await self._registry.take_over(self.member, takeover=takeover):
            raise StaleView(f"{self.member.node_id} has no stripes to take over now; it must renew first")
        self.member = dataclasses.replace(self.member, takeover=takeover)

    async def leave(self) -> None:
        """Raises StaleView."""
        # First: a renewal whose answer is on its way must not take the parting for a removal and join again.
        self.membership = Membership.OBSERVER
        await self.change(MemberEvent.LEAVES)

    async def change(self, event: MemberEvent) -> None:
        """Raises StaleView when the table has no such step from here, or the registry knows better."""
        assert self.member is not None, "not joined"
        after = TRANSITIONS.get((self.member.state, event))
        if after is None:
            raise StaleView(f"{self.member.node_id} is {self.member.state}: it cannot take that step from there")
        for before in (self.member.state, MemberState.SUSPECT):
            # A missed lease may have made us SUSPECT behind our back; that is as good as ACTIVE to a change of ours.
            if (before, event) in TRANSITIONS and await self._registry.change(self.member, before=before, after=TRANSITIONS[before, event]):
                self.member = dataclasses.replace(self.member, state=after)
                return
        raise StaleView(f"{self.member.node_id} is not {self.member.state} in the registry any more; it must renew first")

    async def renew(self, view: View) -> bool:
        """Extends the lease; who was forgotten or buried joins again, whoever finds the registry empty writes `view` back. False: another
        process has the node id, and this one gives way."""
        assert self.member is not None, "not joined"
        member = self.member
        answer = await self._registry.renew(member)
        if self.membership is not Membership.MEMBER:
            return True
        if isinstance(answer, Renewed):
            if self.member is member:  # else it took a step meanwhile, and the answer may be of before
                await self._agree(member, answer)
            return True
        log.warning("the registry's answer to the renewal of %s: %s", member.node_id, answer)
        match answer:
            case NotRenewed.EMPTIED:
                known = [other for other in view.members if other.state not in _GONE and other.node_id != member.node_id]
                await self._registry.restore([*known, member], known=view.epoch)
            case NotRenewed.ABSENT | NotRenewed.REMOVED:
                if await self._registry.join(member, comes_back=True) is None:
                    self.membership = Membership.SUPERSEDED
            case NotRenewed.SUPERSEDED:
                self.membership = Membership.SUPERSEDED
        return self.membership is not Membership.SUPERSEDED

    async def _agree(self, member: Member, held: Renewed) -> None:
        """The registry may be ahead, by a step whose answer was lost; or behind, when a step was its last word before it lost everything,
        and another member wrote its view of before back."""
        behind, own = _LIFE.index(held.state), _LIFE.index(member.state)
        self.member = dataclasses.replace(member, takeover=held.takeover, state=_LIFE[max(behind, own)])
        for before, after in pairwise(_LIFE[behind : own + 1]):
            log.warning("the registry has %s as %s: it is %s", member.node_id, before, after)
            await self._registry.change(self.member, before=before, after=after)
