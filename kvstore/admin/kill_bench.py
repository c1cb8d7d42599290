"""kvctl bench kill: a cluster of its own under load; one store is killed, later a fresh one joins. What readers notice, and what moves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.admin.bench import bench_store
from kvstore.admin.bench_worker import KEY_SPACE
from kvstore.admin.cluster_access import channels
from kvstore.admin.kill_load import KillLoad, Oracle, joined
from kvstore.admin.local_process import LocalProcess, wait_until_ready
from kvstore.client import ClientConfig, StoreClient
from kvstore.core.placement import place
from kvstore.core.view import Member, MemberState, View
from kvstore.errors import ConfigError, LarderError, Unavailable
from kvstore.ids import BlockRef, Epoch, NodeId, StripeId
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.rpc.admin_stub import AdminStub, NodeReport
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.peer_stub import PeerStub
from kvstore.units import MIB, Bytes, seconds

BEFORE, UNNOTICED, REPAIR, AFTER, JOIN = "before", "killed, not noticed", "noticed, repair", "after", "join"
_START_TIMEOUT = seconds(60)
_CALL_TIMEOUT = seconds(5)
_LOOK_EVERY_S = 0.25
_STAGE_WITHIN_S = 300.0
_HEADROOM = 1.35
"""Of a host tier over its equal part once a store is gone: placement is even within a tenth, and puts come and go."""
_REFS_OF_A_CALL = 128
"""Each costs the node that is asked some 8 us, and its readers wait for that."""

Advance = Callable[[str, int, int], None]
"""What, done, total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPlan:
    nodes: int = 4
    replicas: int = 2
    total_bytes: Bytes = Bytes(2048 * MIB)
    """Of blocks, each counted once."""
    block_bytes: int = 368 * 1024
    chain_blocks: int = 8
    """Of one get or put: a stripe."""
    ops_per_s: float = 20.0
    """At most; eight at a time."""
    put_share: float = 0.2
    calm_s: float = 20.0
    """Before the kill, and after everything is whole."""
    transport: str = "tcp"
    """tcp: as between hosts, among the nodes too. shm: a client on the machine of all of them."""
    seed: int = 20260101

    def __post_init__(self) -> None:
        if not 2 <= self.replicas < self.nodes:
            raise ConfigError("bench kill needs at least two replicas, and more nodes than replicas")
        if self.block_bytes <= 64 or self.total_bytes < self.block_bytes * self.chain_blocks:
            raise ConfigError("bench kill needs at least one chain of blocks, each of more than 64 bytes")
        if self.transport not in ("tcp", "shm", "grpc"):
            raise ConfigError(f"bench kill goes over tcp, shm or grpc: {self.transport!r}")
        if self.ops_per_s <= 0 or self.calm_s <= 0 or not 0 <= self.put_share < 1:
            raise ConfigError("bench kill needs operations a second and calm seconds above 0, and a share of puts below 1")

    @property
    def chains(self) -> int:
        return self.total_bytes // (self.block_bytes * self.chain_blocks)

    @property
    def node_capacity(self) -> Bytes:
        return Bytes(int(self.total_bytes * self.replicas / (self.nodes - 1) * _HEADROOM) + 256 * MIB)


def run_kill(plan: KillPlan, folder: Path, advance: Advance) -> dict[str, Any]:
    """The record of it. Blocking, about two minutes; everything it started is gone afterwards. From the main thread."""
    with contextlib.ExitStack() as running:
        redis = running.enter_context(EmbeddedRedis())
        stores = [_store(plan, number, redis.url, folder) for number in range(1, plan.nodes + 2)]
        for store in stores:
            running.callback(store.kill)
        for store in stores[:-1]:
            store.start()
        wait_until_ready(stores[:-1], timeout=_START_TIMEOUT)
        return asyncio.run(_measure(plan, redis.url, stores, advance))


def _store(plan: KillPlan, number: int, redis_url: str, folder: Path) -> LocalProcess:
    settings = {
        "host_capacity": f"{plan.node_capacity // MIB}MiB",
        "replicas": plan.replicas,
        "ucx": False,
        "shm": "read_write" if plan.transport == "shm" else "off",
        "tcp": plan.transport != "grpc",
    }
    return bench_store(number, redis_url=redis_url, folder=folder, **settings)


