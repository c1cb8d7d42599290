"""The gateway's own sessions over real engines and stores in one process, without a network between: every way a decode node can fail a
stream can be had at every token."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compute_cluster import BLOCK_TOKENS, Cluster, opened_cluster
from prometheus_client import CollectorRegistry

from decode_node.gateway import nodes
from decode_node.gateway.config import GatewayConfig
from decode_node.gateway.fleet import Fleet
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.router import PrefixAffinity
from decode_node.gateway.sessions import Session, SessionLimits, SessionRequest, SessionStory
from decode_node.gateway.watched_stream import StreamPatience
from decode_node.session import Finished, GenerateCall, Heartbeat, Loaded, SessionEvent
from kvstore.clock import SystemClock
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.errors import Unavailable
from kvstore.ids import BootId, Epoch, Namespace, NodeId
from kvstore.registry import StaticViews
from kvstore.units import Nanos, milliseconds, seconds
from prefill_node.compute_node import ComputeNode
from prefill_node.engine.request import EngineRequest, EventSink, SamplingParams
from prefill_node.engine.scheduler import Span

PATIENT = StreamPatience(connect=seconds(60), heartbeat=seconds(60), first_token=seconds(60), token=seconds(60))

GREEDY = nodes.Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
SAMPLED = nodes.Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=11)


class Killer:
    """Which tokens of which session bring its node down; each once."""

    def __init__(self) -> None:
        self.breaks: defaultdict[str, set[int]] = defaultdict(set)
        """The stream breaks with the token computed and not sent."""
        self.step_faults: defaultdict[str, set[int]] = defaultdict(set)
        """The step that would compute the token raises: every sequence in it fails."""
        self.kills = 0

    def strikes(self, marked: defaultdict[str, set[int]], request_id: str, position: int) -> bool:
        positions = marked[request_id.rpartition("-")[0]]
        if position not in positions:
            return False
        positions.discard(position)
        self.kills += 1
        return True

    def check_step(self, spans: Sequence[Span]) -> None:
        for span in spans:
            sequence = span.sequence
            position = len(sequence.tokens) - sequence.request.first_output
            if self.strikes(self.step_faults, sequence.request.request_id, position):
                raise RuntimeError("a bug in a step")


@dataclass
class Arrival:
    """A request at a decode node, from its submit to its first token, in steps of the engine."""

    request_id: str
    loaded: Loaded
    submitted: int
    """Steps that had begun, the one under way included, when it was submitted."""
    first_token: int = 0
    """The number of the step that gave its first token."""

    @property
    def steps_to_first_token(self) -> int:
        """1: the very next one. 2: one that had been planned already went before it."""
        assert self.first_token
        return self.first_token - self.submitted


class InProcessDecode:
    """A DecodeBackend that calls the node's session directly."""

    def __init__(self, cluster: Cluster, node: ComputeNode, killer: Killer) -> None:
        self._cluster, self._node, self._killer = cluster, node, killer
        self.arrivals: dict[str, Arrival] = {}
        self.preparing: Callable[[Sequence[int]], Awaitable[None]] | None = None
        """Awaited when a prefix of these tokens has been loaded, before that is said."""
        self.step_takes_s = 0.0
        """More, as of a larger model: the tiny one may be through with an answer before its client has had a quarter of it."""
        self._steps = 0
        self._submitted: dict[str, int] = {}
        self._first_tokens: dict[str, int] = {}
        self._watch_engine(node.engine)

    def _watch_engine(self, engine: Any) -> None:
        run_rows, submit = engine._runner.run_rows, engine.submit

        def counted_rows(spans: Sequence[Span]) -> Any:
            self._steps += 1
            for span in spans:
                if span.start + span.count == len(span.sequence.tokens):
                    self._first_tokens.setdefault(span.sequence.request.request_id, self._steps)
            self._killer.check_step(spans)
            time.sleep(self.step_takes_s)
            return run_rows(spans)

        def counted_submit(request: EngineRequest, sink: EventSink) -> None:
            self._submitted[request.request_id] = self._steps
            submit(request, sink)

        engine._runner.run_rows, engine.submit = counted_rows, counted_submit

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
            top_logprobs=call.top_logprobs,
        )
        async with aclosing(self._events(asked)) as events:
            yield events

    async def _events(self, call: GenerateCall) -> AsyncIterator[nodes.GenerateEvent]:
        async with aclosing(self._cluster.session(self._node, call).events()) as events:
            async for event in events:
                yield self._passed_on(call.request_id, event)

    def _passed_on(self, request_id: str, event: SessionEvent) -> nodes.GenerateEvent:
        if isinstance(event, Heartbeat):
            return nodes.Heartbeat()
        if isinstance(event, Loaded):
            self.arrivals[request_id] = Arrival(request_id, event, self._submitted[request_id])
            return nodes.PrefixLoaded(pool_blocks=event.local_blocks, store_blocks=event.store_blocks)
        if isinstance(event, Finished):
            return nodes.FinishedOut(reason=nodes.FinishReason(event.reason.value))
        self.arrivals[request_id].first_token = self._first_tokens[request_id]
        if self._killer.strikes(self._killer.breaks, request_id, event.position):
            raise Unavailable("killed")
        logprobs = event.logprobs and nodes.Logprobs(logprob=event.logprobs.logprob, top=event.logprobs.top)
        return nodes.TokenOut(token_id=event.token_id, position=event.position, logprobs=logprobs)

    async def prepare(self, *, namespace: Namespace, token_ids: Sequence[int], recoded: bool, timeout: Nanos) -> int:
        loader = self._cluster.loaders[self._node.config.node_id]
        loaded = await loader.load(namespace, tuple(token_ids), continuation=True, as_sealed=not recoded)
        self._node.engine.release(loaded.pinned)
        if self.preparing is not None:
            await self.preparing(token_ids)
        return loaded.local_blocks + loaded.store_blocks

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
class Streamed:
    """What the client of one session had."""

    story: SessionStory
    tokens: list[int] = field(default_factory=list)
    logprobs: list[nodes.Logprobs | None] = field(default_factory=list)
    longest_gap_ms: float = 0.0


