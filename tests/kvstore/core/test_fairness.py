from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvstore.core.events.removals import EvictRequested
from kvstore.core.events.wishes import AnswerQuota, QuotaRequested
from kvstore.core.eviction import LruPolicy
from kvstore.core.extent import Tier
from kvstore.core.fairness import FairQueue, TierShares
from kvstore.core.index import Entry
from kvstore.core.store_config import StoreConfig
from kvstore.errors import ConfigError
from kvstore.ids import KeySpace, LayoutFingerprint, Namespace
from kvstore.units import Bytes, seconds

PAGE = 4096
SPACES = {name: KeySpace(Namespace(name), LayoutFingerprint(b"L" * 32)) for name in ("a", "b", "c")}


def counts(node) -> dict[str, int]:
    found: dict[str, int] = {}
    for key_space, _ in node.listing():
        found[key_space.namespace] = found.get(key_space.namespace, 0) + 1
    return found


def test_the_namespace_furthest_above_its_share_gives_first_and_its_coldest(host_node: Callable, chain: Callable) -> None:
    node, a, b = host_node(12), SPACES["a"], SPACES["b"]
    node.put(*chain(4, space=b), space=b)
    old, new = chain(4, space=a), chain(4, start=50, space=a)
    node.put(*old, *new, space=a)
    node.put(*chain(4, start=300, space=b), space=b)
    assert counts(node) == {"a": 6, "b": 6}, "b's older blocks are colder, and a had more"
    assert node.present(*old, space=a) == (True, True, False, False)
    assert all(node.present(*new, space=a))


def test_one_namespace_that_scans_does_not_push_the_others_out(host_node: Callable, chain: Callable) -> None:
    node, a, b, c = host_node(12), *SPACES.values()
    for space in (b, c):
        node.put(*chain(4, space=space), space=space)
    for start in range(1000, 9000, 40):
        node.put(*chain(2, start=start, space=a), space=a)
    assert counts(node) == {"a": 4, "b": 4, "c": 4}


def test_weights_set_the_shares(host_node: Callable, chain: Callable) -> None:
    node, a, b = host_node(12, weights={Namespace("a"): 2.0}), SPACES["a"], SPACES["b"]
    for start in range(0, 2000, 40):
        node.put(chain(1, start=start, space=a)[0], space=a)
        node.put(chain(1, start=start, space=b)[0], space=b)
    assert counts(node) == {"a": 8, "b": 4}


def test_who_comes_back_after_its_last_block_went_gives_as_anybody(host_node: Callable, chain: Callable) -> None:
    node, (a, b, c) = host_node(12), SPACES.values()
    for _ in range(3):
        for space in (a, b, c):
            node.put(*chain(2, space=space), space=space)
        node.send(EvictRequested(request_id=node.request(), namespace=b.namespace))
        node.send(EvictRequested(request_id=node.request(), key_space=c))
        node.put(*chain(8, space=b), space=b)
        assert counts(node) == {"a": 2, "b": 8}
        node.put(*chain(4, start=900, space=c), space=c)
        assert counts(node) == {"a": 2, "b": 6, "c": 4}, "the one with the most gave"
        node.send(EvictRequested(request_id=node.request(), everything=True))


def test_shares_hold_on_the_ssd_too(ssd_node: Callable, chain: Callable) -> None:
    node, a, b = ssd_node(4, regions=6, region_pages=16), SPACES["a"], SPACES["b"]
    mine = chain(8, space=b)
    for block in mine:
        node.put(block, space=b)
        node.finish_io()
    for start in range(0, 8000, 40):
        node.put(chain(1, start=start, space=a)[0], space=a)
        node.finish_io()
    on_ssd = [owned.block for key_space, owned in node.listing() if key_space == b and Tier.SSD in owned.tiers]
    assert len(on_ssd) == 8


def test_a_take_asks_the_namespaces_in_the_order_of_their_excess_whatever_came_and_went(chain: Callable, seed: int) -> None:
    rng, shares, policy = Random(seed), TierShares({Namespace("n3"): 3.0}), LruPolicy()
    queue = FairQueue(policy.queue(lambda entry: entry.listed), shares)
    here: list[Entry] = []
    for number in range(1500):
        if rng.random() < 0.6 or not here:
            space = SPACES["a"]._replace(namespace=Namespace(f"n{rng.randrange(12)}"))
            entry = Entry(key_space=space, block=chain(1, start=number * 10, space=space)[0], length=rng.randrange(1, 50), checksum=1)
            entry.listed = True
            policy.listed(entry)
            shares.charge(space.namespace, entry.length)
            queue.offer(entry)
            here.append(entry)
        else:
            most = max(shares.excess(entry.key_space.namespace) for entry in here)
            victim = queue.take()
            assert victim is not None
            assert shares.excess(victim.key_space.namespace) == most
            victim.listed = False
            here.remove(victim)
            shares.charge(victim.key_space.namespace, -victim.length)
    assert len(queue._heap) <= 2 * 12 + 65


def quota(node, name: str, limit: int | None = -1) -> AnswerQuota:
    change = limit != -1
    event = QuotaRequested(
        request_id=node.request(), namespace=Namespace(name), change=change, limit=Bytes(limit) if change and limit is not None else None
    )
    return node.ask(event, AnswerQuota)


def test_a_lowered_quota_takes_what_is_above_it_with_the_next_ticks(host_node: Callable, chain: Callable) -> None:
    node, a, b = host_node(700), SPACES["a"], SPACES["b"]
    node.put(*chain(600, space=a), space=a)
    node.put(*chain(20, space=b), space=b)
    assert quota(node, "a", 10 * PAGE).used == 600 * PAGE
    node.wait(seconds(1))
    assert counts(node)["a"] == 600 - 256, "no event stalls the others for long"
    for _ in range(3):
        node.wait(seconds(1))
    assert counts(node) == {"a": 10, "b": 20}
    assert quota(node, "a").limit == 10 * PAGE
    assert node.present(*chain(600, space=a)[:10], space=a) == (True,) * 10, "suffixes went"


def test_a_quota_that_is_lifted_limits_no_more(host_node: Callable, chain: Callable) -> None:
    node, a = host_node(16, quotas={Namespace("a"): Bytes(2 * PAGE)}), SPACES["a"]
    node.put(*chain(3, space=a), space=a)
    assert counts(node) == {"a": 2}
    assert quota(node, "a", None).limit is None
    node.put(*chain(6, start=100, space=a), space=a)
    assert counts(node) == {"a": 8}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight of namespace"):
        StoreConfig(weights={Namespace("a"): weight})
