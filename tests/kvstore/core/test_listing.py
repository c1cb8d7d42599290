from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kvstore.core.events.questions import AnswerList, ListRequested
from kvstore.core.events.removals import DeleteRequested
from kvstore.core.extent import Tier
from kvstore.ids import Namespace


@pytest.mark.parametrize("at_most", [1, 2, 1024])
def test_a_walk_names_every_readable_block_by_key_space(host_node: Callable, chain: Callable, space, at_most: int) -> None:
    node, other = host_node(8), space._replace(namespace=Namespace("other"))
    node.put(*chain(2))
    node.put(*chain(1, space=other), space=other)
    node.reserve(chain(3)[2])
    expected = Counter([(space, block) for block in chain(2)] + [(other, block) for block in chain(1, space=other)])
    found = node.listing(at_most=at_most)
    assert Counter((key_space, owned.block) for key_space, owned in found) == expected
    assert {owned.tiers for _, owned in found} == {(Tier.HOST,)}


def test_no_step_of_a_walk_is_larger_than_asked_and_an_empty_node_has_one(host_node: Callable, chain: Callable) -> None:
    node = host_node(64)
    assert node.listing() == []
    node.put(*chain(50))
    cursor, steps = None, []
    while not steps or cursor is not None:
        answer = node.ask(ListRequested(request_id=node.request(), cursor=cursor, at_most=8), AnswerList)
        steps.append(len(answer.blocks))
        cursor = answer.cursor
    assert steps == [8] * 6 + [2]


def test_a_walk_names_what_stays_once_whatever_comes_and_goes_meanwhile(host_node: Callable, chain: Callable, space) -> None:
    node, stays, goes, comes = host_node(64), chain(20), chain(20, start=200), chain(20, start=400)
    for one, other in zip(stays, goes, strict=True):
        node.put(one, other)
    cursor, found = None, Counter()
    for turn in range(100):
        answer = node.ask(ListRequested(request_id=node.request(), cursor=cursor, at_most=3), AnswerList)
        found.update(owned.block.hash for owned in answer.blocks)
        cursor = answer.cursor
        if cursor is None:
            break
        node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(goes[19 - turn].hash,)))
        node.put(comes[turn])
    assert [found[block.hash] for block in stays] == [1] * 20
    assert found[goes[19].hash] == 0
