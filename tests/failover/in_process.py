"""Kills at every token index, all in one process: the gateway's own sessions over real engines and stores, without a network between."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compute_cluster import BLOCK_TOKENS, Cluster, opened_cluster
from prometheus_client import CollectorRegistry
from verdict import IN_PROCESS, Tally

from decode_node.gateway import nodes
from decode_node.gateway.config import GatewayConfig
from decode_node.gateway.fleet import Fleet
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.router import PrefixAffinity
from decode_node.gateway.sessions import Session, SessionLimits, SessionRequest
from decode_node.gateway.watched_stream import StreamPatience
from decode_node.session import Finished, GenerateCall, Heartbeat, Loaded, SessionEvent
from kvstore.clock import SystemClock
from kvstore.core.view import Member, Role, View
from kvstore.errors import Unavailable
from kvstore.ids import BootId, Epoch, Namespace, NodeId
from kvstore.registry import StaticViews
from kvstore.units import Nanos, milliseconds, seconds
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import SamplingParams

ANSWER = 24
PROMPTS = (11, 27, 61)
"""Tokens: less than two blocks with the answer's first ones, a few, many."""
SAMPLINGS = {
    "greedy": nodes.Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0),
    "sampled": nodes.Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=11),
}
KILLS_OF_A_ROUND = 2 * len(PROMPTS) * len(SAMPLINGS) * ANSWER

PATIENT = StreamPatience(connect=seconds(60), heartbeat=seconds(60), first_token=seconds(60), token=seconds(60))


class Killer:
    """Which tokens bring their node down: the stream breaks with the token computed and not sent."""

    def __init__(self) -> None:
        self.positions: set[int] = set()
        self.kills = 0

    def strikes(self, position: int) -> bool:
        if position not in self.positions:
            return False
        self.positions.discard(position)
        self.kills += 1
        return True


class InProcessDecode:
    """A DecodeBackend that calls the node's session directly."""

    def __init__(self, cluster: Cluster, node: ComputeNode, killer: Killer) -> None:
        self._cluster, self._node, self._killer = cluster, node, killer

    async def load(self, *, timeout: Nanos) -> nodes.DecodeLoad:
        load = self._node.engine.load()
        return nodes.DecodeLoad(
            identity=identity_of(self._node),
            model="tiny",
            block_tokens=BLOCK_TOKENS,
            max_positions=self._node.limits.max_tokens,
            sequences=load.running + load.queued,
        )

    @asynccontextmanager
    async def generate(self, call: nodes.GenerateCall) -> AsyncIterator[AsyncIterator[nodes.GenerateEvent]]:
        sampling = call.sampling
        asked = GenerateCall(
            request_id=call.request_id,
            namespace=call.namespace,
            prompt=tuple(call.prompt_token_ids),
            generated=tuple(call.generated_token_ids),
            sampling=SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed),
            max_tokens=call.max_tokens,
            ignore_eos=call.ignore_eos,
        )
        async with aclosing(self._events(self._cluster.session(self._node, asked))) as events:
            yield events

    async def _events(self, session: Any) -> AsyncIterator[nodes.GenerateEvent]:
        async with aclosing(session.events()) as events:
            async for event in events:
                yield self._passed_on(event)

    def _passed_on(self, event: SessionEvent) -> nodes.GenerateEvent:
        if isinstance(event, Heartbeat):
            return nodes.Heartbeat()
        if isinstance(event, Loaded):
            return nodes.PrefixLoaded(pool_blocks=event.local_blocks, store_blocks=event.store_blocks)
        if isinstance(event, Finished):
            return nodes.FinishedOut(reason=nodes.FinishReason(event.reason.value))
        if self._killer.strikes(event.position):
            raise Unavailable("killed")
        return nodes.TokenOut(token_id=event.token_id, position=event.position)

    async def prepare(self, *, namespace: Namespace, token_ids: Sequence[int], timeout: Nanos) -> None:
        raise Unavailable("nothing drains here")

    async def close(self) -> None:
        pass


def identity_of(node: ComputeNode) -> nodes.ModelIdentity:
    return nodes.ModelIdentity(node.model.layout.fingerprint, node.model.model_digest)


