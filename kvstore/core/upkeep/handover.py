"""Handover: what is here and not in its place goes to its owners; once each of them has read its copy back, the one here may go.

After a join that is surplus; on a draining node it is everything, and "all confirmed" means that it is safe to stop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from kvstore.core.catalog import BUCKETS, Stripe, digest_of
from kvstore.core.events.removals import AnswerEvict, EvictRequested
from kvstore.core.placement import rank_all, reading_places
from kvstore.core.repair_plan import Shipment, same_stores
from kvstore.core.upkeep.complaints import Complaints
from kvstore.core.upkeep.repairer import STRIPES_AT_A_TIME, Repairer
from kvstore.core.upkeep.sender import Sent, by_key_space
from kvstore.core.view import Member, MemberState, View
from kvstore.errors import LarderError
from kvstore.ids import BlockHash, Epoch, NodeId, StripeId
from kvstore.units import Nanos, milliseconds, seconds

logger = logging.getLogger(__name__)

_LOOK_EVERY = milliseconds(250)
_DRAIN_SWEEP_EVERY = seconds(2)
_SURPLUS_SWEEP_EVERY = seconds(10)
"""At least, within one view."""
_TAKEN_OFTEN_ENOUGH = 2
"""Times that an owner dealt with a block which it lacks again: then it has no room for it, and a drain that insisted would never end."""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    safe_to_stop: bool
    blocks: int
    remaining_blocks: int
    remaining_bytes: int
    no_room_blocks: int = 0
    """Of those that do not remain: owners took them, and had evicted them for want of room before they were read back."""


@dataclass(slots=True)
class Misplaced:
    """What of the copies here is not where it should be."""

    shipments: list[Shipment] = field(default_factory=list)
    """That this node is the one to send."""
    surplus_blocks: int = 0
    surplus_bytes: int = 0


class _Foreign(NamedTuple):
    """A stripe that is not this node's, as it was when its turn came: blocks that come later wait for the next sweep."""

    stripe: Stripe
    blocks: tuple[BlockHash, ...]
    owners: tuple[Member, ...]


