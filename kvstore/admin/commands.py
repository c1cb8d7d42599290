"""What the commands on a running cluster find out or bring about, as records ready for JSON. No printing here."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvstore.admin.cluster_access import ClusterAccess, Prompt, ask_each, channels, gateway_health, reachable, read_view, tokenize
from kvstore.admin.upkeep import repair_summary
from kvstore.core.placement import place, reading_places
from kvstore.core.view import DECODE_ROLES, PREFILL_ROLES, Member, Role, View
from kvstore.errors import InvalidRequest, LarderError
from kvstore.ids import NodeId
from kvstore.rpc.admin_stub import AdminStub, Evicted, RepairProgress, VerifyProgress
from kvstore.rpc.load_stub import decode_load, prefill_load
from kvstore.transport import AutoTransport, Peer
from kvstore.units import Nanos, seconds

Record = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Node, done, total."""

LONG_CALL_TIMEOUT = seconds(600)
"""Of a verify or a repair: reads or copies everything a node has."""
DEFAULT_REPLICAS = 2


async def nodes(access: ClusterAccess) -> Record:
    """With the transport that a client in this place uses with each store node, and why: it is tried, not guessed."""
    view = await read_view(access)
    choices: dict[NodeId, Record] = {}
    async with channels() as pool:
        transport = AutoTransport(pool)

        async def choose(member: Member) -> None:
            try:
                choice = await transport.choice(Peer(member.node_id, member.boot_id, member.address))
                choices[member.node_id] = {"transport": choice.kind.value, "transport_reason": choice.reason}
            except LarderError as error:
                choices[member.node_id] = {"transport": "none", "transport_reason": str(error)}

        await asyncio.gather(*(choose(member) for member in _alive(view, Role.STORE)))
        await transport.close()
    members = sorted(view.members, key=lambda member: (member.role, member.node_id))
    return {"epoch": view.epoch, "nodes": [_member_record(member) | choices.get(member.node_id, {}) for member in members]}


async def status(access: ClusterAccess) -> Record:
    view = await read_view(access)
    stores = await ask_each(_alive(view, Role.STORE), lambda _, channel: AdminStub(channel).status(timeout=seconds(5)))
    decodes = await ask_each(_alive(view, *DECODE_ROLES), lambda _, channel: decode_load(channel, timeout=seconds(5)))
    prefills = await ask_each(_alive(view, *PREFILL_ROLES), lambda _, channel: prefill_load(channel, timeout=seconds(5)))
    gateway: Record | None = None
    try:
        health = await gateway_health(access)
        if health is not None:
            gateway = {"url": access.gateway_url, "health": health}
    except LarderError as error:
        gateway = {"url": access.gateway_url, "error": str(error)}
    store_records = [_answer_record(member, answer) for member, answer in stores]
    return {
        "redis_url": access.redis_url,
        "epoch": view.epoch,
        "gateway": gateway,
        "repair": repair_summary(store_records),
        "hot_stripes": len(view.hot),
        "stores": store_records,
        "engines": [_answer_record(member, answer) for member, answer in [*prefills, *decodes]],
    }


async def locate(access: ClusterAccess, source: Mapping[str, Any], *, replicas: int = DEFAULT_REPLICAS) -> Record:
    """Where the blocks of {"prompt": text} or {"messages": [...]} are.

    Asks every store node, not the owners alone: a copy may also lie with a former owner.
    """
    prompt = await tokenize(access, source)
    view = await read_view(access)
    stores = _alive(view, Role.STORE)
    answers = await ask_each(stores, lambda _, channel: AdminStub(channel).locate(prompt.key_space, prompt.chain, timeout=seconds(5)))
    blocks = []
    for number, ref in enumerate(prompt.chain):
        copies = [
            {"node_id": member.node_id, **dataclasses.asdict(answer[number])}
            for member, answer in answers
            if not isinstance(answer, LarderError) and answer[number].tiers
        ]
        owners = place(ref.stripe, view, replicas=replicas)
        extra = reading_places(ref.stripe, view, replicas=replicas)[len(owners) :]
        places = {"owners": list(owners), "extra_replicas": list(extra)}
        blocks.append({"index": ref.index, "hash": ref.hash.hex(), "stripe": ref.stripe.hex(), **places, "copies": copies})
    held = next((number for number, block in enumerate(blocks) if not block["copies"]), len(blocks))
    return {
        "namespace": prompt.key_space.namespace,
        "tokens": prompt.tokens,
        "block_tokens": prompt.block_tokens,
        "held_prefix_blocks": held,
        "blocks": blocks,
        "unreachable": [{"node_id": member.node_id, "error": str(answer)} for member, answer in answers if isinstance(answer, LarderError)],
    }


async def evict_all(access: ClusterAccess) -> Record:
    return await _evict(access, lambda channel: AdminStub(channel).evict_all(timeout=seconds(5)))


async def evict_namespace(access: ClusterAccess, namespace: str) -> Record:
    if not namespace:
        raise InvalidRequest("--namespace is empty; name one, or take --all for every namespace")
    return await _evict(access, lambda channel: AdminStub(channel).evict_namespace(namespace, timeout=seconds(5)))


async def evict_prompt(access: ClusterAccess, text: str) -> Record:
    prompt = await _blocks_of(access, text, to="evict")
    return await _evict(access, lambda channel: AdminStub(channel).evict_blocks(prompt.key_space, prompt.chain, timeout=seconds(5)))


