from __future__ import annotations

import hashlib
import itertools
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
        "12",
        "12",
        "12",
        "12",
        "21",
        "21",
        "31",
        "31",
    ]


MANY = [StripeId(hashlib.sha256(b"many" + n.to_bytes(4, "little")).digest()) for n in range(8000)]


def moved(before: View, after: View, *, replicas: int = 2) -> int:
    """Replicas that have to be made for the second view."""
    return sum(len(set(place(stripe, after, replicas=replicas)) - set(place(stripe, before, replicas=replicas))) for stripe in MANY)


@pytest.mark.parametrize("zones", [1, 3])
def test_a_join_and_a_leave_move_within_a_tenth_of_the_minimum(zones: int) -> None:
    nine = [store(f"n{number}", zone=f"z{number % zones}") for number in range(9)]
    least = 2 * len(MANY) / 9  # what each of nine equal stores has to hold
    assert moved(view(*nine[:-1]), view(*nine)) == pytest.approx(least, rel=0.1)
    assert moved(view(*nine), view(*nine[:-1])) == pytest.approx(least, rel=0.1)


@pytest.mark.parametrize("zone", ["z", "another zone"])
def test_a_newcomer_takes_its_stripes_step_by_step_and_each_of_them_once(zone: str) -> None:
    """Alone in its zone it owns a replica of every stripe in the end: by weight alone it would from the start."""
    old = [store(name) for name in "abcd"]
    views = [view(*old)] + [view(*old, replace(store("new", zone=zone), takeover=share)) for share in (0.25, 0.5, 0.75, 1.0)]
    owned = [{stripe for stripe in MANY if "new" in place(stripe, each, replicas=2)} for each in views]
    assert all(some <= more for some, more in itertools.pairwise(owned)), "never gives one back"
    whole = len(owned[-1])
    assert [len(some) / whole for some in owned] == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.03)
    assert sum(moved(before, after) for before, after in itertools.pairwise(views)) == whole, "nothing else moves"


def test_where_all_are_new_every_stripe_has_its_owners_all_the_same() -> None:
    new = [replace(store(name), takeover=0.25) for name in "abc"]
    assert all(len(place(stripe, view(*new), replicas=2)) == 2 for stripe in MANY[:500])
    assert all(place(stripe, view(new[0]), replicas=2) == ("a",) for stripe in MANY[:50])
