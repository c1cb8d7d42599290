"""A small cluster in one process: real stores over real gRPC on loopback, real engines on a tiny random model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import torch

import prefill_node.model.offline  # noqa: F401  # before torch
from decode_node.fetch_plan import FetchPolicy
from decode_node.loader import PrefixLoader
from decode_node.published import PublishedPrefix
from decode_node.session import DecodeSession, Finished, GenerateCall, Loaded, NextToken, SessionEvent
from kvstore.client import ClientConfig
from kvstore.core.view import MemberState, Role, View
from kvstore.ids import Epoch
from kvstore.node.config import NodeConfig
from kvstore.node.server import NodeServer
from kvstore.registry import StaticViews
from kvstore.tiers.ssd import SsdRegions
from kvstore.tiers.tier import Tier
from kvstore.units import MIB, Bytes, milliseconds, seconds
from prefill_node.compute_node import ComputeNode
from prefill_node.config import ComputeConfig
from prefill_node.engine.request import SamplingParams
from prefill_node.model.load import LoadedModel, load_model
from prefill_node.session import PrefillCall, PrefillSession, Progress

torch.set_num_threads(1)

BLOCK_TOKENS = 8

PATIENT = ClientConfig(rpc_timeout=seconds(10), read_idle_timeout=seconds(10), lease_ttl=seconds(60))
"""All nodes share one event loop here, and a machine with other work: a late answer is not what these tests are about."""


@dataclasses.dataclass
class Answer:
    """What a stream gave before it ended."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    loaded: Loaded | None = None
    finished: Finished | None = None
    events: list[SessionEvent] = dataclasses.field(default_factory=list)


class Cluster:
    """Compute nodes and stores that know each other by a view that changes only here."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._calls = 0
        self.dtype = "float32"
        """Of the nodes added from now on."""
        self.views = StaticViews(View(Epoch(1)))
        self.stores: list[NodeServer] = []
        self.loaders: dict[str, PrefixLoader] = {}

    def _change_view(self) -> None:
        members = tuple(dataclasses.replace(store.member(), state=MemberState.ACTIVE) for store in self.stores)
        self.views.replace(View(Epoch(self.views.view.epoch + 1), members))

    async def add_stores(self, count: int, *, wrap_ssd: Callable[[SsdRegions], Tier] = lambda regions: regions, **keys: object) -> None:
        for _ in range(count):
            number = len(self.stores) + 1
            config = NodeConfig(node_id=f"store-{number}", zone=f"zone-{number}", host_capacity=Bytes(64 * MIB), **keys)  # type: ignore[arg-type]
            store = NodeServer(config, views=self.views, wrap_ssd=wrap_ssd)
            await store.start()
            self._stack.push_async_callback(self._stop, store)
            self.stores.append(store)
        self._change_view()

    async def remove_store(self, store: NodeServer) -> None:
        """The node ends, and the view says so."""
        self.stores.remove(store)
        self._change_view()
        await store.stop()

    async def _stop(self, store: NodeServer) -> None:
        if store in self.stores:
            await store.stop()

    def model(self) -> LoadedModel:
        return load_model(self._folder, dtype=self.dtype, block_tokens=BLOCK_TOKENS)

    async def add(self, node_id: str, role: Role, **keys: object) -> ComputeNode:
        fields: dict[str, object] = {
            "node_id": node_id,
            "block_tokens": BLOCK_TOKENS,
            "chunk_tokens": 32,
            "pool_blocks": 128,
            "max_batch": 8,
            "threads": 1,
            "store": PATIENT,
            **keys,
        }
        config = ComputeConfig(**fields)  # type: ignore[arg-type]
        wait = milliseconds(1000) if role is Role.PREFILL else None
        node = await self._stack.enter_async_context(ComputeNode.opened(config, self.model(), self.views, role=role, publish_wait=wait))
        self.loaders[node_id] = PrefixLoader(node, policy=FetchPolicy(max_wait=config.load_max_wait))
        return node

    def call(
        self,
        prompt: Sequence[int],
        *,
        generated: Sequence[int] = (),
        max_tokens: int = 8,
        sampling: SamplingParams | None = None,
        namespace: str = "n",
        ignore_eos: bool = True,
        stop_token_ids: Sequence[int] = (),
        published: PublishedPrefix | None = None,
    ) -> GenerateCall:
        self._calls += 1
        return GenerateCall(
            request_id=f"call-{self._calls}",
            namespace=namespace,
            prompt=tuple(prompt),
            generated=tuple(generated),
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stop_token_ids),
            published=published,
        )

    def session(self, node: ComputeNode, call: GenerateCall) -> DecodeSession:
        return DecodeSession(call, node, self.loaders[node.config.node_id], heartbeat_every=milliseconds(200))

    async def generate(self, node: ComputeNode, call: GenerateCall, *, cut_after: int | None = None) -> Answer:
        """Follow a stream to its end, or let it go after `cut_after` tokens."""
        answer = Answer()
        async with aclosing(self.session(node, call).events()) as events:
            async for event in events:
                answer.events.append(event)
                if isinstance(event, NextToken):
                    answer.tokens.append(event.token_id)
                    answer.positions.append(event.position)
                    if cut_after is not None and len(answer.tokens) >= cut_after:
                        break
                elif isinstance(event, Loaded):
                    answer.loaded = event
                elif isinstance(event, Finished):
                    answer.finished = event
        return answer

    async def prefill(self, node: ComputeNode, tokens: Sequence[int], *, namespace: str = "n") -> list[Progress]:
        self._calls += 1
        call = PrefillCall(request_id=f"call-{self._calls}", namespace=namespace, token_ids=tuple(tokens))
        async with aclosing(PrefillSession(call, node).progress()) as progress:
            return [step async for step in progress]


@asynccontextmanager
async def opened_cluster(folder: Path, *, stores: int = 3) -> AsyncIterator[Cluster]:
    """`folder`: a tiny model as build_tiny_model writes it."""
    async with AsyncExitStack() as stack:
        cluster = Cluster(folder, stack)
        if stores:
            await cluster.add_stores(stores)
        yield cluster


async def wait_until_idle(node: ComputeNode) -> None:
    """Until the engine holds nothing: every block is free, nothing runs or waits."""
    async with asyncio.timeout(10):
        while True:
            load = node.engine.load()
            if load.running == load.queued == 0 and load.free_blocks == load.total_blocks:
                return
            await asyncio.sleep(0.005)