async def pin_prompt(access: ClusterAccess, text: str, *, hard: bool, ttl: Nanos) -> Record:
    prompt = await _blocks_of(access, text, to="pin")
    return await _each_store(access, lambda stub: stub.pin(prompt.key_space, prompt.chain, hard=hard, ttl=ttl, timeout=seconds(5)))


async def unpin_prompt(access: ClusterAccess, text: str) -> Record:
    prompt = await _blocks_of(access, text, to="unpin")

    async def unpin(stub: AdminStub) -> Record:
        return {"unpinned_blocks": await stub.unpin(prompt.key_space, prompt.chain, timeout=seconds(5))}

    return await _each_store(access, unpin)


async def _blocks_of(access: ClusterAccess, text: str, *, to: str) -> Prompt:
    """Raises InvalidRequest when there are none, which no node would notice."""
    prompt = await tokenize(access, {"prompt": text})
    if not prompt.chain:
        raise InvalidRequest(
            f"nothing to {to}: the prompt has {prompt.tokens} tokens, and no full block of {prompt.block_tokens}; tails are never stored"
        )
    return prompt


async def quota(access: ClusterAccess, namespace: str) -> Record:
    return await _each_store(access, lambda stub: stub.quota(namespace, timeout=seconds(5)))


async def set_quota(access: ClusterAccess, namespace: str, limit: int | None) -> Record:
    return await _each_store(access, lambda stub: stub.set_quota(namespace, limit, timeout=seconds(5)))


def refused_by_all(answers: Sequence[object]) -> InvalidRequest | None:
    """What every node refuses in the same words is wrong with the request, and is to be said once."""
    first = next(iter(answers), None)
    if isinstance(first, InvalidRequest) and all(isinstance(answer, InvalidRequest) and str(answer) == str(first) for answer in answers):
        return first
    return None


async def _each_store(access: ClusterAccess, call: Callable[[AdminStub], Awaitable[Any]]) -> Record:
    """A record a store node, of the dataclass or the record that the call gives, or with its error. Raises what all of them refuse."""
    answers = await ask_each(_alive(await read_view(access), Role.STORE), lambda _, channel: call(AdminStub(channel)))
    refusal = refused_by_all([answer for _, answer in answers])
    if refusal is not None:
        raise refusal
    return {
        "nodes": [
            {"node_id": member.node_id, "error": str(answer)}
            if isinstance(answer, LarderError)
            else {"node_id": member.node_id, **(answer if isinstance(answer, dict) else dataclasses.asdict(answer))}
            for member, answer in answers
        ]
    }


async def verify(access: ClusterAccess, on_progress: Progress) -> Record:
    """Every node reads back and checks all it has, all nodes at once."""

    def steps(progress: VerifyProgress) -> tuple[int, int]:
        return progress.checked_copies, progress.total_copies

    results = await _stream_each(access, lambda channel: AdminStub(channel).verify(timeout=LONG_CALL_TIMEOUT), steps, on_progress)
    return {"bad_copies": sum(node.get("bad_copies", 0) for node in results), "nodes": results}


async def repair(access: ClusterAccess, on_progress: Progress) -> Record:
    """Every node fetches what it should own and lacks, all nodes at once."""

    def steps(progress: RepairProgress) -> tuple[int, int]:
        return progress.copied_blocks + progress.failed_blocks, progress.missing_blocks

    results = await _stream_each(access, lambda channel: AdminStub(channel).repair(timeout=LONG_CALL_TIMEOUT), steps, on_progress)
    return {"failed_blocks": sum(node.get("failed_blocks", 0) for node in results), "nodes": results}


async def _evict(access: ClusterAccess, call: Callable[[Any], Awaitable[Evicted]]) -> Record:
    answers = await ask_each(_alive(await read_view(access), Role.STORE), lambda _, channel: call(channel))
    refusal = refused_by_all([answer for _, answer in answers])
    if refusal is not None:
        raise refusal
    return {
        "nodes": [
            {"node_id": member.node_id, "error": str(answer)}
            if isinstance(answer, LarderError)
            else {
                "node_id": member.node_id,
                "evicted_copies": answer.copies,
                "evicted_bytes": answer.bytes,
                "leased_copies_kept": answer.leased_copies_kept,
            }
            for member, answer in answers
        ]
    }


async def _stream_each(
    access: ClusterAccess,
    call: Callable[[Any], AsyncGenerator[Any, None]],
    steps: Callable[[Any], tuple[int, int]],
    on_progress: Progress,
) -> list[Record]:
    async def follow(member: Member, channel: Any) -> Any:
        last = None
        async for last in call(channel):
            on_progress(member.node_id, *steps(last))
        return last

    answers = await ask_each(_alive(await read_view(access), Role.STORE), follow, timeout=LONG_CALL_TIMEOUT)
    return [
        {"node_id": member.node_id, "error": str(answer)}
        if isinstance(answer, LarderError)
        else {"node_id": member.node_id, **({} if answer is None else dataclasses.asdict(answer))}
        for member, answer in answers
    ]


def _alive(view: View, *roles: Role) -> list[Member]:
    return reachable([member for member in view.members if member.role in roles])


def _member_record(member: Member) -> Record:
    return {**dataclasses.asdict(member), "boot_id": member.boot_id.hex()}


def _answer_record(member: Member, answer: Any) -> Record:
    known = {"node_id": member.node_id, "role": member.role, "state": member.state, "address": member.address}
    if isinstance(answer, LarderError):
        return {**known, "error": str(answer)}
    return {**dataclasses.asdict(answer), **known}
