from __future__ import annotations

from collections.abc import Callable

from kvstore.core.eviction import LruPolicy
from kvstore.core.index import Entry
from kvstore.ids import BlockRef, KeySpace


def entries_of(blocks: tuple[BlockRef, ...], space: KeySpace) -> list[Entry]:
    return [Entry(key_space=space, block=block, length=1, checksum=1) for block in blocks]


def test_the_least_recently_used_goes_first_and_of_one_use_the_end_of_the_chain(chain: Callable, space: KeySpace) -> None:
    policy = LruPolicy()
    queue = policy.queue(lambda entry: True)()
    first, second = entries_of(chain(3), space), entries_of(chain(2, start=50), space)
    policy.used(first)
    policy.used(second)
    for entry in first + second:
        queue.offer(entry)
    policy.used(first[:1])
    order = [queue.take() for _ in range(5)]
    assert order == [first[2], first[1], second[1], second[0], first[0]]
    assert queue.take() is None


def test_what_may_not_go_is_dropped_until_offered_again(chain: Callable, space: KeySpace) -> None:
    policy = LruPolicy()
    queue = policy.queue(lambda entry: entry.leases == 0)()
    one, two = entries_of(chain(2), space)
    policy.used([one, two])
    two.leases = 1
    queue.offer(one)
    queue.offer(two)
    assert queue.take() is one
    assert queue.take() is None
    two.leases = 0
    queue.offer(two)
    queue.offer(two)
    assert queue.take() is two
    assert queue.take() is None


def test_puts_and_deletes_without_any_eviction_do_not_grow_the_queue(chain: Callable, space: KeySpace) -> None:
    policy = LruPolicy()
    queue = policy.queue(lambda entry: entry.listed)()
    for start in range(5000):
        (entry,) = entries_of(chain(1, start=start), space)
        policy.used([entry])
        entry.listed = True
        queue.offer(entry)
        entry.listed = False
        queue.discard(entry)
    assert len(queue._heap) <= 200