@dataclass
class Kitchen:
    cluster: Cluster
    fleet: Fleet
    killer: Killer
    metrics: GatewayMetrics
    nodes: dict[str, ComputeNode]
    backends: dict[str, InProcessDecode]
    views: StaticViews
    sessions: int = 0

    async def stream(
        self,
        prompt: Sequence[int],
        sampling: nodes.Sampling,
        namespace: str,
        *,
        tokens: int,
        kill_at: set[int] | None = None,
        fault_at: set[int] | None = None,
        top_logprobs: int | None = None,
        on_token: Callable[[int], None] = lambda count: None,
    ) -> Streamed:
        """One answer of so many tokens; its node breaks off before those of `kill_at`, and in the steps that compute those of
        `fault_at`."""
        self.sessions += 1
        request_id = f"s{self.sessions}"
        self.killer.breaks[request_id] = set(kill_at or ())
        self.killer.step_faults[request_id] = set(fault_at or ())
        session = Session(
            SessionRequest(
                request_id=request_id,
                namespace=Namespace(namespace),
                identity=identity_of(next(iter(self.nodes.values()))),
                prompt_token_ids=prompt,
                chain=(),
                sampling=sampling,
                max_tokens=tokens,
                ignore_eos=True,
                top_logprobs=top_logprobs,
            ),
            fleet=self.fleet,
            affinity=PrefixAffinity(1),
            policy=GatewayConfig().routing.policy,
            limits=SessionLimits(patience=PATIENT, no_node=seconds(60), failures_in_a_row=100),
            metrics=self.metrics,
            clock=SystemClock(),
        )
        got, last = Streamed(session.story), None
        async with aclosing(session.tokens()) as arriving:
            async for token in arriving:
                now = time.monotonic()
                if last is not None:
                    got.longest_gap_ms = max(got.longest_gap_ms, (now - last) * 1e3)
                last = now
                got.tokens.append(token.token_id)
                got.logprobs.append(token.logprobs)
                on_token(len(got.tokens))
        return got

    def drain(self, node_id: str) -> None:
        """What `kvctl drain` does, and the gateway sees at once."""
        view = self.views.view
        members = tuple(
            dataclasses.replace(member, state=MemberState.DRAINING) if member.node_id == node_id else member for member in view.members
        )
        self.views.replace(View(Epoch(view.epoch + 1), members))
        node = self.fleet.decode.nodes[NodeId(node_id)]
        node.member = next(member for member in members if member.node_id == node_id)


@asynccontextmanager
async def opened_kitchen(model: Path, *, dtype: str, names: Sequence[str] = ("decode-1", "decode-2", "decode-3")) -> AsyncIterator[Kitchen]:
    async with opened_cluster(model, stores=2) as cluster:
        cluster.dtype = dtype
        killer = Killer()
        by_name, backends = {}, {}
        for name in names:
            by_name[name] = await cluster.add(name, Role.DECODE, pool_blocks=256)
            backends[name] = InProcessDecode(cluster, by_name[name], killer)
        members = tuple(
            Member(node_id=NodeId(name), boot_id=BootId(name.encode().ljust(16)), role=Role.DECODE, address=name) for name in by_name
        )
        views = StaticViews(View(Epoch(1), members))
        fleet = Fleet(views, DecodeOnly(backends), clock=SystemClock(), poll_every=milliseconds(50), poll_timeout=seconds(1), replicas=2)
        following = asyncio.ensure_future(fleet.run())
        try:
            await fleet.first_look()
            yield Kitchen(cluster, fleet, killer, GatewayMetrics(CollectorRegistry()), by_name, backends, views)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
