from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.config import ClientConfig
from kvstore.client.routing import READABLE_STATES, Router
from kvstore.core.placement import place, reading_places
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId, StripeId
from kvstore.units import Nanos, seconds

CONFIG = ClientConfig(previous_views=seconds(60))
STRIPES = [StripeId(hashlib.sha256(bytes([number])).digest()) for number in range(40)]


def store(number: int, state: MemberState = MemberState.ACTIVE, *, boot: int = 0) -> Member:
    return Member(
        node_id=NodeId(f"s{number}"),
        boot_id=BootId(boot.to_bytes(16, "little")),
        role=Role.STORE,
        address=f"127.0.0.1:{number}",
        state=state,
    )


def router_of(*views: View, replicas: int = 2, now: Nanos = Nanos(0)) -> Router:
    router = Router(replicas=replicas, config=CONFIG)
    for view in views:
        assert router.see(view, now)
    return router


def view(epoch: int, *members: Member) -> View:
    return View(Epoch(epoch), members)


def test_readers_are_the_owners_in_their_order() -> None:
    present = view(1, *(store(number) for number in range(5)))
    router = router_of(present)
    for stripe in STRIPES:
        assert router.readers(stripe) == router.owners(stripe) == place(stripe, present, replicas=2)


def test_a_suspect_owner_is_asked_last() -> None:
    for suspect in range(3):
        members = [store(number, MemberState.SUSPECT if number == suspect else MemberState.ACTIVE) for number in range(3)]
        router = router_of(view(1, *members), replicas=3)
        for stripe in STRIPES:
            assert router.readers(stripe)[-1] == f"s{suspect}"
            assert set(router.owners(stripe)) == {"s0", "s1", "s2"}


def test_a_node_with_an_open_circuit_is_not_asked_but_still_owns() -> None:
    router = router_of(view(1, store(0), store(1)))
    router.circuit(NodeId("s0")).failed(Nanos(0), deadline_passed=True, jitter=0)
    for stripe in STRIPES:
        assert router.readers(stripe) == ("s1",)
        assert set(router.owners(stripe)) == {"s0", "s1"}


def test_a_restart_closes_the_circuit_and_an_unrelated_epoch_does_not() -> None:
    router = router_of(view(1, store(0), store(1)))
    router.circuit(NodeId("s0")).failed(Nanos(0), deadline_passed=True, jitter=0)
    router.see(view(2, store(0), store(1), store(2)), Nanos(1))
    assert not router.usable(NodeId("s0"))
    router.see(view(3, store(0, boot=9), store(1), store(2)), Nanos(2))
    assert router.usable(NodeId("s0"))


def test_a_store_that_a_view_forgot_is_still_asked_for_a_while_and_one_that_died_is_not() -> None:
    """Redis came back empty, and a newcomer was there before the others had registered again."""
    everybody = [store(number) for number in range(3)]
    router = router_of(view(1, *everybody))
    expected = {stripe: set(router.readers(stripe)) for stripe in STRIPES}
    assert router.see(view(2, store(3), store(2, MemberState.DEAD)), Nanos(1))
    assert router.addresses() == {member.address for member in (*everybody, store(3))}
    for stripe in STRIPES:
        assert set(router.readers(stripe)) == expected[stripe] - {"s2"} | {"s3"}
    assert router.see(view(3, store(3)), Nanos(CONFIG.previous_views + 2))
    assert router.stores() == ("s3",)


def test_an_older_view_is_not_taken_over() -> None:
    router = router_of(view(5, store(0)))
    assert not router.see(view(5, store(1)), Nanos(0))
    assert not router.see(view(4, store(1)), Nanos(0))
    assert router.stores() == ("s0",)


def test_owners_of_before_are_asked_last_and_only_for_a_while() -> None:
    before, after = view(1, store(0), store(1)), view(2, store(0), store(1), store(2))
    router = router_of(before, after, replicas=1)
    moved = [stripe for stripe in STRIPES if place(stripe, before, replicas=1) != place(stripe, after, replicas=1)]
    assert moved
    for stripe in moved:
        assert router.readers(stripe) == place(stripe, after, replicas=1) + place(stripe, before, replicas=1)
    router.see(after, CONFIG.previous_views)
    for stripe in moved:
        assert router.readers(stripe) == place(stripe, after, replicas=1)


def test_a_change_that_moves_no_stripe_is_not_kept() -> None:
    suspected = view(2, store(0), store(1, MemberState.SUSPECT))
    router = router_of(view(1, store(0), store(1)), suspected, view(3, store(0), store(1)), replicas=1)
    for stripe in STRIPES:
        assert len(router.readers(stripe)) == 1


def test_a_draining_store_is_read_and_owns_nothing() -> None:
    router = router_of(view(1, store(0), store(1), store(2, MemberState.DRAINING)), replicas=1)
    owned_before = view(1, store(0), store(1), store(2))
    for stripe in STRIPES:
        assert "s2" not in router.owners(stripe)
        assert ("s2" in router.readers(stripe)) == (place(stripe, owned_before, replicas=1) == ("s2",))


def test_next_reader_ends() -> None:
    router = router_of(view(1, store(0), store(1), store(2)))
    asked: set[NodeId] = set()
    while (node_id := router.next_reader(STRIPES[0], asked=asked)) is not None:
        assert node_id not in asked
        asked.add(node_id)
    assert len(asked) == 2


@given(st.lists(st.lists(st.sampled_from(MemberState), min_size=0, max_size=6), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_readers_are_alive_usable_and_distinct_whatever_the_views(
    histories: list[list[MemberState]], replicas: int, data: st.DataObject
) -> None:
    router = Router(replicas=replicas, config=CONFIG)
    last_state: dict[str, MemberState] = {}
    for epoch, states in enumerate(histories, start=1):
        members = [dataclasses.replace(store(number), state=state) for number, state in enumerate(states)]
        last_state.update((member.node_id, member.state) for member in members)
        router.see(View(Epoch(epoch), tuple(members)), Nanos(epoch))
        for node_id in router.stores():
            if data.draw(st.booleans()):
                router.circuit(node_id).failed(Nanos(epoch), deadline_passed=True, jitter=0)
    alive = {node_id for node_id, state in last_state.items() if state in READABLE_STATES}
    for stripe in STRIPES[:5]:
        readers = router.readers(stripe)
        assert len(set(readers)) == len(readers)
        assert set(readers) <= alive
        assert all(router.usable(node_id) for node_id in readers)
        usable_owners = [node_id for node_id in router.owners(stripe) if router.usable(node_id)]
        assert set(usable_owners) == set(readers[: len(usable_owners)])


def test_the_replicas_of_a_hot_stripe_take_turns_and_the_extra_one_is_among_them() -> None:
    members = tuple(store(number, MemberState.SUSPECT if number == 4 else MemberState.ACTIVE) for number in range(5))
    for stripe in STRIPES[:10]:
        router = router_of(View(Epoch(1), members, {stripe: 1}))
        places = reading_places(stripe, router.view, replicas=2)
        orders = [router.readers(stripe) for _ in range(300)]
        assert {frozenset(order) for order in orders} == {frozenset(places)}
        firsts = Counter(order[0] for order in orders)
        living = [node_id for node_id in places if node_id != "s4"]
        assert set(firsts) == set(living), "a suspect is not asked first"
        assert min(firsts.values()) > 200 // len(living)
        assert router.owners(stripe) == places[:2], "writers keep to the owners"
