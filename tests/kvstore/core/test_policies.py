from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvstore.core.eviction import EvictionPolicy, EvictionQueue
from kvstore.core.ghost import GhostList
from kvstore.core.index import Entry
from kvstore.core.policies import PolicyName, make_policy
from kvstore.core.two_hit import MOST_SHARE, TwoHitPolicy
from kvstore.ids import BlockHash, BlockRef, KeySpace

CAPACITY = 20


class Shelf:
    """A cache of CAPACITY blocks without chains: what the policy alone would do."""

    def __init__(self, policy: EvictionPolicy, space: KeySpace) -> None:
        self.policy = policy
        self.space = space
        self.entries: dict[int, Entry] = {}
        self.queue: EvictionQueue = policy.queue(lambda entry: entry.listed)()

    def ask(self, number: int) -> bool:
        entry = self.entries.get(number)
        if entry is not None:
            self.policy.used([entry])
            self.queue.offer(entry)
            return True
        if len(self.entries) == CAPACITY:
            victim = self.queue.take()
            assert victim is not None
            victim.listed = False
            del self.entries[victim.index]
            self.policy.unlisted(victim, evicted=True)
        digest = BlockHash(Random(number).randbytes(32))
        block = BlockRef(hash=digest, parent=digest, stripe=digest, index=number)
        entry = self.entries[number] = Entry(key_space=self.space, block=block, length=1, checksum=1)
        entry.listed = True
        self.policy.listed(entry)
        self.queue.offer(entry)
        return False


@pytest.mark.parametrize("name", list(PolicyName))
def test_every_policy_gives_each_candidate_exactly_once(name: PolicyName, space: KeySpace) -> None:
    shelf = Shelf(make_policy(name), space)
    rng = Random(3)
    for _ in range(2000):
        shelf.ask(rng.randrange(60))
    taken = [shelf.queue.take() for _ in range(CAPACITY)]
    assert {entry.index for entry in taken if entry is not None} == set(shelf.entries)
    assert shelf.queue.take() is None


@pytest.mark.parametrize("name", [PolicyName.S3FIFO, PolicyName.ADAPTIVE])
def test_a_long_scan_does_not_push_out_what_was_asked_for_twice(name: PolicyName, space: KeySpace) -> None:
    shelf = Shelf(make_policy(name), space)
    for _ in range(4):
        for number in range(10):
            shelf.ask(number)
    for number in range(1000, 1300):
        shelf.ask(number)
    assert sum(number in shelf.entries for number in range(10)) == 10


def test_a_long_scan_pushes_everything_out_of_lru(space: KeySpace) -> None:
    shelf = Shelf(make_policy(PolicyName.LRU), space)
    for number in [*range(10), *range(10), *range(1000, 1300)]:
        shelf.ask(number)
    assert not any(number in shelf.entries for number in range(10))


def test_a_block_that_comes_back_soon_after_its_eviction_is_proven(space: KeySpace) -> None:
    shelf = Shelf(TwoHitPolicy(), space)
    for number in range(CAPACITY + 5):
        shelf.ask(number)
    gone = next(number for number in range(CAPACITY + 5) if number not in shelf.entries)
    shelf.ask(gone)
    for number in range(100, 160):
        shelf.ask(number)
    assert gone in shelf.entries


def test_probation_grows_when_it_let_go_of_what_returns_and_not_beyond_its_bound(space: KeySpace) -> None:
    policy = TwoHitPolicy()
    shelf = Shelf(policy, space)
    before = policy._share
    for number in range(CAPACITY + 5):
        shelf.ask(number)
    for number in [one for one in range(CAPACITY + 5) if one not in shelf.entries]:
        shelf.ask(number)
    assert before < policy._share <= MOST_SHARE


def test_deleted_blocks_are_no_ghosts(space: KeySpace) -> None:
    policy = TwoHitPolicy()
    shelf = Shelf(policy, space)
    for number in range(5):
        shelf.ask(number)
    entry = shelf.entries.pop(3)
    entry.listed = False
    policy.unlisted(entry, evicted=False)
    shelf.ask(3)
    assert shelf.entries[3].segment == 0


def test_a_ghost_is_recalled_once_and_only_while_it_is_among_the_last(chain: Callable) -> None:
    ghosts = GhostList()
    blocks = [block.hash for block in chain(300)]
    for block in blocks:
        ghosts.remember(block, limit=100)
    assert ghosts.recall(blocks[-1], limit=100)
    assert not ghosts.recall(blocks[-1], limit=100)
    assert not ghosts.recall(blocks[0], limit=100)
    young = sum(ghosts.recall(block, limit=100) for block in blocks[200:-1])
    assert young >= 85, "a bucket forgets a few early, no more"


def test_a_ghost_list_that_grew_still_knows_its_ghosts(chain: Callable) -> None:
    ghosts = GhostList()
    blocks = [block.hash for block in chain(2000)]
    for number, block in enumerate(blocks):
        ghosts.remember(block, limit=number + 1)
    assert sum(ghosts.recall(block, limit=2000) for block in blocks) > 1800
