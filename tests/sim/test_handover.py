"""What a store gives up of others' blocks, while not everybody knows the same view yet."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sim.cluster import Cluster, Storm

from kvstore.core.placement import place
from kvstore.core.upkeep.handover import _Foreign
from kvstore.core.view import View
from kvstore.errors import StaleView
from kvstore.ids import Epoch
from kvstore.units import seconds


@pytest.fixture
def cluster() -> Cluster:
    """In the calm, with some blocks put."""
    cluster = Cluster(3, Storm(nodes=4, clients=1, replicas=2, newcomers=0, faults=False))
    cluster.wait(seconds(10))
    return cluster


def owned_stripe(cluster: Cluster) -> tuple[Any, Any]:
    """A store and a stripe of its own that it has something of."""
    view = cluster.registry.view
    for node in cluster.nodes.values():
        for stripe in node.upkeep.repairer.catalog:
            if node.node_id in place(stripe.stripe, view, replicas=2):
                return node, stripe
    raise AssertionError("nothing was put")


def without(view: View, node_id: str) -> View:
    """As it was before the store had taken anything over."""
    members = tuple(dataclasses.replace(member, takeover=0.0) if member.node_id == node_id else member for member in view.members)
    return View(Epoch(view.epoch - 1), members)


def test_what_a_store_owns_by_now_is_not_dropped_by_the_view_of_before(cluster: Cluster) -> None:
    node, stripe = owned_stripe(cluster)
    before = without(cluster.registry.view, node.node_id)
    blocks = tuple(stripe.blocks)
    owners = tuple(before.member(owner) for owner in place(stripe.stripe, before, replicas=2))
    assert node.node_id not in {owner.node_id for owner in owners if owner is not None}
    dropped = node.upkeep.processes.spawn(node.upkeep.handover._drop(_Foreign(stripe, blocks, owners), before))
    cluster.wait(seconds(1))
    assert dropped.done
    assert all(node.holds(stripe.key_space, block) for block in blocks)


def test_a_store_that_an_emptied_registry_has_not_got_yet_drops_nothing(cluster: Cluster) -> None:
    node, stripe = owned_stripe(cluster)
    present = cluster.registry.view
    others = View(Epoch(present.epoch + 1000), tuple(member for member in present.members if member.node_id != node.node_id))
    node.see(others)
    cluster.wait(0)
    assert node.upkeep.view is others
    owners = tuple(others.member(owner) for owner in place(stripe.stripe, others, replicas=2))
    blocks = tuple(stripe.blocks)
    dropped = node.upkeep.processes.spawn(node.upkeep.handover._drop(_Foreign(stripe, blocks, owners), others))
    cluster.wait(seconds(0.1))
    assert dropped.done
    assert all(node.holds(stripe.key_space, block) for block in blocks)


def test_a_store_says_nothing_of_what_it_holds_to_one_that_knows_a_later_view(cluster: Cluster) -> None:
    node, stripe = owned_stripe(cluster)
    other = next(member for member in cluster.registry.view.stores if member.node_id != node.node_id)
    asker = cluster.nodes[other.node_id].upkeep
    member = cluster.registry.view.member(node.node_id)

    async def ask(epoch: Epoch) -> Any:
        try:
            return await asker.repairer.sender.held_by(member, stripe.key_space, tuple(stripe.blocks), verify=True, epoch=epoch)
        except StaleView as error:
            return error

    present = cluster.registry.view.epoch
    same, later = (asker.processes.spawn(ask(epoch)) for epoch in (present, Epoch(present + 1)))
    cluster.wait(seconds(2))
    assert same.value == set(stripe.blocks)
    assert isinstance(later.value, StaleView)
