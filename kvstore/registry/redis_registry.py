"""Membership in Redis: follows the view, keeps this process a member, sweeps who is not.

While Redis is away the last view stays and nobody is declared dead; a Redis that comes back empty is filled again by the members.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import NoReturn

from kvstore.core.view import Member, MemberEvent, View
from kvstore.errors import ConfigError, StaleView
from kvstore.ids import Epoch, StripeId
from kvstore.registry.backoff import Backoff
from kvstore.registry.config import RegistryConfig
from kvstore.registry.redis_link import RedisLink, RegistryAway
from kvstore.registry.redis_url import without_password
from kvstore.registry.standing import Membership, Standing
from kvstore.units import Nanos, to_seconds

log = logging.getLogger(__name__)


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
        self._standing = Standing(self._link)
        self._view = View(Epoch(0))
        self._view_changed = asyncio.Condition()
        self._poll_now = asyncio.Event()
        self._superseded = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
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
    def membership(self) -> Membership:
        return self._standing.membership

    @property
    def member(self) -> Member | None:
        """This process as it last knew itself to be registered."""
        return self._standing.member

    async def join(self, member: Member) -> None:
        """Register and keep the lease renewed. `member.state` is JOINING, or ACTIVE for a member that serves at once.

        Takes the node id over from an earlier process, whose boot id is then behind. Raises RegistryAway when Redis is.
        """
        await self._standing.join(member)
        self._own(self._repeat("renew", self._renew_after_pause))
        self._own(self._repeat("sweep", self._sweep_after_pause))
        self._poll_now.set()

    async def serve(self) -> None:
        """JOINING -> ACTIVE: from now on it owns stripes. Raises RegistryAway, StaleView."""
        await self._standing.change(MemberEvent.SERVES)
        self._poll_now.set()

    async def drain(self) -> None:
        """ACTIVE -> DRAINING: gives what it has, takes nothing new. A second time changes nothing. Raises RegistryAway, StaleView."""
        await self._standing.drain()
        self._poll_now.set()

    async def take_over(self, takeover: float) -> None:
        """The next step of a newcomer: it owns this much of the stripes that fall to it. Raises RegistryAway, StaleView."""
        await self._standing.take_over(takeover)
        self._poll_now.set()

    async def announce_hot(self, stripes: Mapping[StripeId, int], *, ttl: Nanos) -> None:
        """Stripes of this member that many read -> extra replicas, for so long. Raises RegistryAway, StaleView."""
        member = self._standing.member
        assert member is not None, "not joined"
        if not await self._link.announce_hot(member, stripes, ttl=ttl):
            raise StaleView(f"{member.node_id} owns no stripes now; it must renew first")
        await self._poll()

    async def leave(self) -> None:
        """-> LEFT; stop renewing. Raises RegistryAway, StaleView; the process may end all the same: its lease runs out."""
        await self._standing.leave()
        self._poll_now.set()

    async def until_superseded(self) -> NoReturn:
        """Wait until another process has taken this node id over, then raise ConfigError: nobody comes here any more."""
        await self._superseded.wait()
        assert self.member is not None
        raise ConfigError(f"another process has joined as {self.member.node_id!r}; give each process of a cluster a node_id of its own")

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
        if self.membership is Membership.MEMBER and not await self._standing.renew(self._view):
            self._superseded.set()
            self._poll_now.set()

    async def _sweep_after_pause(self) -> None:
        await asyncio.sleep(to_seconds(self._jittered(self._config.renew_every)))
        if self.membership is Membership.MEMBER:
            await self._link.sweep()

    def _jittered(self, pause: Nanos) -> Nanos:
        return Nanos(round(pause * (0.75 + self._rng.random() / 4)))
