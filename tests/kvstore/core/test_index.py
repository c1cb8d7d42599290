from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.index import Entry, Index
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId

SPACES = [KeySpace(Namespace(name), LayoutFingerprint(b"l" * 32)) for name in "ab"]
ROOT = BlockHash(b"r" * 32)


def block(number: int) -> BlockRef:
    """Number n follows n // 2: a binary tree under the root, so that blocks have several children."""
    parent = ROOT if number == 1 else BlockHash(bytes([number // 2]) * 32)
    return BlockRef(
        hash=BlockHash(bytes([number]) * 32), parent=parent, stripe=StripeId(bytes([number // 8]) * 32), index=number.bit_length() - 1
    )


def entry(space: KeySpace, number: int) -> Entry:
    return Entry(key_space=space, block=block(number), length=number, checksum=number)


class IndexAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[tuple[KeySpace, int], Entry] = {}

    @rule(space=st.sampled_from(SPACES), number=st.integers(1, 31))
    def add_or_remove(self, space: KeySpace, number: int) -> None:
        known = self.model.pop((space, number), None)
        if known is None:
            added = entry(space, number)
            self.index.add(added)
            self.model[space, number] = added
            return
        childless = self.index.remove(known)
        assert not known.listed
        parent = self.model.get((space, number // 2))
        siblings = self.model.get((space, number ^ 1))
        assert childless is (parent if parent is not None and (siblings is None or number == 1) else None)

    @rule(space=st.sampled_from(SPACES), asked=st.lists(st.integers(1, 31), max_size=12))
    def leading_runs(self, space: KeySpace, asked: list[int]) -> None:
        found = self.index.leading_runs(space, [block(number) for number in asked])
        for at, number in enumerate(asked):
            before = [other for other in asked[: at + 1] if other // 8 == number // 8]
            expected = self.model[space, number] if all((space, other) in self.model for other in before) else None
            assert found[at] is expected

    @invariant()
    def each_entry_knows_how_many_children_it_has(self) -> None:
        assert len(self.index) == len(self.model)
        assert set(self.index) == set(self.model.values())
        for (space, number), known in self.model.items():
            assert self.index.get(space, known.hash) is known
            assert known.listed
            assert known.children == sum((space, child) in self.model for child in (2 * number, 2 * number + 1))


IndexAgainstADict.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestIndexAgainstADict = IndexAgainstADict.TestCase


def test_two_tenants_never_see_each_others_blocks() -> None:
    index = Index()
    index.add(entry(SPACES[0], 1))
    assert index.get(SPACES[1], block(1).hash) is None
    assert index.leading_runs(SPACES[1], [block(1)]) == [None]


def test_neighbours_share_the_hashes_they_have_in_common(chain: Callable[..., tuple[BlockRef, ...]]) -> None:
    index = Index()
    for ref in chain(3):
        copied = BlockRef(*[bytes(bytearray(part)) if isinstance(part, bytes) else part for part in ref])  # as if from three requests
        index.add(Entry(key_space=SPACES[0], block=copied, length=1, checksum=1))
    first, second, third = index
    assert second.parent is first.hash
    assert third.parent is second.hash
    assert first.stripe is first.hash
    assert third.stripe is second.stripe is first.stripe
