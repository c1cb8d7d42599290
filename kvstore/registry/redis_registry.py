"""Membership in Redis: follows the view, keeps this process a member, sweeps who is not.

While Redis is away the last view stays and nobody is declared dead; a Redis that comes back empty is filled again by the members.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from enum import StrEnum
from typing import NoReturn

from kvstore.core.view import TRANSITIONS, Member, MemberEvent, MemberState, View
from kvstore.errors import ConfigError, StaleView
from kvstore.ids import Epoch, StripeId
from kvstore.registry.backoff import Backoff
from kvstore.registry.config import RegistryConfig
from kvstore.registry.redis_link import RedisLink, RegistryAway, Renewal
from kvstore.registry.redis_url import without_password
from kvstore.units import Nanos, to_seconds

log = logging.getLogger(__name__)

_GONE = frozenset({MemberState.LEFT, MemberState.DEAD})


class Membership(StrEnum):
    """What this process is to the registry."""

    OBSERVER = "observer"
    """Follows the view only; never joined, or left."""
    MEMBER = "member"
    SUPERSEDED = "superseded"
    """Another process joined under this node id: this one no longer renews."""


class RedisRegistry:
    """A ViewSource, and this process's membership if it joins. Belongs to one event loop.

    Life: `start` -> (`join` -> `serve` -> `drain` -> `leave`) -> `close`. Without `join` it only watches.
    """

    def __init__(self, url: str, *, config: RegistryConfig | None = None, rng: random.Random | None = None) -> None:
        """Raises ConfigError when the URL is none. `rng` only spreads attempts in time."""
        self._url = url
        self._config = config or RegistryConfig()
        self._rng = rng or random.Random()
        self._link = RedisLink(url, config=self._config)
        self._view = View(Epoch(0))
        self._view_changed = asyncio.Condition()
        self._poll_now = asyncio.Event()
        self._superseded = asyncio.Event()
        self._member: Member | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self.membership = Membership.OBSERVER
        self.connected = False
        """Whether Redis answered when last asked."""

    # -- the view

    @property
    def view(self) -> View:
        return self._view

    async def next_view(self, *, after: Epoch) -> View:
        """Wait until a view newer than `after` is known; returns at once if it is. No bound of its own: the caller sets one."""
        async with self._view_changed:
            await self._view_changed.wait_for(lambda: self._view.epoch > after)
            return self._view

    async def start(self) -> None:
        """Connect, load the first view, follow it from now on. Raises ConfigError when Redis does not answer."""
        assert not self._tasks, "started twice"
        try:
            await self._link.ping()
            await self._poll()
        except RegistryAway as error:
            await self._link.close()
            raise ConfigError(f"Redis at {without_password(self._url)} cannot be reached: {error}; start one or set redis_url") from None
        self._own(self._repeat("poll", self._poll_after_pause))
        self._own(self._repeat("listen", self._listen))

    async def close(self) -> None:
        """Stop following and renewing. Does not leave: a process that only ends is noticed by its lease."""
        self._closing = True
        pending: set[asyncio.Task[None]] = set(self._tasks)
        self._tasks.clear()
        while pending:
            # More than once: asyncio.wait_for, on which redis-py sends, loses a cancellation that comes just as it ends (Python < 3.12).
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        await self._link.close()

    async def __aenter__(self) -> RedisRegistry:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- this process's membership

    @property
    def member(self) -> Member | None:
        """This process as it last knew itself to be registered."""
        return self._member

    async def join(self, member: Member) -> None:
        """Register and keep the lease renewed. `member.state` is JOINING, or ACTIVE for a member that serves at once.

        Takes the node id over from an earlier process, whose boot id is then behind. Raises RegistryAway when Redis is.
        """
        assert member.state in (MemberState.JOINING, MemberState.ACTIVE), member.state
        assert self._member is None, "joined twice"
        takeover = await self._link.join(member, comes_back=False)
        assert takeover is not None, "who starts takes its node id over"
        self._member = dataclasses.replace(member, takeover=takeover)
        self.membership = Membership.MEMBER
        self._own(self._repeat("renew", self._renew_after_pause))
        self._own(self._repeat("sweep", self._sweep_after_pause))
        self._poll_now.set()

    async def serve(self) -> None:
        """JOINING -> ACTIVE: from now on it owns stripes. Raises RegistryAway, StaleView."""
        await self._change(MemberEvent.SERVES)

    async def drain(self) -> None:
        """ACTIVE -> DRAINING: gives what it has, takes nothing new. A second time changes nothing. Raises RegistryAway, StaleView."""
        if self._member is None or self._member.state is not MemberState.DRAINING:
            await self._change(MemberEvent.DRAINS)

    async def take_over(self, takeover: float) -> None:
        """The next step of a newcomer: it owns this much of the stripes that fall to it. Raises RegistryAway, StaleView."""
        assert self._member is not None, "not joined"
        if not await self._link.take_over(self._member, takeover=takeover):
            raise StaleView(f"{self._member.node_id} has no stripes to take over now; it must renew first")
        self._member = dataclasses.replace(self._member, takeover=takeover)
        self._poll_now.set()

    async def announce_hot(self, stripes: Mapping[StripeId, int], *, ttl: Nanos) -> None:
        """Stripes of this member that many read -> extra replicas, for so long. Raises RegistryAway, StaleView."""
        assert self._member is not None, "not joined"
        if not await self._link.announce_hot(self._member, stripes, ttl=ttl):
            raise StaleView(f"{self._member.node_id} owns no stripes now; it must renew first")
        await self._poll()

    async def leave(self) -> None:
        """-> LEFT; stop renewing. Raises RegistryAway, StaleView; the process may end all the same: its lease runs out."""
        # First: a renewal whose answer is on its way must not take the parting for a removal and join again.
        self.membership = Membership.OBSERVER
        await self._change(MemberEvent.LEAVES)

    async def until_superseded(self) -> NoReturn:
        """Wait until another process has taken this node id over, then raise ConfigError: nobody comes here any more."""
        await self._superseded.wait()
        assert self._member is not None
        raise ConfigError(f"another process has joined as {self._member.node_id!r}; give each process of a cluster a node_id of its own")

    async def _change(self, event: MemberEvent) -> None:
        assert self._member is not None, "not joined"
        after = TRANSITIONS.get((self._member.state, event))
        if after is None:
            raise StaleView(f"{self._member.node_id} is {self._member.state}: it cannot take that step from there")
        for before in (self._member.state, MemberState.SUSPECT):
            # A missed lease may have made us SUSPECT behind our back; that is as good as ACTIVE to a change of ours.
            if (before, event) in TRANSITIONS and await self._link.change(self._member, before=before, after=TRANSITIONS[before, event]):
                self._member = dataclasses.replace(self._member, state=after)
                self._poll_now.set()
                return
        raise StaleView(f"{self._member.node_id} is not {self._member.state} in the registry any more; it must renew first")

    # -- loops; each is one task that lives until `close`

    def _own(self, loop: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(loop))

    async def _repeat(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        backoff = Backoff(longest=self._config.longest_pause, rng=self._rng)
        while not self._closing:
            try:
                await step()
                backoff.reset()
            except RegistryAway as error:
                if self.connected:
                    log.warning("Redis is away (%s: %s); the view of epoch %d stays", name, error, self._view.epoch)
                self.connected = False
                await asyncio.sleep(to_seconds(backoff.next_pause()))
            except Exception:
                # A bug must not end the loop unseen: a node that no longer renews would be declared dead.
                log.exception("a bug in the %s loop: this must not happen", name)
                await asyncio.sleep(to_seconds(self._config.longest_pause))

    async def _poll_after_pause(self) -> None:
        try:
            async with asyncio.timeout(to_seconds(self._jittered(self._config.poll_every))):
                await self._poll_now.wait()
        except TimeoutError:
            pass
        self._poll_now.clear()
        try:
            await self._poll()
        except RegistryAway:
            self._poll_now.set()  # what was announced has not been seen yet: no full pause before the next attempt
            raise

    async def _poll(self) -> None:
        view = await self._link.newer_view(self._view.epoch)
        self.connected = True
        if view is not None and view.epoch > self._view.epoch:
            async with self._view_changed:
                self._view = view
                self._view_changed.notify_all()

    async def _listen(self) -> None:
        async with aclosing(self._link.announcements()) as announcements:
            async for _ in announcements:
                self._poll_now.set()

    async def _renew_after_pause(self) -> None:
        await asyncio.sleep(to_seconds(self._jittered(self._config.renew_every)))
        if self.membership is Membership.MEMBER:
            await self._renew()

    async def _renew(self) -> None:
        member = self._member
        assert member is not None
        renewal = await self._link.renew(member)
        if renewal is Renewal.RENEWED or self.membership is not Membership.MEMBER:
            return
        log.warning("the registry's answer to the renewal of %s: %s", member.node_id, renewal)
        match renewal:
            case Renewal.EMPTIED:
                known = [other for other in self._view.members if other.state not in _GONE and other.node_id != member.node_id]
                await self._link.restore([*known, member], known=self._view.epoch)
            case Renewal.ABSENT | Renewal.REMOVED:
                if await self._link.join(member, comes_back=True) is None:
                    self._give_way()
            case Renewal.SUPERSEDED:
                self._give_way()

    def _give_way(self) -> None:
        self.membership = Membership.SUPERSEDED
        self._superseded.set()
        self._poll_now.set()

    async def _sweep_after_pause(self) -> None:
        await asyncio.sleep(to_seconds(self._jittered(self._config.renew_every)))
        if self.membership is Membership.MEMBER:
            await self._link.sweep()

    def _jittered(self, pause: Nanos) -> Nanos:
        return Nanos(round(pause * (0.75 + self._rng.random() / 4)))
