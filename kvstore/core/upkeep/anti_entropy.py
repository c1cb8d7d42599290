"""Anti-entropy: replicas compare what they hold, bucket by bucket, and what one lacks is put into the repair queue.

Digests are made of the catalog when they are asked for, on both sides within one round trip, so puts under way make few buckets differ
and not all. What differs is asked for stripe by stripe, then block by block.
"""

from __future__ import annotations

import logging

from kvstore.core.catalog import BUCKETS, Stripe
from kvstore.core.placement import place
from kvstore.core.upkeep.handover import shipment_of
from kvstore.core.upkeep.repairer import STRIPES_AT_A_TIME, Repairer
from kvstore.core.upkeep.sender import CALL_TIMEOUT
from kvstore.core.view import Member, View
from kvstore.errors import LarderError
from kvstore.ids import NodeId
from kvstore.units import Nanos, seconds

logger = logging.getLogger(__name__)

BUCKETS_OF_A_CALL = 32
_LOOK_AGAIN_AFTER_ROUNDS = 10
_PAUSE_WHEN_ALONE = seconds(1)


async def shared_stripes(repairer: Repairer, view: View, other: NodeId, bucket: int) -> list[Stripe]:
    """Stripes of the bucket that are here and that both this node and the other one own. Gives up the loop now and then."""
    shared = []
    for number, stripe in enumerate(repairer.catalog.stripes(bucket), start=1):
        owners = place(stripe.stripe, view, replicas=repairer.replicas)
        if repairer.node_id in owners and other in owners:
            shared.append(stripe)
        if number % STRIPES_AT_A_TIME == 0:
            await repairer.surroundings.pause(Nanos(0))
    return shared


async def bucket_digests(repairer: Repairer, view: View, other: NodeId, first: int, count: int) -> list[int]:
    digests, seen = [0] * count, 0
    for bucket in repairer.catalog.filled(first, count):
        for stripe in await shared_stripes(repairer, view, other, bucket):
            digests[bucket - first] ^= stripe.digest
            seen += 1
        if seen >= STRIPES_AT_A_TIME:
            seen = 0
            await repairer.surroundings.pause(Nanos(0))
    return digests


class AntiEntropy:
    """The side that asks; peer_answers.py answers. `run` never returns."""

    def __init__(self, repairer: Repairer) -> None:
        self._repairer = repairer
        self._looked_at: dict[tuple[NodeId, int], tuple[int, int]] = {}
        """Buckets that differed, as both sides had them, and that need not be looked at again as long as they are so: a cache may lack what
        another has for want of room."""

    async def run(self, every: Nanos) -> None:
        rounds = 0
        while True:
            members = self._repairer.other_stores()
            if not members:
                await self._repairer.surroundings.pause(_PAUSE_WHEN_ALONE)
                continue
            rounds += 1
            if rounds % _LOOK_AGAIN_AFTER_ROUNDS == 0:
                self._looked_at.clear()
            steps = len(members) * BUCKETS // BUCKETS_OF_A_CALL
            for member in members:
                for first in range(0, BUCKETS, BUCKETS_OF_A_CALL):
                    await self._repairer.surroundings.pause(Nanos(every // steps))
                    # While the plan of a new view is worked off, everything differs.
                    if self._repairer.idle:
                        try:
                            await self._compare(member, first)
                        except LarderError as error:
                            logger.debug("anti-entropy with %s: %s", member.node_id, error)

    async def _compare(self, member: Member, first: int) -> None:
        repairer, view = self._repairer, self._repairer.view
        mine = await bucket_digests(repairer, view, member.node_id, first, BUCKETS_OF_A_CALL)
        stub = repairer.surroundings.peer(member)
        differing = await stub.compare_buckets(repairer.node_id, view.epoch, first, mine, timeout=CALL_TIMEOUT)
        for bucket, theirs in differing.items():
            pair = (mine[bucket - first], theirs)
            if self._looked_at.get((member.node_id, bucket)) != pair:
                await self._compare_stripes(member, view, bucket)
                self._looked_at[member.node_id, bucket] = pair

    async def _compare_stripes(self, member: Member, view: View, bucket: int) -> None:
        repairer = self._repairer
        theirs = await repairer.surroundings.peer(member).list_stripes(repairer.node_id, view.epoch, bucket, timeout=CALL_TIMEOUT)
        for stripe in await shared_stripes(repairer, view, member.node_id, bucket):
            if theirs.get(stripe.stripe, 0) != stripe.digest:
                await self._send_missing(member, view, stripe)

    async def _send_missing(self, member: Member, view: View, stripe: Stripe) -> None:
        """What the other one lacks, unless an owner before this one has it: that one finds it too, and is the one to send."""
        repairer = self._repairer
        blocks = tuple(stripe.blocks)
        lacks = set(blocks) - await repairer.sender.held_by(member, stripe.key_space, blocks)
        owners = place(stripe.stripe, view, replicas=repairer.replicas)
        living = repairer.replicas - 1
        for owner in owners[: owners.index(repairer.node_id)]:
            before = view.member(owner)
            if lacks and before is not None and owner != member.node_id:
                lacks -= await repairer.sender.held_by(before, stripe.key_space, tuple(lacks))
        if lacks:
            wanted = tuple(digest for digest in blocks if digest in lacks)
            repairer.counters.found_blocks += len(wanted)
            repairer.queue.put(shipment_of(stripe, member, wanted, living=max(1, living), spare_room_only=True))
