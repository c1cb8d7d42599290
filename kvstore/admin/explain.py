"""Why a prompt's prefix ends where it ends: which block broke the chain, and the likeliest reason. Pure but for `explain`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvstore.admin.cluster_access import ClusterAccess, Prompt, ask_each, reachable, read_view, tokenize
from kvstore.core.placement import place
from kvstore.core.view import Member, MemberState, View
from kvstore.errors import LarderError
from kvstore.rpc.admin_stub import AdminStub, BlockReport, RecallReport
from kvstore.units import seconds

Record = dict[str, Any]

_TIMEOUT = seconds(5)


class Cause(StrEnum):
    HELD = "held"
    """Nothing is broken: every full block is there."""
    NO_FULL_BLOCK = "no_full_block"
    EVICTED = "evicted"
    """Or deleted, expired, found corrupt: the departures say which, when and where."""
    NODE_DOWN = "node_down"
    OTHER_LAYOUT = "other_layout"
    """Of this layout there is nothing, of another there is in this namespace."""
    OTHER_NAMESPACE = "other_namespace"
    FORGOTTEN = "forgotten"
    """No node remembers it, but one has had more departures than it remembers."""
    NEVER_STORED = "never_stored"
    """As far as the nodes remember: since their starts."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    held: Sequence[BlockReport]
    """One per block of the chain."""
    recalled: RecallReport


async def explain(access: ClusterAccess, source: Mapping[str, Any], *, replicas: int) -> Record:
    """Of {"prompt": text}. Raises as `tokenize` does."""
    prompt = await tokenize(access, source)
    view = await read_view(access)

    async def ask(_: Member, channel: Any) -> NodeAnswer:
        stub = AdminStub(channel)
        held, recalled = await asyncio.gather(
            stub.locate(prompt.key_space, prompt.chain, timeout=_TIMEOUT), stub.recall(prompt.key_space, prompt.chain, timeout=_TIMEOUT)
        )
        return NodeAnswer(held, recalled)

    return explained(prompt, view, await ask_each(reachable(view.stores), ask), replicas=replicas)


def explained(prompt: Prompt, view: View, answers: Sequence[tuple[Member, NodeAnswer | LarderError]], *, replicas: int) -> Record:
    nodes = {member.node_id: answer for member, answer in answers if not isinstance(answer, LarderError)}
    down = {member.node_id: str(answer) for member, answer in answers if isinstance(answer, LarderError)}
    down |= {member.node_id: member.state.value for member in view.stores if member.state in (MemberState.DEAD, MemberState.SUSPECT)}
    held = next(
        (number for number in range(len(prompt.chain)) if not any(node.held[number].tiers for node in nodes.values())), len(prompt.chain)
    )
    record: Record = {
        "key": {
            "namespace": prompt.key_space.namespace,
            "layout": prompt.key_space.layout.hex(),
            "root": prompt.chain[0].parent.hex() if prompt.chain else None,
            "tokens": prompt.tokens,
            "block_tokens": prompt.block_tokens,
        },
        "blocks": len(prompt.chain),
        "held_prefix_blocks": held,
        "down": [{"node_id": node_id, "why": why} for node_id, why in sorted(down.items())],
    }
    if held == len(prompt.chain):
        return {**record, "cause": Cause.HELD if prompt.chain else Cause.NO_FULL_BLOCK}
    broken = prompt.chain[held]
    departures = [
        {"node_id": node_id, "reason": gone.reason, "ago_ms": gone.ago_ms}
        for node_id, node in nodes.items()
        if (gone := node.recalled.departures[held]) is not None
    ]
    spaces = [space for node in nodes.values() for space in node.recalled.key_spaces]
    others = {space for space in spaces if space != prompt.key_space}
    cause = Cause.NEVER_STORED
    if departures:
        cause = Cause.EVICTED
    elif down:
        cause = Cause.NODE_DOWN
    elif prompt.key_space not in spaces and any(space.namespace == prompt.key_space.namespace for space in others):
        cause = Cause.OTHER_LAYOUT
    elif prompt.key_space not in spaces and any(space.layout == prompt.key_space.layout for space in others):
        cause = Cause.OTHER_NAMESPACE
    elif any(node.recalled.forgotten for node in nodes.values()):
        cause = Cause.FORGOTTEN
    return {
        **record,
        "cause": cause,
        "broken": {"index": broken.index, "hash": broken.hash.hex(), "owners": list(place(broken.stripe, view, replicas=replicas))},
        "departures": sorted(departures, key=lambda departure: departure["ago_ms"]),
        "other_key_spaces": [{"namespace": space.namespace, "layout": space.layout.hex()} for space in sorted(others)],
    }


def explained_lines(record: Mapping[str, Any]) -> list[str]:
    """For people."""
    key = record["key"]
    lines = [
        f"namespace {key['namespace']}, layout {key['layout'][:12]}, root {(key['root'] or 'none')[:12]}",
        f"{key['tokens']} tokens, {record['blocks']} full blocks of {key['block_tokens']}, the first {record['held_prefix_blocks']} held",
    ]
    if "broken" in record:
        broken = record["broken"]
        lines.append(f"the chain breaks at block {broken['index']} ({broken['hash'][:12]}, owners {', '.join(broken['owners'])}): ")
        lines[-1] += str(record["cause"]).replace("_", " ")
        lines += [f"  {gone['node_id']}: {gone['reason']}, {gone['ago_ms'] / 1000:.1f} s ago" for gone in record["departures"]]
        if record["cause"] in (Cause.OTHER_LAYOUT, Cause.OTHER_NAMESPACE):
            lines += [f"  held: namespace {each['namespace']}, layout {each['layout'][:12]}" for each in record["other_key_spaces"]]
    return lines + [f"  {node['node_id']} is down: {node['why']}" for node in record["down"]]
