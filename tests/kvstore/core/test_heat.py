from __future__ import annotations

import hashlib
from types import SimpleNamespace

from kvstore.core.heat import MOST_COUNTED, StripeHeat, hot_stripes
from kvstore.core.placement import place, reading_places
from kvstore.core.view import Member, Role, View
from kvstore.ids import BootId, Epoch, NodeId, StripeId

STRIPES = [StripeId(hashlib.sha256(n.to_bytes(4, "little")).digest()) for n in range(MOST_COUNTED + 8)]
STORES = tuple(
    Member(node_id=NodeId(f"s{number}"), boot_id=BootId(bytes(16)), role=Role.STORE, address="h:1", zone=f"z{number}")
    for number in range(5)
)


def run_of(*stripes: StripeId):
    return [SimpleNamespace(stripe=stripe) for stripe in stripes for _ in range(8)]


def owned_by(node_id: str, view: View) -> list[StripeId]:
    return [stripe for stripe in STRIPES[:40] if node_id in place(stripe, view, replicas=2)]


def hot(rates, view, *, most_extra=2):
    return hot_stripes(rates, view, node_id=NodeId("s0"), replicas=2, hot_rate=100, most_extra=most_extra)


def test_an_acquire_counts_once_for_each_stripe_of_its_run() -> None:
    heat = StripeHeat()
    for _ in range(3):
        heat.used(run_of(STRIPES[0], STRIPES[1]))
    heat.used(run_of(STRIPES[1])[:1])
    assert heat.take() == {STRIPES[0]: 3, STRIPES[1]: 4}
    assert heat.take() == {}


def test_what_is_counted_is_bounded_and_what_was_counted_before_goes_on() -> None:
    heat = StripeHeat()
    heat.used(run_of(*STRIPES))
    heat.used(run_of(STRIPES[0], STRIPES[-1]))
    counts = heat.take()
    assert len(counts) == MOST_COUNTED
    assert counts[STRIPES[0]] == 2
    assert STRIPES[-1] not in counts


def test_a_stripe_becomes_hot_grows_while_its_readers_stay_busy_stays_in_between_and_ends() -> None:
    cold = View(Epoch(1), STORES)
    stripe, another = owned_by("s0", cold)[:2]
    assert hot({stripe: 99.0}, cold) == {}
    assert hot({stripe: 100.0, another: 300.0}, cold) == {another: 1, stripe: 1}
    once = View(Epoch(2), STORES, {stripe: 1})
    assert hot({stripe: 100.0}, once) == {stripe: 2}
    assert hot({stripe: 26.0}, once) == {stripe: 1}
    assert hot({stripe: 24.0}, once) == {}
    assert hot({stripe: 900.0}, View(Epoch(3), STORES, {stripe: 2})) == {stripe: 2}
    assert hot({stripe: 900.0}, cold, most_extra=0) == {stripe: 0}, "its owners take turns at least"


def test_only_an_owner_finds_a_stripe_hot() -> None:
    cold = View(Epoch(1), STORES)
    strange = next(stripe for stripe in STRIPES if "s0" not in place(stripe, cold, replicas=2))
    assert hot({strange: 900.0}, cold) == {}


def test_the_extra_places_follow_the_owners_also_while_a_newcomer_takes_over() -> None:
    newcomer = Member(node_id=NodeId("new"), boot_id=BootId(bytes(16)), role=Role.STORE, address="h:1", zone="z9", takeover=0.25)
    for stores in (STORES, STORES[:2], (*STORES[:2], newcomer)):
        for stripe in STRIPES[:200]:
            places = reading_places(stripe, View(Epoch(1), stores, {stripe: 1}), replicas=2)
            owners = place(stripe, View(Epoch(1), stores), replicas=2)
            assert places[: len(owners)] == owners
            assert len(places) == len(set(places)) == min(3, len(stores))
            assert reading_places(stripe, View(Epoch(1), stores), replicas=2) == owners
