"""Placement at the size of a large cluster: the same function as core/placement.py, for whole arrays of stripes.

How long it takes, how even it is, and how much a join and a leave move beside the least that they must.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.core.placement import node_key, place
from kvstore.core.view import Member, Role, View
from kvstore.ids import BootId, Epoch, NodeId, StripeId

_CHUNK = 256
"""Stripes at a time: a few MB of scores, so that they stay in the cache."""
_CHECKED = 100
_MOVES_OF = 1_000_000
"""Stripes whose moves are counted."""
_SEED = 20260101


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCost:
    nodes: int
    zones: int
    replicas: int
    stripes: int
    seconds: float
    """Of CPU, to place all of them: one core's."""
    call_us: float
    """Of one stripe by `place`, as clients and nodes call it."""
    most_loaded: float
    """Replicas of the fullest node over the mean."""
    least_loaded: float
    join_moved: float
    """Share of all replicas that a join moves."""
    join_least: float
    """What it must: the new node's equal part."""
    leave_moved: float
    leave_least: float
    """What the leaver had."""
    moves_of: int
    """How many stripes the moves were counted of."""


def placement_cost(
    *, nodes: int, stripes: int, zones: int, replicas: int, on_progress: Callable[[int], None] = lambda done: None
) -> PlacementCost:
    """`on_progress` gets stripes placed since the last call; `work_of` of them in all. Each array result is checked against `place` on a
    sample."""
    members = [_store(number, zones) for number in range(nodes + 1)]
    rng = np.random.default_rng(_SEED)
    words = rng.integers(0, 1 << 64, size=stripes, dtype=np.uint64)
    before = _Ring(members[:-1], replicas)
    started = time.process_time()
    owners = before.place(words, on_progress)
    seconds = time.process_time() - started
    _check(before, words, owners)
    counts = np.bincount(owners.ravel(), minlength=nodes)

    few = words[:_MOVES_OF]
    joined = _Ring(members, replicas)
    after_join = joined.place(few, on_progress)
    _check(joined, few, after_join)
    shrunk = _Ring(members[1:-1], replicas)
    after_leave = shrunk.place(few, on_progress) + 1  # the first one left
    return PlacementCost(
        nodes=nodes,
        zones=zones,
        replicas=replicas,
        stripes=stripes,
        seconds=seconds,
        call_us=_call_us(members[:-1], words, replicas),
        most_loaded=float(counts.max() / counts.mean()),
        least_loaded=float(counts.min() / counts.mean()),
        join_moved=_moved(owners[: len(few)], after_join),
        join_least=1 / (nodes + 1),
        leave_moved=_moved(owners[: len(few)], after_leave),
        leave_least=float((owners[: len(few)] == 0).mean()),
        moves_of=len(few),
    )


def work_of(stripes: int) -> int:
    return stripes + 2 * min(stripes, _MOVES_OF)


class _Ring:
    """The stores of one view, zone by zone."""

    def __init__(self, members: list[Member], replicas: int) -> None:
        self.members = members
        self.replicas = replicas
        zones: dict[str, list[int]] = {}
        for number, member in enumerate(members):
            zones.setdefault(member.zone, []).append(number)
        self._order = np.array([number for group in zones.values() for number in group])
        self._keys = np.array([node_key(members[number].node_id) for number in self._order], dtype=np.uint64)
        self._ends = np.cumsum([len(group) for group in zones.values()])
        assert replicas <= len(zones), "a zone a replica: what a cluster of this size has"

    def place(self, words: np.ndarray, on_progress: Callable[[int], None]) -> np.ndarray:
        """(stripes, replicas) of member numbers. All weights are 1, so the logarithm of a score changes no order."""
        owners = np.empty((len(words), self.replicas), dtype=np.int32)
        for start in range(0, len(words), _CHUNK):
            part = words[start : start + _CHUNK]
            scores = _mixed(part[:, None] ^ self._keys[None, :])
            rows = np.arange(len(part))
            best, first = [], 0
            for end in self._ends:
                best.append(first + scores[:, first:end].argmax(axis=1))
                first = end
            of_zone = np.stack(best, axis=1)
            top = np.argsort(scores[rows[:, None], of_zone], axis=1)[:, ::-1][:, : self.replicas]
            owners[start : start + _CHUNK] = self._order[of_zone[rows[:, None], top]]
            on_progress(len(part))
        return owners


def _mixed(words: np.ndarray) -> np.ndarray:
    """As core/placement.py; less its last bits, which a score does not use."""
    words += np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    words >>= np.uint64(11)
    return words


def _check(ring: _Ring, words: np.ndarray, owners: np.ndarray) -> None:
    view = View(Epoch(1), tuple(ring.members))
    for number in range(min(_CHECKED, len(words))):
        by_core = place(_stripe(words[number]), view, replicas=ring.replicas)
        assert by_core == tuple(ring.members[owner].node_id for owner in owners[number]), "not the placement of the core"


def _call_us(members: list[Member], words: np.ndarray, replicas: int) -> float:
    view = View(Epoch(1), tuple(members))
    stripes = [_stripe(word) for word in words[:_CHECKED]]
    started = time.process_time()
    for stripe in stripes:
        place(stripe, view, replicas=replicas)
    return (time.process_time() - started) / len(stripes) * 1e6


def _moved(before: np.ndarray, after: np.ndarray) -> float:
    """Share of replicas that are with a node which had none of the stripe."""
    kept = (after[:, :, None] == before[:, None, :]).any(axis=2)
    return float(1 - kept.mean())


def _stripe(word: np.uint64) -> StripeId:
    return StripeId(int(word).to_bytes(8, "little") + bytes(24))


def _store(number: int, zones: int) -> Member:
    return Member(
        node_id=NodeId(f"store-{number}"),
        boot_id=BootId(bytes(16)),
        role=Role.STORE,
        address="127.0.0.1:1",
        zone=f"zone-{number % zones}",
    )
