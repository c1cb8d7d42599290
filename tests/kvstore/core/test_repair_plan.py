from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.core.placement import place
from kvstore.core.repair_plan import Plan, Shipment, ShipmentQueue, same_stores
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BlockHash, BootId, Epoch, KeySpace, LayoutFingerprint, Namespace, NodeId, StripeId

SPACE = KeySpace(Namespace("tenant"), LayoutFingerprint(b"L" * 32))


def store(name: str, *, state: MemberState = MemberState.ACTIVE, boot: int = 1, zone: str = "z", takeover: float = 1.0) -> Member:
    return Member(
        node_id=NodeId(name), boot_id=BootId(bytes([boot]) * 16), role=Role.STORE, address="h:1", zone=zone, state=state, takeover=takeover
    )


def change(rng: random.Random, members: list[Member], number: int) -> list[Member]:
    """One node dies, leaves, drains, restarts empty or joins, or grows into its place."""
    alive = [member for member in members if member.state in (MemberState.ACTIVE, MemberState.SUSPECT)]
    kind = rng.choice(("dead", "left", "draining", "reboot", "join", "suspect", "grow"))
    if kind == "join" or len(alive) <= 3:
        return [*members, store(f"new{number}", zone=rng.choice("xyz"), takeover=rng.choice((0.25, 1.0)))]
    victim = rng.choice(alive)
    others = [member for member in members if member is not victim]
    if kind == "grow":
        return [store(m.node_id, zone=m.zone, boot=m.boot_id[0], state=m.state) for m in members]
    if kind == "reboot":
        return [*others, store(victim.node_id, boot=victim.boot_id[0] + 1, zone=victim.zone)]
    return [*others, store(victim.node_id, state=MemberState(kind), boot=victim.boot_id[0], zone=victim.zone, takeover=victim.takeover)]


@pytest.mark.parametrize("run", range(4))
def test_every_node_plans_by_itself_and_together_they_send_each_stripe_once_to_each_new_owner(seed: int, run: int) -> None:
    """After each change everything is in its place again, as far as a copy had survived, and nothing was sent twice."""
    rng = random.Random(seed * 100 + run)
    replicas = rng.choice((2, 3))
    stripes = [StripeId(rng.randbytes(32)) for _ in range(60)]
    members = [store(f"n{number}", zone=rng.choice("xyz")) for number in range(6)]
    view = View(Epoch(1), tuple(members))
    held = {stripe: set(place(stripe, view, replicas=replicas)) for stripe in stripes}
    for number in range(12):
        old, boots = view, {member.node_id: member.boot_id for member in view.members}
        members = change(rng, members, number)
        view = View(Epoch(old.epoch + 1), tuple(members))
        living = {m.node_id for m in members if m.state not in (MemberState.DEAD, MemberState.LEFT) and boots.get(m.node_id) == m.boot_id}
        for stripe in stripes:
            held[stripe] &= living
        sent: Counter[tuple[StripeId, NodeId]] = Counter()
        for node_id in living:
            plan = Plan(node_id=node_id, old=old, new=view, replicas=replicas)
            for stripe in stripes:
                duty = plan.duty_of(stripe)
                if duty is not None:
                    assert node_id in held[stripe], "only who has it sends"
                    assert duty.living >= 1
                    sent.update((stripe, target) for target in duty.targets)
        assert not sent or max(sent.values()) == 1, "no two send the same"
        for stripe in stripes:
            owners = place(stripe, view, replicas=replicas)
            survived = bool(held[stripe])
            held[stripe] |= {target for sent_stripe, target in sent if sent_stripe == stripe}
            if survived:
                assert set(owners) <= held[stripe], "fully replicated again"
            else:
                held[stripe] = set(owners)  # lost, then put anew


def test_a_view_that_changed_in_nothing_that_matters_needs_no_plan() -> None:
    quiet = View(Epoch(1), (store("a"), store("b")))
    missed = View(Epoch(2), (store("a"), store("b", state=MemberState.SUSPECT)))
    assert same_stores(quiet, missed)
    assert not same_stores(quiet, View(Epoch(3), (store("a"), store("b", boot=2))))
    assert not same_stores(quiet, View(Epoch(3), (store("a"), store("b", takeover=0.5))))
    plan = Plan(node_id=NodeId("a"), old=quiet, new=missed, replicas=2)
    assert plan.duty_of(StripeId(bytes(32))) is None


def shipment(stripe: int, *, living: int, target: str = "t") -> Shipment:
    return Shipment(
        key_space=SPACE,
        stripe=StripeId(bytes([stripe]) * 32),
        target=NodeId(target),
        blocks=(BlockHash(bytes(32)),) * 2,
        bytes=10,
        living=living,
    )


def test_the_most_endangered_goes_first_and_nothing_waits_twice() -> None:
    queue = ShipmentQueue()
    for number, living in enumerate((2, 1, 3, 1)):
        assert queue.put(shipment(number, living=living))
    assert not queue.put(shipment(2, living=1))
    assert queue.put(shipment(2, living=2, target="other"))
    assert (len(queue), queue.blocks, queue.bytes) == (5, 10, 50)
    order = []
    while (taken := queue.take()) is not None:
        order.append((taken.stripe[0], taken.target))
    assert order == [(1, "t"), (3, "t"), (0, "t"), (2, "other"), (2, "t")]
    assert (len(queue), queue.blocks, queue.bytes) == (0, 0, 0)
