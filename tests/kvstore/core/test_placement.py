from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.placement import place
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId, StripeId

STRIPES = [StripeId(hashlib.sha256(n.to_bytes(2, "little")).digest()) for n in range(3000)]


def store(name: str, *, zone: str = "z", weight: float = 1.0, state: MemberState = MemberState.ACTIVE) -> Member:
    return Member(node_id=NodeId(name), boot_id=BootId(b"b" * 16), role=Role.STORE, address="h:1", zone=zone, weight=weight, state=state)


def view(*members: Member) -> View:
    return View(Epoch(1), members)


members = st.lists(
    st.builds(store, st.text("abcdefgh", min_size=1, max_size=3), zone=st.sampled_from("xyz"), weight=st.sampled_from([0.5, 1.0, 3.0])),
    min_size=1,
    max_size=8,
    unique_by=lambda member: member.node_id,
)


@given(members, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_owners_are_distinct_stores_and_do_not_depend_on_the_order_of_the_view(found: list[Member], replicas: int, random) -> None:
    shuffled = found[:]
    random.shuffle(shuffled)
    for stripe in STRIPES[:20]:
        owners = place(stripe, view(*found), replicas=replicas)
        assert len(owners) == len(set(owners)) == min(replicas, len(found))
        assert owners == place(stripe, view(*shuffled), replicas=replicas)


@given(members, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_join_moves_only_what_the_new_store_wins(found: list[Member], replicas: int) -> None:
    *old, new = found
    for stripe in STRIPES[:40]:
        before = set(place(stripe, view(*old), replicas=replicas))
        after = set(place(stripe, view(*found), replicas=replicas))
        if new.node_id in after:
            assert len(before - after) <= 1
            assert after - before == {new.node_id}
        else:
            assert after == before


@given(members, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_replicas_spread_over_zones_before_any_zone_gets_a_second(found: list[Member], replicas: int) -> None:
    zones = {member.node_id: member.zone for member in found}
    for stripe in STRIPES[:20]:
        used = {zones[owner] for owner in place(stripe, view(*found), replicas=replicas)}
        assert len(used) == min(replicas, len(set(zones.values())))


def test_load_follows_the_weights() -> None:
    counts = Counter(place(stripe, view(store("a"), store("b"), store("c", weight=2.0)), replicas=1)[0] for stripe in STRIPES)
    assert counts["c"] / len(STRIPES) == pytest.approx(0.5, abs=0.04)
    assert counts["a"] / len(STRIPES) == pytest.approx(0.25, abs=0.04)


def test_a_missed_lease_moves_nothing_and_a_death_only_the_dead_ones_stripes() -> None:
    trio = [store("a"), store("b"), store("c")]
    suspect = [replace(trio[0], state=MemberState.SUSPECT), *trio[1:]]
    dead = [replace(trio[0], state=MemberState.DEAD), *trio[1:]]
    for stripe in STRIPES[:200]:
        before = place(stripe, view(*trio), replicas=2)
        assert place(stripe, view(*suspect), replicas=2) == before
        after = place(stripe, view(*dead), replicas=2)
        assert set(before) - {NodeId("a")} <= set(after)


def test_prefill_and_decode_nodes_own_nothing() -> None:
    worker = replace(store("w"), role=Role.DECODE)
    assert all(place(stripe, view(store("a"), worker), replicas=2) == ("a",) for stripe in STRIPES[:50])


def test_placement_is_the_same_for_ever() -> None:
    trio = view(store("store-1"), store("store-2"), store("store-3"))
    assert ["".join(name[-1] for name in place(stripe, trio, replicas=2)) for stripe in STRIPES[:8]] == [
        "31",
        "12",
        "23",
        "21",
        "13",
        "32",
        "31",
        "23",
    ]
