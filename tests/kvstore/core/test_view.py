from __future__ import annotations

from kvstore.core.view import TRANSITIONS, Member, MemberEvent, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId


def member(name: str, role: Role) -> Member:
    return Member(node_id=NodeId(name), boot_id=BootId(b"b" * 16), role=role, address="127.0.0.1:1")


def test_only_stores_are_stores() -> None:
    view = View(Epoch(3), (member("a", Role.STORE), member("b", Role.PREFILL), member("c", Role.DECODE)))
    assert [store.node_id for store in view.stores] == ["a"]
    assert view.member(NodeId("b")) is view.members[1]
    assert view.member(NodeId("z")) is None


def test_the_dead_and_the_departed_have_no_way_back() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] in (MemberState.LEFT, MemberState.DEAD)]


def test_every_living_state_ends_somehow() -> None:
    for start in (MemberState.JOINING, MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING):
        reached, todo = {start}, [start]
        while todo:
            state = todo.pop()
            for event in MemberEvent:
                following = TRANSITIONS.get((state, event))
                if following is not None and following not in reached:
                    reached.add(following)
                    todo.append(following)
        assert {MemberState.LEFT, MemberState.DEAD} <= reached, start