class DecodeOnly:
    """The Backends of a fleet that has decode nodes and nothing else."""

    def __init__(self, by_name: dict[str, InProcessDecode]) -> None:
        self._by_name = by_name

    def decode(self, node_id: NodeId, address: str) -> InProcessDecode:
        return self._by_name[node_id]

    def prefill(self, node_id: NodeId, address: str) -> Any:
        raise AssertionError

    store = prefill


@dataclass
class Kitchen:
    fleet: Fleet
    killer: Killer
    metrics: GatewayMetrics
    identity: nodes.ModelIdentity
    sessions: int = 0

    async def stream(self, prompt: Sequence[int], sampling: nodes.Sampling, namespace: str, kill_at: set[int]) -> tuple[list[int], float]:
        """(tokens, longest wait between two of them in ms). Every request has a number of its own."""
        self.sessions += 1
        self.killer.positions = set(kill_at)
        session = Session(
            SessionRequest(
                request_id=f"s{self.sessions}",
                namespace=Namespace(namespace),
                identity=self.identity,
                prompt_token_ids=prompt,
                chain=(),
                sampling=sampling,
                max_tokens=ANSWER,
                ignore_eos=True,
            ),
            fleet=self.fleet,
            affinity=PrefixAffinity(1),
            policy=GatewayConfig().routing.policy,
            limits=SessionLimits(patience=PATIENT, no_node=seconds(60), failures_in_a_row=100),
            metrics=self.metrics,
            clock=SystemClock(),
        )
        got: list[int] = []
        gap, last = 0.0, None
        async with aclosing(session.tokens()) as tokens:
            async for token in tokens:
                now = time.monotonic()
                gap, last = max(gap, now - last) if last is not None else gap, now
                got.append(token.token_id)
        return got, gap * 1e3


@asynccontextmanager
async def opened_kitchen(model: Path, *, dtype: str) -> AsyncIterator[Kitchen]:
    async with opened_cluster(model, stores=2) as cluster:
        cluster.dtype = dtype
        killer = Killer()
        by_name = {}
        for name in ("decode-1", "decode-2", "decode-3"):
            node = await cluster.add(name, Role.DECODE, pool_blocks=256)
            by_name[name] = InProcessDecode(cluster, node, killer)
        members = tuple(
            Member(node_id=NodeId(name), boot_id=BootId(name.encode().ljust(16)), role=Role.DECODE, address=name) for name in by_name
        )
        views = StaticViews(View(Epoch(1), members))
        fleet = Fleet(views, DecodeOnly(by_name), clock=SystemClock(), poll_every=milliseconds(50), poll_timeout=seconds(1), replicas=2)
        following = asyncio.ensure_future(fleet.run())
        try:
            await fleet.first_look()
            yield Kitchen(fleet, killer, GatewayMetrics(CollectorRegistry()), identity_of(node))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def run_in_process(tally: Tally, model: Path, *, kills: int, seed: int, tell: Callable[[int], None]) -> None:
    """At least `kills` kills. Each index of each answer alone, every kill in a namespace of its own so that nothing of an earlier one
    helps; then all indices of one answer, one failover after the other."""
    draw = random.Random(seed)
    rounds = 0
    done = 0
    while done < kills:
        async with opened_kitchen(model, dtype=("float32", "bfloat16")[rounds % 2]) as kitchen:
            rounds += 1
            for tokens in PROMPTS:
                prompt = [draw.randrange(3, 500) for _ in range(tokens)]
                for name, sampling in SAMPLINGS.items():
                    title = f"{name}, prompt of {tokens}, round {rounds}"
                    whole, _ = await kitchen.stream(prompt, sampling, f"{title} whole", set())
                    for cut in [*({position} for position in range(ANSWER)), set(range(ANSWER))]:
                        where = f"{title}, killed at {min(cut)}" if len(cut) == 1 else f"{title}, killed at every token"
                        before = kitchen.killer.kills
                        got, gap = await kitchen.stream(prompt, sampling, where, cut)
                        tally.kills += kitchen.killer.kills - before
                        tally.failovers += kitchen.killer.kills - before
                        tally.judge(where, expected=whole, got=got)
                        tally.gap(IN_PROCESS, gap)
                        done += kitchen.killer.kills - before
                        tell(done)
                        if done >= kills:
                            return
