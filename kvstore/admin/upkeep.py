"""Drain, rebalance and top: what keeps a cluster in shape, as records. No printing here."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from kvstore.admin.cluster_access import ClusterAccess, ask_each, channels, reachable, read_view
from kvstore.core.picture import BlockEvent, BlockEventKind, Picture
from kvstore.core.view import DECODE_ROLES, PREFILL_ROLES, Member, MemberState, Role, View
from kvstore.errors import InvalidRequest, LarderError, NotFound
from kvstore.ids import BootId, NodeId
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.rpc.admin_stub import AdminStub, NodeReport
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.compute_stub import drain_calls
from kvstore.units import seconds

Record = dict[str, Any]

_CALL_TIMEOUT = seconds(5)
_LOOK_TIMEOUT = seconds(300)
"""Of a rebalance: every node asks every other one about all it has."""
_LOOK_EVERY_S = 0.25
_TRY_STREAM_AGAIN_S = 0.5
_LONGEST_CALL = seconds(3600)
"""An answer without another node to go to ends where it is."""


async def drain(access: ClusterAccess, node_id: str, *, wait: bool, force: bool = False, on_progress: Callable[[int, int], None]) -> Record:
    """Tell a node to hand over all it has: a store node its blocks, a prefill or decode node its calls. With `wait`, until it is safe to
    stop it; else how far it is now.

    `on_progress` gets blocks confirmed and blocks there, or calls gone and calls there were. Raises NotFound, InvalidRequest (also for the
    only prefill or decode node, unless `force`; the last store refuses by itself), and what the node answers.
    """
    view = await read_view(access)
    compute = next((member for member in reachable(view.members) if member.node_id == node_id and member.role is not Role.STORE), None)
    if compute is not None:
        if not force and (work := work_of_nobody_else(view, compute)) is not None:
            raise InvalidRequest(f"{node_id} is the only {work}; drain it all the same with --force")
        return await _drain_calls(compute, wait=wait, on_progress=on_progress)
    member = _store(view, node_id)
    if member.state is not MemberState.DRAINING:
        await _one(member, lambda stub: stub.drain(timeout=_CALL_TIMEOUT))
    while True:
        report: NodeReport = await _one(member, lambda stub: stub.status(timeout=_CALL_TIMEOUT))
        progress = report.drain
        if progress is not None:
            on_progress(progress.blocks - progress.remaining_blocks, progress.blocks)
        if not wait or (progress is not None and progress.safe_to_stop):
            drain_record = None if progress is None else dataclasses.asdict(progress)
            return {"node_id": node_id, "drain": drain_record, "repair": dataclasses.asdict(report.repair)}
        await asyncio.sleep(_LOOK_EVERY_S)


def work_of_nobody_else(view: View, member: Member) -> str | None:
    """What would be left undone without this prefill or decode node, in words; None: another one does it too."""
    others = {each.role for each in view.members if each.state is MemberState.ACTIVE and each.node_id != member.node_id}
    if member.role in DECODE_ROLES and not others & DECODE_ROLES:
        return "active decode node: no request would be answered"
    if member.role in PREFILL_ROLES and not others & PREFILL_ROLES:
        return "active prefill node: decode nodes would compute every prompt themselves"
    return None


async def _drain_calls(member: Member, *, wait: bool, on_progress: Callable[[int, int], None]) -> Record:
    most = left = 0
    async with channels() as pool:
        async with aclosing(drain_calls(pool.get(member.address), timeout=_LONGEST_CALL)) as progress:
            async for left in progress:
                most = max(most, left)
                on_progress(most - left, most)
                if not wait:
                    break
    return {"node_id": member.node_id, "live_calls": left}


async def rebalance(access: ClusterAccess, *, dry_run: bool) -> Record:
    """What is not in its place and who sends it where; unless `dry_run`, it is on its way when this returns."""
    stores = _stores(await read_view(access))
    answers = await ask_each(
        stores, lambda _, channel: AdminStub(channel).rebalance(dry_run=dry_run, timeout=_LOOK_TIMEOUT), timeout=_LOOK_TIMEOUT
    )
    nodes: list[Record] = [
        {"node_id": member.node_id, "error": str(answer)}
        if isinstance(answer, LarderError)
        else {"node_id": member.node_id, **dataclasses.asdict(answer)}
        for member, answer in answers
    ]
    moves = [move for node in nodes for move in node.get("moves", ())]
    totals = {key: sum(move[key] for move in moves) for key in ("stripes", "blocks", "bytes")}
    surplus = {key: sum(node.get(key, 0) for node in nodes) for key in ("surplus_blocks", "surplus_bytes")}
    return {"dry_run": dry_run, **totals, **surplus, "nodes": nodes}


def repair_summary(stores: Sequence[Mapping[str, Any]]) -> Record:
    """Of the stores of a status record: what the cluster as a whole still owes. A stripe waits at one node for each copy it lacks."""
    repairs = [store["repair"] for store in stores if "repair" in store]
    summed = ("waiting_stripes", "endangered_stripes", "waiting_blocks", "waiting_bytes", "bytes_per_s")
    return {
        **{key.replace("waiting", "under_replicated"): sum(repair[key] for repair in repairs) for key in summed},
        "eta_ms": max((repair["eta_ms"] for repair in repairs), default=0),
    }


async def samples(access: ClusterAccess, *, every_s: float) -> AsyncGenerator[Record, None]:
    """What `top` shows, again and again; rates are those of the time since the sample before."""
    before: dict[NodeId, NodeReport] = {}
    at = time.monotonic()
    while True:
        view = await read_view(access)
        answers = await ask_each(_stores(view), lambda _, channel: AdminStub(channel).status(timeout=_CALL_TIMEOUT))
        now = time.monotonic()
        reports = {member.node_id: answer for member, answer in answers if not isinstance(answer, LarderError)}
        if before:
            nodes = [_top_row(member, answer, before.get(member.node_id), now - at) for member, answer in answers]
            yield {"epoch": view.epoch, "nodes": nodes, "repair": repair_summary(nodes), "hot_stripes": len(view.hot)}
        before, at = reports, now
        await asyncio.sleep(every_s)


async def events(access: ClusterAccess) -> AsyncGenerator[Record, None]:
    """Every store's blocks as they come and go, from now on, also of stores that join or start anew meanwhile. Each record says how many
    blocks its node has, and whether that is exact.

    Without end. A stream that breaks says so once, and is tried again as long as the store is a member. Raises ConfigError when Redis
    does not answer at the start.
    """
    arrived: asyncio.Queue[Record] = asyncio.Queue(maxsize=1000)  # a slow terminal slows the streams, and they tell their gaps

    async def follow(member: Member, registry: RedisRegistry, pool: ChannelPool) -> None:
        told = False
        while any((each.node_id, each.boot_id) == (member.node_id, member.boot_id) for each in _stores(registry.view)):
            picture = Picture()
            try:
                async for event in AdminStub(pool.get(member.address)).events():
                    picture.see(event)
                    told = False
                    if event.kind is not BlockEventKind.HELD and (picture.exact or event.kind is BlockEventKind.GAP):
                        await arrived.put(_event_record(event, picture))
            except LarderError as error:
                if not told:
                    await arrived.put({"node_id": member.node_id, "event": "broken", "reason": str(error), "exact": False})
                told = True
            await asyncio.sleep(_TRY_STREAM_AGAIN_S)

    async def follow_all(registry: RedisRegistry) -> None:
        followed: set[tuple[NodeId, BootId]] = set()
        async with channels() as pool, asyncio.TaskGroup() as group:
            while True:
                view = registry.view
                for member in _stores(view):
                    if (member.node_id, member.boot_id) not in followed:
                        group.create_task(follow(member, registry, pool))
                followed = {(member.node_id, member.boot_id) for member in _stores(view)}
                await registry.next_view(after=view.epoch)

    async with RedisRegistry(access.redis_url) as registry:
        following = asyncio.create_task(follow_all(registry))
        try:
            while True:
                yield await arrived.get()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _event_record(event: BlockEvent, picture: Picture) -> Record:
    block = (
        {} if event.block is None or event.key_space is None else {"namespace": event.key_space.namespace, "hash": event.block.hash.hex()}
    )
    return {
        "node_id": event.node_id,
        "boot_id": event.boot_id.hex(),
        "epoch": event.epoch,
        "sequence": event.sequence,
        "event": event.kind.name.lower(),
        **block,
        "reason": event.reason,
        "blocks": len(picture.blocks),
        "exact": picture.exact,
    }


def _top_row(member: Member, answer: NodeReport | LarderError, earlier: NodeReport | None, elapsed_s: float) -> Record:
    known: Record = {"node_id": member.node_id, "state": member.state, "takeover": member.takeover}
    if isinstance(answer, LarderError):
        return {**known, "error": str(answer)}
    same_boot = earlier is not None and earlier.boot_id == answer.boot_id

    def per_s(count: Callable[[NodeReport], int]) -> float:
        return (count(answer) - count(earlier)) / elapsed_s if earlier is not None and same_boot else 0.0

    def noted(kind: str) -> Callable[[NodeReport], int]:
        return lambda report: sum(count for name, count in report.counters.items() if name.startswith(f"{kind}:"))

    return {
        **known,
        "tiers": [dataclasses.asdict(tier) for tier in answer.tiers],
        "blocks": answer.blocks,
        "leases": answer.leases,
        "connections": sum(answer.data_connections.values()),
        "stored_per_s": round(per_s(noted("stored")), 1),
        "evicted_per_s": round(per_s(noted("evicted")), 1),
        "cpu_percent": round(per_s(lambda report: report.cpu_ns) / 1e7, 1),
        "repair": dataclasses.asdict(answer.repair),
        "drain": None if answer.drain is None else dataclasses.asdict(answer.drain),
    }


async def _one(member: Member, call: Callable[[AdminStub], Any]) -> Any:
    [(_, answer)] = await ask_each([member], lambda _, channel: call(AdminStub(channel)))
    if isinstance(answer, LarderError):
        raise answer
    return answer


def _stores(view: View) -> list[Member]:
    return reachable([member for member in view.members if member.role is Role.STORE])


def _store(view: View, node_id: str) -> Member:
    member = next((member for member in view.members if member.node_id == node_id), None)
    if member is None:
        raise NotFound(f"no member {node_id!r}; there are: {', '.join(sorted(each.node_id for each in view.members)) or 'none'}")
    if member.role is not Role.STORE:
        raise InvalidRequest(f"{node_id} is a {member.role} node: it holds no blocks; stop it, and its streams go on elsewhere")
    if member.state not in (MemberState.ACTIVE, MemberState.DRAINING):
        raise InvalidRequest(f"{node_id} is {member.state}: there is nothing to drain")
    return member
