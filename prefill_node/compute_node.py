"""One engine with what it needs to take blocks from the store and to give blocks to it. Prefill and decode nodes are both one."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from kvstore.client import StoreClient
from kvstore.codec import BlockCodec, Rung, warm_up
from kvstore.codec.klt_tables import load_tables
from kvstore.core.chain import chain_of, root_hash
from kvstore.core.view import Role
from kvstore.ids import BlockHash, BlockRef, KeySpace, Namespace
from kvstore.registry import ViewSource
from kvstore.units import Nanos, seconds
from prefill_node import metrics
from prefill_node.config import ComputeConfig
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.loop import Engine
from prefill_node.limits import Limits
from prefill_node.live_sessions import LiveSessions
from prefill_node.model.load import LoadedModel
from prefill_node.publish import PublishConfig, Publisher
from prefill_node.sealer import PublishingSealer

LOADERS_NICE = 19
"""Added to the niceness of the threads that load: they get all of a core that the engine does not want, and beside four streams still a
fifth of one that it does (engine/LOG.md). At 8 the longest steps beside a load took a fifth longer."""
FLUSH_AT_CLOSE: Nanos = seconds(1)
GAUGE_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeNode:
    role: Role
    config: ComputeConfig
    model: LoadedModel
    codec: BlockCodec
    engine: Engine
    store: StoreClient
    publisher: Publisher
    sealer: PublishingSealer
    executor: ThreadPoolExecutor
    """Decodes fetched blocks; its kernels release the GIL, and its threads give way to the engine's."""
    limits: Limits
    sessions: LiveSessions

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, config: ComputeConfig, model: LoadedModel, views: ViewSource, *, role: Role, publish_wait: Nanos | None
    ) -> AsyncIterator[ComputeNode]:
        """A node that computes and publishes until the context ends. `publish_wait`: how long a full publish queue may hold the engine
        up; None: never, the payload is dropped."""
        calibration = load_tables(config.calibration) if config.calibration else None
        precision = config.precision
        # Blocks of another precision have other keys: what a sequence attends to never depends on who wrote a block.
        layout = replace(model.layout, precision=precision.text(calibration.digest if calibration else b""))
        model = replace(model, layout=layout)
        codec = BlockCodec(
            layout,
            model_digest=model.model_digest,
            rung=precision.rung,
            entropy=config.entropy,
            calibration=calibration,
            step=precision.step,
            group=precision.group,
            exact_tokens=precision.exact_tokens,
            layer_rungs=precision.layer_rungs,
        )
        # Compiled once a machine, loaded once a process: not while the first request waits.
        await asyncio.to_thread(warm_up, *([codec] if config.rung is Rung.KLT else []))
        exact = BlockCodec(model.layout, model_digest=model.model_digest, rung=Rung.RAW)
        store = StoreClient(views, replicas=config.replicas, config=config.store)
        publisher = Publisher(
            store,
            config=PublishConfig(acknowledge=config.acknowledge, queue_bytes=config.publish_queue, wait_for_room=publish_wait or Nanos(0)),
        )
        sealer = PublishingSealer(codec, publisher, exact=exact, wait_for_room=publish_wait is not None)
        engine = Engine(
            model,
            EngineConfig(
                pool_blocks=config.pool_blocks,
                chunk_tokens=config.chunk_tokens,
                mixed_tokens=config.mixed_tokens,
                first_come=config.first_come,
                max_batch=config.max_batch,
                step_tokens=max(config.chunk_tokens, config.max_batch + model.layout.block_tokens),
                threads=config.threads,
            ),
            sealer=sealer if config.seal else None,
        )
        executor = ThreadPoolExecutor(config.load_threads, thread_name_prefix="load", initializer=_give_way)
        node = cls(
            role=role,
            config=config,
            model=model,
            codec=codec,
            engine=engine,
            store=store,
            publisher=publisher,
            sealer=sealer,
            executor=executor,
            limits=Limits(
                max_positions=model.max_positions,
                pool_tokens=config.pool_blocks * model.layout.block_tokens,
                vocabulary=model.vocab_size,
            ),
            sessions=LiveSessions(),
        )
        try:
            async with asyncio.TaskGroup() as group:
                publishing, measuring = group.create_task(publisher.run()), group.create_task(node._measure())
                await asyncio.sleep(0)  # the publisher must run before the engine offers
                engine.start()
                try:
                    yield node
                    await publisher.flush(timeout=FLUSH_AT_CLOSE)
                finally:
                    measuring.cancel()
                    await asyncio.to_thread(engine.stop)
                    publishing.cancel()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            await store.close()

    @property
    def block_tokens(self) -> int:
        return self.model.layout.block_tokens

    def key_space(self, namespace: str) -> KeySpace:
        return KeySpace(Namespace(namespace), self.model.layout.fingerprint)

    def root(self, namespace: str) -> BlockHash:
        return root_hash(namespace=Namespace(namespace), model_digest=self.model.model_digest, layout=self.model.layout.fingerprint)

    def chain(self, namespace: str, token_ids: Sequence[int]) -> tuple[BlockRef, ...]:
        """One reference per full block of `token_ids`."""
        return chain_of(token_ids, block_tokens=self.block_tokens, root=self.root(namespace))

    async def drain(self) -> None:
        """Take no new request, and end the running ones so that another node can go on with them."""
        await self.sessions.drain(self.publisher, flush=self.config.drain_flush)

    async def _measure(self) -> None:
        """Keep the gauges true until cancelled. Raises when the engine thread has ended by a bug: this process is of no use then."""
        await asyncio.sleep(GAUGE_PERIOD_S)
        while True:
            if not self.engine.alive:
                raise RuntimeError("the engine thread has ended")
            load = self.engine.load()
            metrics.queue_length.labels(role="publish").set(self.publisher.queued_blocks)
            metrics.queue_length.labels(role=self.role).set(load.queued)
            metrics.running_sequences.labels(role=self.role).set(load.running)
            metrics.pool_blocks.labels(role=self.role, state="free").set(load.free_blocks)
            metrics.pool_blocks.labels(role=self.role, state="used").set(load.total_blocks - load.free_blocks)
            await asyncio.sleep(GAUGE_PERIOD_S)


def _give_way() -> None:
    """Of the calling thread. Where niceness is of whole processes (elsewhere than on Linux): nothing."""
    if sys.platform.startswith("linux"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LOADERS_NICE)
