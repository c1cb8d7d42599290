"""Each cause by which a prefix ends, from what nodes answer."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvstore.admin.cluster_access import Prompt
from kvstore.admin.explain import NodeAnswer, explained, explained_lines
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.errors import Unavailable
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, LayoutFingerprint, Namespace, NodeId, StripeId
from kvstore.rpc.admin_stub import BlockReport, DepartureReport, RecallReport

OURS = KeySpace(Namespace("kitchen"), LayoutFingerprint(bytes(32)))
OTHER_LAYOUT = KeySpace(Namespace("kitchen"), LayoutFingerprint(bytes([1] * 32)))
OTHER_NAMESPACE = KeySpace(Namespace("cellar"), LayoutFingerprint(bytes(32)))
HASHES = [BlockHash(hashlib.sha256(bytes([number])).digest()) for number in range(5)]
CHAIN = tuple(BlockRef(HASHES[index + 1], HASHES[index], StripeId(HASHES[1]), index) for index in range(4))
PROMPT = Prompt(tokens=130, block_tokens=32, key_space=OURS, chain=CHAIN)
HELD, ABSENT = BlockReport(("host",), 100, 0, ("as sealed",), (100,)), BlockReport((), 0, 0, (), ())


def member(name: str, state: MemberState = MemberState.ACTIVE) -> Member:
    return Member(node_id=NodeId(name), boot_id=BootId(bytes(16)), role=Role.STORE, address="h:1", state=state)


def answer(held: int = 0, gone: str = "", spaces: tuple[KeySpace, ...] = (), forgotten: int = 0) -> NodeAnswer:
    """Of a node that has the first `held` blocks, and remembers of the next one that it went."""
    departures = [DepartureReport(gone, 2500) if gone and index == held else None for index in range(4)]
    return NodeAnswer([HELD] * held + [ABSENT] * (4 - held), RecallReport(tuple(departures), spaces, forgotten))


@pytest.mark.parametrize(
    ("answers", "held", "cause"),
    [
        ([answer(4)], 4, "held"),
        ([answer(2), answer(3)], 3, "never_stored"),
        ([answer(2, gone="room", spaces=(OURS,))], 2, "evicted"),
        ([answer(2), Unavailable("no route")], 2, "node_down"),
        ([answer(0, spaces=(OTHER_LAYOUT, OTHER_NAMESPACE))], 0, "other_layout"),
        ([answer(0, spaces=(OTHER_NAMESPACE,))], 0, "other_namespace"),
        ([answer(1, spaces=(OURS, OTHER_LAYOUT), forgotten=3)], 1, "forgotten"),
    ],
)
def test_the_chain_breaks_for_the_cause_that_the_nodes_answers_show(answers: list[Any], held: int, cause: str) -> None:
    members = [member(f"s{number}") for number in range(len(answers))]
    record = explained(PROMPT, View(Epoch(1), tuple(members)), list(zip(members, answers, strict=True)), replicas=2)
    assert (record["held_prefix_blocks"], record["cause"]) == (held, cause)
    lines = "\n".join(explained_lines(record))
    assert f"the first {held} held" in lines
    assert ("the chain breaks at block" in lines) == (held < 4)
    assert ("s0: room, 2.5 s ago" in lines) == (cause == "evicted")


def test_a_dead_store_and_a_prompt_without_a_full_block_are_said_to_be_that() -> None:
    members = (member("s0"), member("s1", MemberState.DEAD))
    record = explained(PROMPT, View(Epoch(1), members), [(members[0], answer(1))], replicas=2)
    assert (record["cause"], record["down"]) == ("node_down", [{"node_id": "s1", "why": "dead"}])
    short = Prompt(tokens=5, block_tokens=32, key_space=OURS, chain=())
    empty = NodeAnswer([], RecallReport((), (), 0))
    assert explained(short, View(Epoch(1), members[:1]), [(members[0], empty)], replicas=2)["cause"] == "no_full_block"
