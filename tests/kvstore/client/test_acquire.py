from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.acquire import PrefixSearch
from kvstore.client.config import ClientConfig
from kvstore.client.routing import Router
from kvstore.core.view import Member, Role, View
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, NodeId, StripeId
from kvstore.units import Nanos

BLOCKS_PER_STRIPE = 4


def chain(blocks: int) -> list[BlockRef]:
    hashes = [BlockHash(hashlib.sha256(bytes([index])).digest()) for index in range(blocks + 1)]
    return [
        BlockRef(hashes[index + 1], hashes[index], StripeId(hashes[index // BLOCKS_PER_STRIPE * BLOCKS_PER_STRIPE + 1]), index)
        for index in range(blocks)
    ]


def router(stores: int, replicas: int) -> Router:
    one = Router(replicas=replicas, config=ClientConfig())
    members = tuple(
        Member(node_id=NodeId(f"s{number}"), boot_id=BootId(bytes(16)), role=Role.STORE, address=f"h:{number}") for number in range(stores)
    )
    one.see(View(Epoch(1), members), Nanos(0))
    return one


def test_what_the_first_replica_has_is_asked_of_nobody_else() -> None:
    refs = chain(12)
    search: PrefixSearch[bool] = PrefixSearch(refs, router(3, 2))
    asks = search.next_round()
    assert sorted(position for positions in asks.values() for position in positions) == list(range(12))
    for positions in asks.values():
        search.note(positions, [True] * len(positions))
    assert search.next_round() == {}
    assert search.run_length == 12


def test_stripes_behind_one_that_nobody_has_are_not_asked_again() -> None:
    refs = chain(12)
    search: PrefixSearch[bool] = PrefixSearch(refs, router(1, 1))
    for positions in search.next_round().values():
        search.note(positions, [position >= 4 or None for position in positions])
    assert search.next_round() == {}
    assert search.run_length == 0


@given(
    blocks=st.integers(0, 20),
    stores=st.integers(1, 4),
    replicas=st.integers(1, 3),
    data=st.data(),
)
def test_the_run_is_the_longest_that_the_readers_hold_together(blocks: int, stores: int, replicas: int, data: st.DataObject) -> None:
    refs = chain(blocks)
    one = router(stores, replicas)
    holds = {NodeId(f"s{number}"): data.draw(st.sets(st.integers(0, 19))) for number in range(stores)}
    down = data.draw(st.sets(st.sampled_from(sorted(holds))))
    search: PrefixSearch[bool] = PrefixSearch(refs, one)
    rounds = 0
    while asks := search.next_round():
        rounds += 1
        for node_id, positions in asks.items():
            if node_id not in down:
                search.note(positions, leading_runs(refs, positions, holds[node_id]))
    expected = 0
    for ref in refs:
        if not any(ref.index in holds[node_id] and node_id not in down for node_id in one.readers(ref.stripe)):
            break
        expected += 1
    assert search.run_length == expected
    assert rounds <= max(1, replicas) + BLOCKS_PER_STRIPE


def leading_runs(refs: Sequence[BlockRef], positions: Sequence[int], held: set[int]) -> list[bool | None]:
    """As a node answers: of each stripe the leading run of what is asked."""
    broken = set()
    answers: list[bool | None] = []
    for position in positions:
        if position not in held:
            broken.add(refs[position].stripe)
        answers.append(True if refs[position].stripe not in broken else None)
    return answers


def test_a_replica_is_asked_again_for_what_lay_behind_a_hole_that_another_one_filled() -> None:
    refs, one = chain(8), router(2, 2)
    holds = dict(zip(one.readers(refs[0].stripe), ({0, 1, 3, 4, 6, 7}, {2, 5}), strict=True))
    search: PrefixSearch[bool] = PrefixSearch(refs, one)
    while asks := search.next_round():
        for node_id, positions in asks.items():
            search.note(positions, leading_runs(refs, positions, holds[node_id]))
    assert search.run_length == 8
