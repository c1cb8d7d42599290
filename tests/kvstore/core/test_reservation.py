from __future__ import annotations

from collections.abc import Callable

from kvstore.core.copies import Copy, CopyState, copy_at
from kvstore.core.extent import Extent, Tier
from kvstore.core.reservation import ReservationTable
from kvstore.ids import Generation
from kvstore.units import Nanos


def copy() -> Copy:
    return copy_at(Extent(Tier.HOST, 0, 0, 1, Generation(1)), CopyState.RESERVED)


def test_a_token_is_spent_once_and_its_key_stays_taken_until_closed(chain: Callable, space) -> None:
    table, (block,) = ReservationTable(timeout=Nanos(10), first_token=5), chain(1)
    opened = table.open(space, block, copy(), ttl=Nanos(0), now=Nanos(0))
    assert table.take_token(opened.token, now=Nanos(9)) is opened
    assert table.take_token(opened.token, now=Nanos(9)) is None
    assert (space, block.hash) in table
    assert table.expired(Nanos(1000)) == [], "what is being committed does not expire"
    table.close(opened)
    assert len(table) == 0


def test_reservations_expire_oldest_first_at_their_time(chain: Callable, space) -> None:
    table = ReservationTable(timeout=Nanos(10), first_token=5)
    opened = [table.open(space, block, copy(), ttl=Nanos(0), now=Nanos(at)) for at, block in enumerate(chain(3))]
    assert table.expired(Nanos(9)) == []
    assert table.expired(Nanos(11)) == opened[:2]
    assert table.take_token(opened[0].token, now=Nanos(10)) is None
    assert len({each.token for each in opened}) == 3
