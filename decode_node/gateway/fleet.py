"""The cluster as the gateway sees it: rosters of decode, prefill and store nodes, which model they serve, and what is missing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from decode_node.gateway.nodes import Backends, DecodeBackend, DecodeLoad, ModelIdentity, PrefillBackend, PrefillLoad, StoreBackend
from decode_node.gateway.roster import Roster, Tracked
from decode_node.gateway.router import DecodeCandidate, PrefillCandidate
from kvstore.clock import Clock
from kvstore.core.view import DECODE_ROLES, PREFILL_ROLES, Role
from kvstore.registry.view_source import ViewSource
from kvstore.units import Nanos, to_seconds

DecodeNode = Tracked[DecodeBackend, DecodeLoad]
PrefillNode = Tracked[PrefillBackend, PrefillLoad]

_FIRST_LOOK_CHECK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the decode nodes serve, from their own mouths."""

    identity: ModelIdentity
    block_tokens: int
    max_positions: int
    """Prompt and answer together, on each of those that answer: any of them may have to go on with an answer."""


class FleetHealth(NamedTuple):
    ready: bool
    """A decode node answers: requests can be served, if need be without store and prefill nodes."""
    degraded: tuple[str, ...]
    """One sentence for each thing that is missing."""


class Fleet:
    """Follows the view while `run` runs."""

    def __init__(
        self,
        views: ViewSource,
        backends: Backends,
        *,
        clock: Clock,
        poll_every: Nanos,
        poll_timeout: Nanos,
        replicas: int,
        registry_answers: Callable[[], bool] = lambda: True,
    ) -> None:
        self.decode: Roster[DecodeBackend, DecodeLoad] = Roster(
            "decode",
            roles=DECODE_ROLES,
            connect=backends.decode,
            poll=lambda backend: backend.load(timeout=poll_timeout),
            poll_every=poll_every,
            clock=clock,
        )
        self.prefill: Roster[PrefillBackend, PrefillLoad] = Roster(
            "prefill",
            roles=PREFILL_ROLES,
            connect=backends.prefill,
            poll=lambda backend: backend.load(timeout=poll_timeout),
            poll_every=poll_every,
            clock=clock,
        )
        self.stores: Roster[StoreBackend, bool] = Roster(
            "store",
            roles={Role.STORE},
            connect=backends.store,
            poll=lambda backend: backend.hello(timeout=poll_timeout),
            poll_every=poll_every,
            clock=clock,
        )
        self._views = views
        self._registry_answers = registry_answers
        self._clock = clock
        self._poll_every_s = to_seconds(poll_every)
        self._first_look = Nanos(2 * poll_timeout)
        self._replicas = replicas
        self._served: ServedModel | None = None

    async def run(self) -> None:
        """Follow the view and poll its nodes until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    members = self._views.view.members
                    for roster in (self.decode, self.prefill, self.stores):
                        roster.follow(members, group)
                    await asyncio.sleep(self._poll_every_s)
        finally:
            for roster in (self.decode, self.prefill, self.stores):
                await roster.close()

    async def first_look(self) -> None:
        """Return when every node of the view was polled once, answer or not, or after two poll timeouts."""
        deadline = self._clock.now() + self._first_look
        while self._clock.now() < deadline:
            await asyncio.sleep(_FIRST_LOOK_CHECK_S)
            if all(roster.all_polled for roster in (self.decode, self.prefill, self.stores)):
                return

    @property
    def served(self) -> ServedModel | None:
        """None until a decode node has answered. Stays when all of them are gone: the next one is expected to serve the same.

        The model changes only when every decode node that answers serves something else; then to what most of them serve.
        """
        loads = [node.load for node in self.decode.nodes.values() if node.load is not None and node.answers]
        if loads:
            counts = Counter(load.identity for load in loads)
            chosen = max(loads, key=lambda load: (self._is_served(load.identity), counts[load.identity], load.identity))
            self._served = ServedModel(
                identity=chosen.identity,
                block_tokens=chosen.block_tokens,
                max_positions=min(load.max_positions for load in loads if load.identity == chosen.identity),
            )
        return self._served

    @property
    def has_store(self) -> bool:
        """Without one, nothing that a prefill node computes can reach a decode node."""
        return any(node.answers for node in self.stores.nodes.values())

    def decode_candidates(self, identity: ModelIdentity) -> list[DecodeCandidate]:
        return [
            DecodeCandidate(node_id=node.member.node_id, sequences=max(load.sequences, node.in_flight), suspect=suspect)
            for node, load, suspect in self.decode.open_nodes()
            if load.identity == identity
        ]

    def has_room_beyond(self, tokens: int, *, identity: ModelIdentity) -> bool:
        """Some decode node could hold a sequence of more than `tokens` tokens."""
        return any(load.identity == identity and load.max_positions > tokens for _, load, _ in self.decode.open_nodes())

    def prefill_candidates(self, identity: ModelIdentity) -> list[PrefillCandidate]:
        return [
            PrefillCandidate(
                node_id=node.member.node_id,
                queued_tokens=max(load.queued_tokens, node.in_flight_tokens),
                tokens_per_s=load.tokens_per_s,
                suspect=suspect,
            )
            for node, load, suspect in self.prefill.open_nodes()
            if load.identity == identity
        ]

    def health(self) -> FleetHealth:
        served = self.served
        serving = 0
        degraded = [] if self._registry_answers() else [f"Redis does not answer: members as of epoch {self._views.view.epoch}"]
        for name, node in self.decode.nodes.items():
            if not node.answers or node.load is None:
                degraded.append(f"decode node {name} does not answer")
            elif served is not None and node.load.identity != served.identity:
                degraded.append(f"decode node {name} serves another model or layout")
            else:
                serving += 1
        degraded += [f"prefill node {name} does not answer" for name, node in self.prefill.nodes.items() if not node.answers]
        degraded += [f"store node {name} does not answer" for name, node in self.stores.nodes.items() if not node.answers]
        if not serving:
            degraded.append("no decode node: nothing can be served")
        if not any(node.answers for node in self.prefill.nodes.values()):
            degraded.append("no prefill node: decode nodes compute prompts themselves")
        stores = sum(node.answers for node in self.stores.nodes.values())
        if stores == 0:
            degraded.append("no store node: every prompt is computed again, and a failover computes the whole answer again")
        elif stores < self._replicas:
            degraded.append(f"{stores} store node(s) for {self._replicas} replicas: new blocks have fewer copies than asked for")
        return FleetHealth(ready=serving > 0, degraded=tuple(degraded))

    def _is_served(self, identity: ModelIdentity) -> bool:
        return self._served is not None and identity == self._served.identity
