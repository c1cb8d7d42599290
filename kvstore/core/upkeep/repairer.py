"""The repairer: sees the view change, plans what this node owes to new owners, and sends it, most endangered first, at a set rate.

The plan goes from the last view under which nothing was owed to the present one. Whatever it cannot know (an owner that lacks a block all
the same, a copy beside its place) is found by handover.py and anti_entropy.py, which put it into the same queue.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.catalog import Catalog
from kvstore.core.repair_plan import LIVING_STATES, Plan, Shipment, ShipmentQueue, same_stores
from kvstore.core.token_bucket import TokenBucket
from kvstore.core.upkeep.complaints import Complaints
from kvstore.core.upkeep.repair_config import RepairConfig
from kvstore.core.upkeep.sender import CALL_TIMEOUT, Sender, Sent
from kvstore.core.upkeep.surroundings import Surroundings
from kvstore.core.view import Member, View
from kvstore.errors import LarderError
from kvstore.ids import Epoch, NodeId
from kvstore.units import MIB, Bytes, Nanos, milliseconds, seconds, to_seconds

logger = logging.getLogger(__name__)

LOOK_EVERY = milliseconds(100)
"""For a new view, and for work."""
STRIPES_AT_A_TIME = 64
"""Planned or compared without giving up the event loop: two placements each, a millisecond in a cluster of tens."""
_MOST_ATTEMPTS = 5
_RETRY_AFTER = seconds(1)
_MOST_BURST = Bytes(8 * MIB)


@dataclass(slots=True)
class RepairCounters:
    """Since the start of the node."""

    sent_blocks: int = 0
    sent_bytes: int = 0
    refused_blocks: int = 0
    failed_blocks: int = 0
    found_blocks: int = 0
    """By anti-entropy."""
    dropped_blocks: int = 0
    """Surplus that went."""


class Repairer:
    """`begin`, then both processes, which never return."""

    def __init__(self, surroundings: Surroundings, catalog: Catalog, *, node_id: NodeId, replicas: int, config: RepairConfig) -> None:
        self.surroundings = surroundings
        self.catalog = catalog
        self.sender = Sender(surroundings)
        self.queue = ShipmentQueue()
        self.counters = RepairCounters()
        self._complaints = Complaints(logger, surroundings.now)
        self.node_id = node_id
        self.replicas = replicas
        self.config = config
        self._settled = View(Epoch(0))
        """The last view under which this node owed nothing."""
        self._planned = self._settled
        """The view of which the queue is the plan."""
        self._planning = False
        self._in_hand: Shipment | None = None
        self._resting: list[tuple[Nanos, Shipment]] = []
        """Their target failed: again at that time."""
        self._busy_since: Nanos | None = None
        self._sent_since = 0
        self.when_sent: Callable[[Shipment, Sent], None] = lambda shipment, sent: None
        """Told of each shipment that reached its target."""

    @property
    def view(self) -> View:
        return self.surroundings.view

    @property
    def settled_epoch(self) -> Epoch:
        """The latest view for which this node owes nothing; behind the present one while it plans or sends."""
        present = self.view
        if not self.config.rate:
            return present.epoch  # it never owes anything
        if self.idle and same_stores(self._planned, present):
            return present.epoch
        return Epoch(min(self._settled.epoch, present.epoch - 1))

    @property
    def idle(self) -> bool:
        return not (self._planning or self.queue or self._in_hand or self._resting)

    def waiting(self) -> list[Shipment]:
        """Everything that is still to be sent. Cost: O(waiting)."""
        in_hand = [self._in_hand] if self._in_hand is not None else []
        return [*self.queue, *(shipment for _, shipment in self._resting), *in_hand]

    def bytes_per_s(self) -> float:
        """Over the present stretch of work; 0 between two."""
        if self._busy_since is None:
            return 0.0
        return self._sent_since / max(to_seconds(Nanos(self.surroundings.now() - self._busy_since)), 0.1)

    def begin(self) -> None:
        """Under the present view nothing is owed."""
        self._settled = self._planned = self.view

    # -- planning

    async def follow_views(self) -> None:
        while True:
            await self.surroundings.pause(LOOK_EVERY)
            if not same_stores(self.view, self._planned):
                self._planning = True
                seen = None
                while seen is None or not same_stores(seen, self.view):  # it is the quiet that is waited for
                    seen = self.view
                    await self.surroundings.pause(self.config.delay)
                await self._plan(self.view)
                self._planning = False
            elif self.idle:
                self._settled = self._planned = self.view
                self._busy_since = None

    async def _plan(self, view: View) -> None:
        self.queue.clear()
        self._resting.clear()
        plan = Plan(node_id=self.node_id, old=self._settled, new=view, replicas=self.replicas)
        for number, stripe in enumerate(self.catalog, start=1):
            duty = plan.duty_of(stripe.stripe)
            for target in duty.targets if duty is not None else ():
                assert duty is not None
                self.queue.put(
                    Shipment(
                        key_space=stripe.key_space,
                        stripe=stripe.stripe,
                        target=target,
                        blocks=tuple(stripe.blocks),
                        bytes=stripe.bytes,
                        living=duty.living,
                    )
                )
            if number % STRIPES_AT_A_TIME == 0:
                await self.surroundings.pause(Nanos(0))
        self._planned = view
        if self.queue:
            logger.info("epoch %d: %d stripes, %d bytes to send to new owners", view.epoch, len(self.queue), self.queue.bytes)

    # -- sending

    async def work(self) -> None:
        burst = Bytes(min(_MOST_BURST, self.config.rate // 4))
        bucket = TokenBucket(rate=self.config.rate, burst=burst, now=self.surroundings.now())
        while True:
            now = self.surroundings.now()
            self._wake_up(now)
            shipment = self.queue.take()
            if shipment is None:
                await self.surroundings.pause(LOOK_EVERY)
                continue
            if self._busy_since is None:
                self._busy_since, self._sent_since = now, 0
            self._in_hand = shipment
            try:
                await self.surroundings.pause(bucket.wait(now))
                sent = await self._send(shipment)
            finally:
                self._in_hand = None
            bucket.spend(sent.sent_bytes, self.surroundings.now())

    def _wake_up(self, now: Nanos) -> None:
        due = [shipment for at, shipment in self._resting if at <= now]
        if due:
            self._resting = [(at, shipment) for at, shipment in self._resting if at > now]
            for shipment in due:
                self.queue.put(shipment)

    async def _send(self, shipment: Shipment) -> Sent:
        """Trouble with a target is counted and tried again some times; what is given up then is found by the anti-entropy."""
        member = self.view.member(shipment.target)
        if member is None or member.state not in LIVING_STATES:
            return Sent()  # the view has moved on, and so will the plan
        try:
            sent = await self.sender.send(member, shipment)
        except LarderError as error:
            if shipment.attempts == 0:
                self._complaints.about(member, "does not take its copies", error)
            if shipment.attempts < _MOST_ATTEMPTS:
                later = Nanos(self.surroundings.now() + _RETRY_AFTER)
                self._resting.append((later, dataclasses.replace(shipment, attempts=shipment.attempts + 1)))
            else:
                self.counters.failed_blocks += len(shipment.blocks)
            return Sent()
        self.when_sent(shipment, sent)
        self.counters.sent_blocks += sent.sent_blocks
        self.counters.sent_bytes += sent.sent_bytes
        self.counters.refused_blocks += sent.refused_blocks
        self.counters.failed_blocks += sent.lost_blocks
        self._sent_since += sent.sent_bytes
        return sent

    # -- what the others of the view do

    def other_stores(self) -> list[Member]:
        """Stores beside this one that have what they had."""
        return [member for member in self.view.stores if member.state in LIVING_STATES and member.node_id != self.node_id]

    async def others_settled(self) -> bool:
        """Whether no other node owes anything for the present view. One that does not answer is not waited for: it may be about to be
        declared dead, and then the view is another one."""
        epoch = self.view.epoch
        for member in self.other_stores():
            try:
                progress = await self.surroundings.peer(member).progress(timeout=CALL_TIMEOUT)
            except LarderError:
                continue
            if progress.settled_epoch < epoch:
                return False
        return epoch == self.view.epoch
