"""Membership of a simulated cluster, as the scripts of kvstore/registry/scripts.py keep it in Redis: each call checks what it replaces, and
each change is a new epoch. Calls come in by the network, views go out by it, late and out of order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from sim.messages import TIMEOUT
from sim.network import Network
from sim.timeline import Reply, Timeline

from kvstore.core.view import Member, MemberState, View
from kvstore.ids import Epoch, NodeId
from kvstore.registry.config import RegistryConfig
from kvstore.registry.redis_link import RegistryAway
from kvstore.registry.standing import NotRenewed, Renewed
from kvstore.units import Nanos, milliseconds, seconds

NAME = "registry"
CONFIG = RegistryConfig(lease_ttl=seconds(3), dead_after=seconds(3), forget_after=seconds(60))
_TOLD_AGAIN_EVERY = seconds(1)
"""As by polling: a lost announcement costs no more."""

_OWNS = (MemberState.ACTIVE, MemberState.SUSPECT)
_GONE = (MemberState.LEFT, MemberState.DEAD)


class Follower(Protocol):
    def see(self, view: View) -> None: ...


class SimulatedRegistry:
    def __init__(self, timeline: Timeline, network: Network) -> None:
        self.view = View(Epoch(0))
        self.followers: dict[str, Follower] = {}
        """By their names on the network."""
        self._timeline = timeline
        self._network = network
        self._members: dict[NodeId, Member] = {}
        self._since: dict[NodeId, Nanos] = {}
        self._leases: dict[NodeId, Nanos] = {}
        self._swept_at = Nanos(-(10**18))
        self._calm_until = Nanos(0)
        timeline.after(_TOLD_AGAIN_EVERY, self._tell_again)

    # --- the scripts ----------------------------------------------------------------------------------------------------------------------

    def join(self, member: Member, *, comes_back: bool) -> float | None:
        held = self._members.get(member.node_id)
        if comes_back and held is not None and held.boot_id != member.boot_id:
            return None
        if not comes_back and held is not None and held.state in _OWNS:
            member = dataclasses.replace(member, takeover=held.takeover)
        self._leases[member.node_id] = Nanos(self._timeline.now + CONFIG.lease_ttl)
        self._write(member)
        return member.takeover

    def renew(self, member: Member) -> Renewed | NotRenewed:
        held = self._members.get(member.node_id)
        if held is None:
            return NotRenewed.ABSENT if self._members else NotRenewed.EMPTIED
        if held.boot_id != member.boot_id:
            return NotRenewed.SUPERSEDED
        if held.state in _GONE:
            return NotRenewed.REMOVED
        self._leases[member.node_id] = Nanos(self._timeline.now + CONFIG.lease_ttl)
        if held.state is MemberState.SUSPECT:
            held = dataclasses.replace(held, state=MemberState.ACTIVE)
            self._write(held)
        return Renewed(state=held.state, takeover=round(held.takeover * 1000) / 1000)

    def change(self, member: Member, *, before: MemberState, after: MemberState) -> bool:
        held = self._members.get(member.node_id)
        if held is None or held.boot_id != member.boot_id or held.state is not before:
            return False
        if after in _GONE:
            self._leases.pop(member.node_id, None)
        self._write(dataclasses.replace(held, state=after))
        return True

    def take_over(self, member: Member, *, takeover: float) -> bool:
        held = self._members.get(member.node_id)
        known = held is not None and held.boot_id == member.boot_id and round(held.takeover * 1000) == round(member.takeover * 1000)
        if held is None or not known or held.state not in _OWNS:
            return False
        since = self._since[member.node_id]
        self._write(dataclasses.replace(held, takeover=round(takeover * 1000) / 1000))
        self._since[member.node_id] = since
        return True

    def sweep(self) -> None:
        now, gap = self._timeline.now, self._timeline.now - self._swept_at
        self._swept_at = now
        if gap > CONFIG.lease_ttl // 2:
            self._calm_until = Nanos(now + CONFIG.lease_ttl)
        if now < self._calm_until:
            return
        changed = False
        for node_id, member in list(self._members.items()):
            expired = self._leases.get(node_id, Nanos(0)) < now
            if member.state in _GONE:
                if now - self._since[node_id] >= CONFIG.forget_after:
                    del self._members[node_id]
                    changed = True
            elif expired and member.state is MemberState.ACTIVE:
                self._set(dataclasses.replace(member, state=MemberState.SUSPECT))
                changed = True
            elif expired and (member.state is not MemberState.SUSPECT or now - self._since[node_id] >= CONFIG.dead_after):
                self._set(dataclasses.replace(member, state=MemberState.DEAD))
                changed = True
        if changed:
            self._bump()

    # --- views ----------------------------------------------------------------------------------------------------------------------------

    def _set(self, member: Member) -> None:
        self._members[member.node_id] = member
        self._since[member.node_id] = self._timeline.now

    def _write(self, member: Member) -> None:
        self._set(member)
        self._bump()

    def _bump(self) -> None:
        self.view = View(Epoch(self.view.epoch + 1), tuple(member for _, member in sorted(self._members.items())))
        self._tell()

    def _tell(self) -> None:
        view = self.view
        for name, follower in self.followers.items():
            self._network.send(NAME, name, lambda follower=follower: follower.see(view))  # type: ignore[misc]

    def _tell_again(self) -> None:
        self._tell()
        self._timeline.after(_TOLD_AGAIN_EVERY, self._tell_again)


class RegistryWire:
    """The registry as one node reaches it: RegistryCalls over the network."""

    def __init__(self, name: str, registry: SimulatedRegistry, timeline: Timeline, network: Network) -> None:
        self._name = name
        self._registry = registry
        self._timeline = timeline
        self._network = network

    async def view(self) -> View:
        return await self._ask(lambda: self._registry.view)

    async def join(self, member: Member, *, comes_back: bool) -> float | None:
        return await self._ask(lambda: self._registry.join(member, comes_back=comes_back))

    async def renew(self, member: Member) -> Renewed | NotRenewed:
        return await self._ask(lambda: self._registry.renew(member))

    async def change(self, member: Member, *, before: MemberState, after: MemberState) -> bool:
        return await self._ask(lambda: self._registry.change(member, before=before, after=after))

    async def take_over(self, member: Member, *, takeover: float) -> bool:
        return await self._ask(lambda: self._registry.take_over(member, takeover=takeover))

    async def restore(self, members: Any, *, known: Epoch) -> None:
        raise AssertionError("this registry is never empty")

    async def sweep(self) -> None:
        await self._ask(self._registry.sweep)

    async def _ask(self, do: Callable[[], Any]) -> Any:
        reply = Reply()

        def arrive() -> None:
            value = do()
            self._network.send(NAME, self._name, lambda: reply.set(value))

        self._network.send(self._name, NAME, arrive)
        self._timeline.after(CONFIG.call_timeout + milliseconds(1), lambda: reply.set(TIMEOUT))
        answer = await reply
        if answer is TIMEOUT:
            raise RegistryAway("no answer")
        return answer
