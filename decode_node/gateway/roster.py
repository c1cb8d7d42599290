"""The nodes of one role as the gateway sees them: who is in the view, who answers, how busy each is. Polls, decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from decode_node.gateway.silence import Pace
from kvstore.clock import Clock
from kvstore.core.view import Member, MemberState, Role
from kvstore.errors import LarderError
from kvstore.ids import NodeId
from kvstore.units import Nanos, milliseconds, seconds, to_seconds

logger = logging.getLogger(__name__)

MISSES_UNTIL_SUSPECT = 2
"""One missed poll is a hiccup of a busy machine."""

_FIRST_EXCLUSION = milliseconds(500)
_LONGEST_EXCLUSION = seconds(10)

_FOLLOWED_STATES = frozenset({MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING})
_OPEN_STATES = frozenset({MemberState.ACTIVE, MemberState.SUSPECT})
"""States in which a node may get new work; a draining one finishes what it has."""


class _Connection(Protocol):
    async def close(self) -> None: ...


Backend = TypeVar("Backend", bound=_Connection)
Load = TypeVar("Load")


class Tracked(Generic[Backend, Load]):
    """One process start of one node."""

    def __init__(self, member: Member, backend: Backend) -> None:
        self.member = member
        self.backend = backend
        self.load: Load | None = None
        """The last answer to a poll; None before the first."""
        self.misses = 0
        """Polls missed since the last answer."""
        self.pace = Pace()
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self._failures = 0
        self._excluded_until = Nanos(0)

    @property
    def answers(self) -> bool:
        return self.load is not None and self.misses < MISSES_UNTIL_SUSPECT

    @property
    def is_open(self) -> bool:
        return self.member.state in _OPEN_STATES

    def is_suspect(self, now: Nanos) -> bool:
        return not self.answers or now < self._excluded_until or self.member.state is MemberState.SUSPECT

    def on_call_failed(self, now: Nanos, *, silent: bool = False) -> None:
        """Suspect for a while, longer each time: a node may answer polls and still fail every stream. A `silent` one is suspect until it
        answers a poll: its streams have gone, so it would look like the least busy of all."""
        if silent:
            self.misses = max(self.misses, MISSES_UNTIL_SUSPECT)
        pause = min(_LONGEST_EXCLUSION, _FIRST_EXCLUSION << min(self._failures, 10))
        self._failures += 1
        self._excluded_until = Nanos(now + pause)

    def on_call_succeeded(self) -> None:
        self._failures = 0
        self._excluded_until = Nanos(0)

    @contextmanager
    def busy(self, *, tokens: int = 0) -> Iterator[None]:
        """Counts a call that the next poll has not seen yet."""
        self.in_flight += 1
        self.in_flight_tokens += tokens
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            self.in_flight_tokens -= tokens
            if not self.in_flight:
                self.idle.set()


class Roster(Generic[Backend, Load]):
    """All nodes of one role, each with its own poller, so that a frozen one holds up nobody."""

    def __init__(
        self,
        name: str,
        *,
        roles: Collection[Role],
        connect: Callable[[NodeId, str], Backend],
        poll: Callable[[Backend], Awaitable[Load]],
        poll_every: Nanos,
        clock: Clock,
    ) -> None:
        self.nodes: dict[NodeId, Tracked[Backend, Load]] = {}
        self._name = name
        self._roles = roles
        self._connect = connect
        self._poll_backend = poll
        self._poll_every_s = to_seconds(poll_every)
        self._clock = clock
        self._pollers: dict[NodeId, asyncio.Task[None]] = {}

    def open_nodes(self) -> Iterator[tuple[Tracked[Backend, Load], Load, bool]]:
        """(node, its last load, suspect) of each node that has ever answered and may get new work."""
        now = self._clock.now()
        for node in self.nodes.values():
            if node.load is not None and node.is_open:
                yield node, node.load, node.is_suspect(now)

    @property
    def all_polled(self) -> bool:
        return all(node.load is not None or node.misses for node in self.nodes.values())

    def follow(self, members: Iterable[Member], group: asyncio.TaskGroup) -> None:
        """Make the roster what the view says. A new boot id is a new node: nothing known of the old one holds."""
        present = {member.node_id: member for member in members if member.role in self._roles and member.state in _FOLLOWED_STATES}
        for node_id, node in list(self.nodes.items()):
            member = present.get(node_id)
            if member is not None and (member.boot_id, member.address) == (node.member.boot_id, node.member.address):
                node.member = member
                continue
            del self.nodes[node_id]
            self._pollers.pop(node_id).cancel()
            group.create_task(_close_when_idle(node))
        for node_id, member in present.items():
            if node_id not in self.nodes:
                node = self.nodes[node_id] = Tracked(member, self._connect(node_id, member.address))
                self._pollers[node_id] = group.create_task(self._poll(node))

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.backend.close()

    async def _poll(self, node: Tracked[Backend, Load]) -> None:
        while True:
            began = self._clock.now()
            try:
                node.load = await self._poll_backend(node.backend)
                node.misses = 0
            except LarderError as error:
                node.misses += 1
                if node.misses == MISSES_UNTIL_SUSPECT:
                    logger.warning("%s node %s does not answer: %s", self._name, node.member.node_id, error)
            node.pace.note(Nanos(self._clock.now() - began))
            await asyncio.sleep(self._poll_every_s)


async def _close_when_idle(node: Tracked[Backend, Load]) -> None:
    """A node that left the view may still be streaming: its streams end by themselves or fail over."""
    try:
        await node.idle.wait()
    finally:
        await node.backend.close()
