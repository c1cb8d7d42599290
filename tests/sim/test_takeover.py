"""A newcomer's steps, when the registry forgets one."""

from __future__ import annotations

import dataclasses

from sim.cluster import Cluster, Storm

from kvstore.units import seconds


def test_the_last_step_is_taken_again_when_a_registry_was_filled_from_the_view_before_it() -> None:
    cluster = Cluster(3, Storm(nodes=4, clients=1, replicas=2, newcomers=0, faults=False))
    cluster.wait(seconds(5))
    node_id, *_ = cluster.nodes
    member = cluster.registry.view.member(node_id)
    assert member is not None
    assert member.takeover == 1
    cluster.registry._write(dataclasses.replace(member, takeover=0.5))
    cluster.wait(seconds(30))
    member = cluster.registry.view.member(node_id)
    assert member is not None
    assert member.takeover == 1