async def _measure(plan: KillPlan, redis_url: str, stores: Sequence[LocalProcess], advance: Advance) -> dict[str, Any]:
    config = ClientConfig(transports=(plan.transport, "grpc") if plan.transport == "shm" else (plan.transport,))
    async with RedisRegistry(redis_url) as registry, channels() as pool:
        async with StoreClient(registry, replicas=plan.replicas, config=config) as client:
            oracle = Oracle(plan.block_bytes, seed=plan.seed)
            load = KillLoad(
                client, oracle, chain_blocks=plan.chain_blocks, ops_per_s=plan.ops_per_s, put_share=plan.put_share, seed=plan.seed
            )
            for number in range(plan.chains):
                advance("filling", number, plan.chains)
                await load.fill()
            advance("filling", plan.chains, plan.chains)
            cluster = _Watched(registry, pool, [ref for chain in load.chains for ref in chain], plan)
            await _until(cluster.whole, "the cluster was not whole before the kill")
            load.enter(BEFORE)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(load.run())
                try:
                    await _calm(plan, BEFORE, advance)
                    repair = await _kill(cluster, load, stores[0], advance)
                    await _calm(plan, AFTER, advance)
                    join = await _join(cluster, load, stores[-1], advance)
                    load.enter("over")
                finally:
                    load.over.set()
                await running
    rows = [load.phases[name].as_record(name) for name in (BEFORE, UNNOTICED, REPAIR, AFTER, JOIN)]
    during = joined([load.phases[UNNOTICED], load.phases[REPAIR]]).as_record("during (both)")
    rows.insert(3, during)
    whole = joined(list(load.phases.values()))
    return {
        "plan": asdict(plan),
        "failed_reads": whole.failed_reads,
        "wrong_bytes": whole.wrong_bytes,
        "phases": rows,
        "repair": repair,
        "join": join,
    }


async def _kill(cluster: _Watched, load: KillLoad, store: LocalProcess, advance: Advance) -> dict[str, Any]:
    """kill -9, until every block has all its replicas again. Sizes in bytes, times from the kill."""
    lost = cluster.owned_by(NodeId(store.name))
    sent_before = await cluster.sent_bytes()
    load.enter(UNNOTICED)
    killed = time.monotonic()
    store.kill()
    await _until(lambda: cluster.state_is(store.name, MemberState.DEAD), "the killed store was not declared dead")
    dead = time.monotonic()
    load.enter(REPAIR)
    began: float | None = None
    sent = 0

    async def whole() -> bool:
        nonlocal began, sent
        sent = await cluster.sent_bytes() - sent_before
        advance("repair", min(sent, lost), lost)
        if began is None and sent:
            began = time.monotonic()
        return sent > 0 and await cluster.whole()

    await _until(whole, "the blocks of the killed store did not get their replicas back")
    done = time.monotonic()
    load.enter(AFTER)
    took = max(done - (began or dead), 1e-3)
    return {
        "dead_after_s": round(dead - killed, 1),
        "first_copy_after_s": round((began or dead) - killed, 1),
        "whole_after_s": round(done - killed, 1),
        "lost_bytes": lost,
        "sent_bytes": sent,
        "mb_per_s": round(sent / took / 1e6, 1),
    }


async def _join(cluster: _Watched, load: KillLoad, store: LocalProcess, advance: Advance) -> dict[str, Any]:
    """A fresh store, until it has all that falls to it. No puts meanwhile, so that what moves is what the join moves."""
    load.puts = False
    await load.forget_puts()
    await _until(cluster.whole, "the cluster was not whole before the join")
    sent_before = await cluster.sent_bytes()
    load.enter(JOIN)
    started = time.monotonic()
    store.start()
    await asyncio.to_thread(wait_until_ready, [store], timeout=_START_TIMEOUT)
    ready = time.monotonic()

    async def whole() -> bool:
        member = cluster.view.member(NodeId(store.name))
        advance("join, quarters taken over", round(4 * member.takeover) - 1 if member is not None else 0, 4)
        return member is not None and member.state is MemberState.ACTIVE and member.takeover >= 1 and await cluster.whole()

    await _until(whole, "the new store did not get what falls to it")
    advance("join, quarters taken over", 4, 4)
    moved, least = await cluster.sent_bytes() - sent_before, cluster.owned_by(NodeId(store.name))
    return {
        "start_s": round(ready - started, 1),
        "whole_after_s": round(time.monotonic() - ready, 1),
        "moved_bytes": moved,
        "least_bytes": least,
        "moved_over_least": round(moved / max(least, 1), 4),
    }


