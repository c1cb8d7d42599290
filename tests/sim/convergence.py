"""Convergence: once faults have stopped, everything comes into its place by itself, and a node that is drained says so truly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.describe import describe

from kvstore.core.view import MemberState
from kvstore.units import seconds

if TYPE_CHECKING:
    from sim.cluster import Cluster
    from sim.store_node import StoreNode

_LOOK_EVERY = seconds(1)
_ROUNDS = 25
"""Of comparisons within which it must be done: every tenth looks again at what could not be put right before."""

_DRAIN_WITHIN = seconds(45)
"""Some sweeps: it sends what owners lack whether they have room to spare or not."""


def until_converged(cluster: Cluster) -> None:
    longest = max(node.upkeep_config.repair.anti_entropy_every for node in cluster.nodes.values())
    _until(cluster, lambda: unfinished(cluster), _ROUNDS * longest + seconds(60))
    cluster.log("cluster", "CONVERGED")


def _until(cluster: Cluster, what: object, within: int) -> None:
    end = cluster.timeline.now + within
    while (left := what()) and cluster.timeline.now < end:  # type: ignore[operator]
        cluster.wait(_LOOK_EVERY)
    assert not left, f"not within {within / 1e9:.0f} s: {left}"


def unfinished(cluster: Cluster) -> str:
    """The first thing that is not as it should be; empty: all is."""
    view = cluster.registry.view
    up = [node for node in cluster.nodes.values() if node.is_up]
    for node in up:
        member = view.member(node.node_id)
        if member is None or member.boot_id != node.boot_id or member.state is not MemberState.ACTIVE or member.takeover < 1:
            return f"{node.node_id} is {member}"
        if node.upkeep.view.epoch != view.epoch:
            return f"{node.node_id} does not know epoch {view.epoch}"
        repairer = node.upkeep.repairer
        if not repairer.idle or repairer.settled_epoch != view.epoch:
            return f"{node.node_id} owes something: settled {repairer.settled_epoch} of {view.epoch}, {len(repairer.waiting())} wait"
    for client in cluster.clients.values():
        if client.router.view.epoch != view.epoch:
            return f"{client.name} does not know epoch {view.epoch}"
    for (key_space, digest), block in cluster.blocks.items():
        holders = [node for node in up if node.holds(key_space, digest)]
        owners = [cluster.nodes[owner] for owner in cluster.owners(block)]
        if any(holder.holds_good(key_space, digest) for holder in holders):
            lacking = [owner for owner in owners if owner not in holders]
            for owner in lacking:
                if owner.has_room_for(key_space, block, _length(holders[0], block, key_space)):
                    return f"{owner.node_id} lacks {describe(block)}, and {[holder.node_id for holder in holders]} have it"
        surplus = [holder.node_id for holder in holders if holder not in owners]
        if surplus and all(owner.holds_good(key_space, digest) for owner in owners):
            return f"{surplus} still have {describe(block)} beside {[owner.node_id for owner in owners]}"
    return ""


def _length(node: StoreNode, block: object, key_space: object) -> int:
    assert node.state is not None
    entry = node.state._stock.index.get(key_space, block.hash)  # type: ignore[attr-defined, arg-type]
    assert entry is not None
    return entry.length


def drain_one(cluster: Cluster) -> None:
    """In the calm it becomes safe to stop, what it has is at its owners then, and stopping it costs nothing."""
    node = cluster.rng.choice([node for node in cluster.nodes.values() if node.is_up])
    cluster.log(node.node_id, "DRAIN")
    started = cluster.timeline.now
    asked = node.upkeep.processes.spawn(node.upkeep.drain())

    def not_safe() -> str:
        progress = node.upkeep.handover.drain_progress()
        if asked.value is not True or progress is None:
            return f"{node.node_id} does not drain"
        if progress.safe_to_stop:
            return ""
        return f"{node.node_id} is not safe to stop: {progress}"

    def lacking(*, lost_since: int) -> list[str]:
        """Of what it has, what an owner has neither now nor had at that time: a full one may have given up what it was sent."""
        return [
            f"{owner} lacks {describe(block)}"
            for (key_space, digest), block in cluster.blocks.items()
            if node.holds(key_space, digest)
            for owner in cluster.owners(block)
            if not cluster.nodes[owner].can_give(key_space, digest)
            and cluster.nodes[owner].lost_at.get((key_space, digest), -1) < lost_since
        ]

    end = cluster.timeline.now + _DRAIN_WITHIN
    while (left := not_safe()) and cluster.timeline.now < end:
        cluster.wait(_LOOK_EVERY)
    if left:
        assert lacking(lost_since=cluster.timeline.now + 1), left  # somewhere is no room for it: it can never be safe, and says so
    else:
        progress = node.upkeep.handover.drain_progress()
        missing = lacking(lost_since=started)
        excused = 0 if progress is None else progress.no_room_blocks * cluster.storm.replicas
        assert len(missing) <= excused, f"{node.node_id} said that it is safe to stop, but {missing}"
    node.stop()
    cluster.wait(seconds(15))
    assert not node.is_up
    member = cluster.registry.view.member(node.node_id)
    assert member is not None
    assert member.state is MemberState.LEFT, member.state
    until_converged(cluster)
