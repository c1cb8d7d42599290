from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.chain import chain_of
from kvstore.ids import BlockHash
from prefill_node.engine.block_pool import BlockPool

ROOT = BlockHash(b"r" * 32)
CHAIN = chain_of(list(range(24)), block_tokens=4, root=ROOT)


def _sealed(pool, count):
    blocks = pool.take(count)
    for block, ref in zip(blocks, CHAIN, strict=False):
        pool.list_sealed(block, ref)
    return blocks


def test_taking_more_than_there_is_changes_nothing():
    pool = BlockPool(4)
    assert pool.take(5) is None
    assert pool.available == 4


def test_released_sealed_blocks_are_found_again():
    pool = BlockPool(8)
    blocks = _sealed(pool, 3)
    pool.release(blocks)
    assert pool.available == 8
    assert pool.match(CHAIN) == blocks
    assert pool.available == 5


def test_released_unsealed_blocks_are_not_found():
    pool = BlockPool(8)
    pool.release(pool.take(3))
    assert pool.match(CHAIN) == []


def test_the_end_of_a_chain_is_reused_before_its_head():
    pool = BlockPool(6)
    blocks = _sealed(pool, 6)
    pool.release(blocks)
    pool.take(2)
    assert pool.match(CHAIN) == blocks[:4]


def test_a_second_block_of_the_same_hash_is_not_listed():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.list_sealed(first, CHAIN[0])
    pool.list_sealed(second, CHAIN[0])
    pool.release([second])
    assert pool.match(CHAIN) == [first]
    pool.release([first])
    pool.release([first])
    assert pool.take(4) is not None


def test_forgetting_keeps_what_is_held():
    pool = BlockPool(6)
    blocks = _sealed(pool, 4)
    pool.release(blocks)
    held = pool.match(CHAIN[:2])
    assert pool.forget() == 2
    assert pool.match(CHAIN) == held
    assert pool.available == 4


class AnyUse(RuleBasedStateMachine):
    """Holders take, match, seal and release in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        before = self.pool.available
        blocks = self.pool.take(count)
        assert (blocks is None) == (count > before)
        if blocks:
            self.holders.append(blocks)

    @rule(count=st.integers(1, 6))
    def match(self, count: int) -> None:
        blocks = self.pool.match(CHAIN[:count])
        if blocks:
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        for block, ref in zip(blocks, CHAIN, strict=False):
            self.pool.list_sealed(block, ref)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def references_are_those_of_the_holders(self) -> None:
        counts = [sum(block in holder for holder in self.holders) for block in range(8)]
        assert [self.pool.references(block) for block in range(8)] == counts
        assert self.pool.held == sum(count > 0 for count in counts)


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