class _Watched:
    """What the orchestrator knows of the cluster, beside the load."""

    def __init__(self, registry: RedisRegistry, pool: ChannelPool, refs: Sequence[BlockRef], plan: KillPlan) -> None:
        self._registry, self._pool, self._refs, self._plan = registry, pool, refs, plan
        self._sent: dict[NodeId, int] = {}
        """As each node last said; of one that is gone too."""
        self._owners: dict[StripeId, tuple[NodeId, ...]] = {}
        self._placed = Epoch(-1)
        """The epoch of `_owners`: placing thousands of blocks at each look would hold up the load, which shares this event loop."""

    @property
    def view(self) -> View:
        return self._registry.view

    async def state_is(self, name: str, state: MemberState) -> bool:
        member = self.view.member(NodeId(name))
        return member is not None and member.state is state

    def owned_by(self, node_id: NodeId) -> int:
        """Bytes of what was filled that this node has a replica of, by the present view."""
        return self._plan.block_bytes * len(self._owned(node_id))

    async def sent_bytes(self) -> int:
        """By repair, of all nodes since their start."""

        async def ask(member: Member) -> None:
            with contextlib.suppress(LarderError):
                report: NodeReport = await AdminStub(self._pool.get(member.address)).status(timeout=_CALL_TIMEOUT)
                self._sent[member.node_id] = report.repair.sent_bytes

        await asyncio.gather(*(ask(member) for member in self._living()))
        return sum(self._sent.values())

    async def whole(self) -> bool:
        """Nobody owes anything for the present view, and each owner has its blocks: it is asked for every one."""
        view = self.view
        if any(member.state is MemberState.SUSPECT for member in view.stores):
            return False
        for member in self._living():
            try:
                progress = await PeerStub(self._pool.get(member.address)).progress(timeout=_CALL_TIMEOUT)
            except LarderError:
                return False
            if progress.settled_epoch < view.epoch:
                return False
        answers = await asyncio.gather(*(self._has_its_own(member) for member in self._living()))
        return all(answers) and self.view.epoch == view.epoch

    async def _has_its_own(self, member: Member) -> bool:
        own = self._owned(member.node_id)
        stub = AdminStub(self._pool.get(member.address))
        try:
            for start in range(0, len(own), _REFS_OF_A_CALL):
                reports = await stub.locate(KEY_SPACE, own[start : start + _REFS_OF_A_CALL], timeout=_CALL_TIMEOUT)
                if not all(report.tiers for report in reports):
                    return False
        except LarderError:
            return False
        return True

    def _owned(self, node_id: NodeId) -> list[BlockRef]:
        if self._placed != self.view.epoch:
            stripes = dict.fromkeys(ref.stripe for ref in self._refs)
            self._owners = {stripe: place(stripe, self.view, replicas=self._plan.replicas) for stripe in stripes}
            self._placed = self.view.epoch
        return [ref for ref in self._refs if node_id in self._owners[ref.stripe]]

    def _living(self) -> list[Member]:
        return [member for member in self.view.stores if member.state in (MemberState.ACTIVE, MemberState.JOINING)]


async def _calm(plan: KillPlan, name: str, advance: Advance) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < plan.calm_s:
        advance(name, int(passed), int(plan.calm_s))
        await asyncio.sleep(min(1.0, plan.calm_s - passed))
    advance(name, int(plan.calm_s), int(plan.calm_s))


async def _until(true: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Raises Unavailable with `otherwise` when it takes too long."""
    deadline = time.monotonic() + _STAGE_WITHIN_S
    while not await true():
        if time.monotonic() > deadline:
            raise Unavailable(f"{otherwise} within {_STAGE_WITHIN_S:.0f} s")
        await asyncio.sleep(_LOOK_EVERY_S)
