"""Takeover: a new node asks for its stripes in steps, each when the copies of the step before have reached it.

Between two steps everybody has the same view, and readers find what is still on its way with the owners of before. Steps are by what was
sent and not by time alone: a cluster with little in it is through in a moment, a full one takes as long as the repair rate makes it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvstore.core.repair_plan import LIVING_STATES
from kvstore.core.upkeep.repair_config import RepairConfig
from kvstore.core.upkeep.repairer import Repairer
from kvstore.core.upkeep.surroundings import OwnMember, Surroundings
from kvstore.core.view import Member, MemberState
from kvstore.errors import LarderError
from kvstore.units import Nanos, milliseconds, seconds

logger = logging.getLogger(__name__)

_LOOK_EVERY = milliseconds(250)
_FIRST_LOOK = seconds(2)
_ROUNDING = 0.001
"""The registry counts in thousandths."""


async def first_takeover(members: Iterable[Member], surroundings: Surroundings, *, config: RepairConfig) -> float:
    """With how much a node starts that joins these: all when there is nothing to take over, else one step."""
    if config.takeover_steps == 1 or not config.rate:
        return 1.0
    for member in members:
        if member.role == "store" and member.state in LIVING_STATES:
            try:
                holds_something = (await surroundings.peer(member).progress(timeout=_FIRST_LOOK)).blocks > 0
            except LarderError:
                holds_something = True  # who knows
            if holds_something:
                return 1.0 / config.takeover_steps
    return 1.0


async def take_over_by_and_by(repairer: Repairer, own: OwnMember) -> None:
    """Returns when the node owns nothing any more: the last step too may be forgotten, by a registry that was emptied and filled again from
    a view of before."""
    config, surroundings = repairer.config, repairer.surroundings
    while True:
        member = own.member
        if member is not None and member.state not in (MemberState.JOINING, MemberState.ACTIVE):
            return
        seen = repairer.view.member(repairer.node_id)
        known = seen is not None and member is not None and seen.boot_id == member.boot_id and seen.state is MemberState.ACTIVE
        if member is None or member.takeover >= 1 or seen is None or not known or seen.takeover < member.takeover - _ROUNDING:
            await surroundings.pause(_LOOK_EVERY)
            continue
        until = Nanos(surroundings.now() + config.takeover_step_limit)
        while not await repairer.others_settled():
            if surroundings.now() >= until:
                logger.warning("takeover: not all copies of this step came within its limit")
                break
            await surroundings.pause(_LOOK_EVERY)
        try:
            await own.take_over(min(1.0, member.takeover + 1.0 / config.takeover_steps))
        except LarderError as error:
            logger.warning("takeover: %s", error)
            await surroundings.pause(_LOOK_EVERY)