class Handover:
    """`run` never returns."""

    def __init__(self, repairer: Repairer) -> None:
        self._surroundings = repairer.surroundings
        self._repairer = repairer
        self._complaints = Complaints(logger, repairer.surroundings.now)
        self._drain: DrainProgress | None = None
        self._confirmed: dict[StripeId, tuple[Epoch, int]] = {}
        """Of a draining node: at which epoch, and with which blocks, the owners had all of the stripe."""
        self._taken: Counter[tuple[StripeId, NodeId]] = Counter()
        """Of a draining node, within one epoch: how often an owner took, had, or had no room for all that was sent to it of the stripe."""
        self._no_room: dict[StripeId, int] = {}
        """Of a draining node, within one epoch: blocks that are confirmed because an owner has no room for them."""
        repairer.when_sent = self._note_sent

    @property
    def draining(self) -> bool:
        own = self._repairer.view.member(self._repairer.node_id)
        return own is not None and own.state is MemberState.DRAINING

    def drain_progress(self) -> DrainProgress | None:
        """None: it does not drain. Before the first look at the others everything remains."""
        if not self.draining:
            return None
        catalog = self._repairer.catalog
        return self._drain or DrainProgress(False, catalog.blocks, catalog.blocks, catalog.bytes)

    async def run(self) -> None:
        repairer = self._repairer
        swept_epoch, sent_before, next_sweep = Epoch(-1), 0, Nanos(0)
        while True:
            await self._surroundings.pause(_LOOK_EVERY)
            epoch, draining = repairer.view.epoch, self.draining
            if not draining:
                self._drain = None
                self._confirmed.clear()
                self._forget_taken()
                if not repairer.config.drop_surplus:
                    continue
            if epoch == swept_epoch and self._surroundings.now() < next_sweep:
                continue
            # Others may be about to send their part: nothing is missing before they have.
            if not repairer.idle or repairer.settled_epoch < epoch or not await repairer.others_settled():
                continue
            if epoch != swept_epoch:
                self._forget_taken()
            moved = repairer.counters.sent_blocks != sent_before or epoch != swept_epoch
            swept_epoch, sent_before = epoch, repairer.counters.sent_blocks
            again_soon = await self._sweep(draining=draining) and moved
            slow = _DRAIN_SWEEP_EVERY if draining else max(repairer.config.anti_entropy_every, _SURPLUS_SWEEP_EVERY)
            next_sweep = Nanos(self._surroundings.now() + (_LOOK_EVERY if again_soon else slow))

    def _note_sent(self, shipment: Shipment, sent: Sent) -> None:
        if self.draining and not sent.lost_blocks:
            self._taken[shipment.stripe, shipment.target] += 1

    def _forget_taken(self) -> None:
        self._taken.clear()
        self._no_room.clear()

    async def _sweep(self, *, draining: bool) -> bool:
        """One look at everything that is not this node's. Whether some of it has to be sent."""
        repairer, view = self._repairer, self._repairer.view
        sends = False
        remaining_blocks = remaining_bytes = 0
        for bucket in range(BUCKETS):
            foreign: list[_Foreign] = []
            for number, stripe in enumerate(repairer.catalog.stripes(bucket), start=1):
                holders = reading_places(stripe.stripe, view, replicas=repairer.replicas)
                if repairer.node_id not in holders and self._confirmed.get(stripe.stripe) != (view.epoch, stripe.digest):
                    members = tuple(member for owner in holders[: repairer.replicas] if (member := view.member(owner)) is not None)
                    foreign.append(_Foreign(stripe, tuple(stripe.blocks), members))
                if number % STRIPES_AT_A_TIME == 0:
                    await self._surroundings.pause(Nanos(0))
            if not foreign:
                continue
            candidates: list[tuple[_Foreign, bool]] = []
            lacking, silent = await self._lacking(foreign, view.epoch, verify=False)
            for one in foreign:
                missing = {digest for owner in one.owners for digest in one.blocks if digest in lacking[owner.node_id]}
                if missing and draining and self._has_no_room(one, lacking, silent):
                    self._confirmed[one.stripe.stripe] = (view.epoch, _digest(one.blocks))
                    self._no_room[one.stripe.stripe] = len(missing)
                elif missing:
                    sends = True
                    self._send_missing(one, lacking, spare_room_only=not draining)
                # What an owner has no room for keeps no other block of the stripe from going.
                here_and_there = tuple(digest for digest in one.blocks if digest not in missing)
                if one.owners and here_and_there and not (draining and missing):
                    candidates.append((one._replace(blocks=here_and_there), not missing))
            lacking, _ = await self._lacking([one for one, _ in candidates], view.epoch, verify=True)
            for one, is_whole in candidates:
                bad = {digest for owner in one.owners for digest in one.blocks if digest in lacking[owner.node_id]}
                if bad:
                    sends = True
                    self._send_missing(one, lacking, spare_room_only=not draining)
                if not draining:
                    await self._drop(one._replace(blocks=tuple(digest for digest in one.blocks if digest not in bad)), view)
                elif is_whole and not bad:
                    self._confirmed[one.stripe.stripe] = (view.epoch, _digest(one.blocks))
        if draining:
            for number, stripe in enumerate(repairer.catalog, start=1):
                if self._confirmed.get(stripe.stripe) != (view.epoch, stripe.digest):
                    remaining_blocks += len(stripe.blocks)
                    remaining_bytes += stripe.bytes
                if number % (16 * STRIPES_AT_A_TIME) == 0:
                    await self._surroundings.pause(Nanos(0))
            safe = remaining_blocks == 0 and view.epoch == repairer.view.epoch
            self._drain = DrainProgress(safe, repairer.catalog.blocks, remaining_blocks, remaining_bytes, sum(self._no_room.values()))
        return sends

    def _has_no_room(self, one: _Foreign, lacking: dict[NodeId, set[BlockHash]], silent: set[NodeId]) -> bool:
        """Whether every owner that lacks something was sent it often enough, and says now that it has it not."""
        short = [owner.node_id for owner in one.owners if not lacking[owner.node_id].isdisjoint(one.blocks)]
        return all(owner not in silent and self._taken[one.stripe.stripe, owner] >= _TAKEN_OFTEN_ENOUGH for owner in short)

    async def _lacking(
        self, foreign: Sequence[_Foreign], epoch: Epoch, *, verify: bool
    ) -> tuple[dict[NodeId, set[BlockHash]], set[NodeId]]:
        """(per owner which of the blocks it does not hold, with `verify` in good order; all of them when it does not answer; those who did
        not)."""
        members = {owner.node_id: owner for one in foreign for owner in one.owners}
        lacking: dict[NodeId, set[BlockHash]] = {}
        silent: set[NodeId] = set()
        for member in members.values():
            asked = by_key_space((one.stripe.key_space, one.blocks) for one in foreign if member in one.owners)
            lacking[member.node_id] = {digest for hashes in asked.values() for digest in hashes}
            try:
                for key_space, hashes in asked.items():
                    lacking[member.node_id] -= await self._repairer.sender.held_by(member, key_space, hashes, verify=verify, epoch=epoch)
            except LarderError as error:
                self._complaints.about(member, "does not say what it holds", error)
                silent.add(member.node_id)
        return lacking, silent

    def _send_missing(self, one: _Foreign, lacking: dict[NodeId, set[BlockHash]], *, spare_room_only: bool) -> None:
        wanted = {owner.node_id: tuple(digest for digest in one.blocks if digest in lacking[owner.node_id]) for owner in one.owners}
        living = 1 + sum(not blocks for blocks in wanted.values())
        for owner in one.owners:
            if blocks := wanted[owner.node_id]:
                self._repairer.queue.put(shipment_of(one.stripe, owner, blocks, living=living, spare_room_only=spare_room_only))

    async def _drop(self, one: _Foreign, view: View) -> None:
        """What its owners in `view` said to hold, knowing that view. Unless another view has come meanwhile: this node may be an owner in
        that, and have said so to one that drops in turn. Nor while the view has not got this node: the registry was emptied, and members
        come back to it one by one. Leased copies stay, and go with a later sweep or for room."""
        own, present = self._repairer.node_id, self._repairer.view
        if not one.blocks:
            return  # no hashes would mean all of them
        if present.member(own) is None or not same_stores(view, present):
            return
        if own in reading_places(one.stripe.stripe, present, replicas=self._repairer.replicas):
            return  # of a stripe that has become hot
        evict = EvictRequested(request_id=self._surroundings.next_request_id(), key_space=one.stripe.key_space, hashes=one.blocks)
        self._repairer.counters.dropped_blocks += (await self._surroundings.ask(evict, AnswerEvict)).evicted_copies

    async def misplaced(self) -> Misplaced:
        """What would move if everything was put in its place now. Asks every store what it holds; of its holders the first in rendezvous
        order is the one to send a block, so each counts once in the cluster."""
        repairer, view = self._repairer, self._repairer.view
        found = Misplaced()
        others = repairer.other_stores()
        stores = tuple(member for member in view.stores if member in others or member.node_id == repairer.node_id)
        for bucket in range(BUCKETS):
            stripes = [(stripe, tuple(stripe.blocks)) for stripe in repairer.catalog.stripes(bucket)]
            held: dict[NodeId, set[BlockHash]] = {}
            for member in others:
                held[member.node_id] = set()
                for key_space, hashes in by_key_space((stripe.key_space, blocks) for stripe, blocks in stripes).items():
                    held[member.node_id] |= await repairer.sender.held_by(member, key_space, hashes)
            for stripe, blocks in stripes:
                holders = reading_places(stripe.stripe, view, replicas=repairer.replicas)
                if repairer.node_id not in holders:
                    found.surplus_blocks += len(blocks)
                    found.surplus_bytes += stripe.bytes
                order = rank_all(stripe.stripe, stores)
                before = tuple(takewhile(lambda node_id: node_id != repairer.node_id, order))  # all, if this node is not in the view
                mine = [digest for digest in blocks if not any(digest in held[node_id] for node_id in before)]
                for owner in holders[: repairer.replicas]:
                    lacks = tuple(digest for digest in mine if owner != repairer.node_id and digest not in held.get(owner, set()))
                    target = view.member(owner)
                    if lacks and target is not None:
                        found.shipments.append(shipment_of(stripe, target, lacks, living=1, spare_room_only=False))
            await self._surroundings.pause(Nanos(0))
        return found


def shipment_of(stripe: Stripe, target: Member, blocks: tuple[BlockHash, ...], *, living: int, spare_room_only: bool) -> Shipment:
    return Shipment(
        key_space=stripe.key_space,
        stripe=stripe.stripe,
        target=target.node_id,
        blocks=blocks,
        bytes=stripe.bytes * len(blocks) // max(1, len(stripe.blocks)),
        living=living,
        spare_room_only=spare_room_only,
    )


def _digest(blocks: tuple[BlockHash, ...]) -> int:
    """As Stripe.digest of a stripe with these blocks."""
    digest = 0
    for block in blocks:
        digest ^= digest_of(block)
    return digest
