from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.events.puts import CommitStatus, ReserveStatus
from kvstore.core.events.regions import RecoveredRegion, RegionsRecovered
from kvstore.core.quota import QuotaLedger
from kvstore.core.store_state import StoreState
from kvstore.ids import BootId, Namespace
from kvstore.units import Bytes

PAGE = 4096


def test_a_namespace_without_a_limit_is_not_limited() -> None:
    ledger = QuotaLedger({Namespace("small"): 10})
    ledger.charge(Namespace("free"), 1000)
    assert ledger.missing(Namespace("free"), 1000) == 0
    ledger.charge(Namespace("small"), 8)
    assert ledger.missing(Namespace("small"), 5) == 3
    assert not ledger.could_ever_fit(Namespace("small"), 11)


def test_a_namespace_at_its_quota_gives_back_its_own_coldest_blocks_and_nobody_elses(host_node: Callable, chain: Callable, space) -> None:
    node = host_node(16, quotas={space.namespace: Bytes(3 * PAGE)})
    other = space._replace(namespace=Namespace("other"))
    neighbours = chain(4, space=other)
    node.put(*neighbours, space=other)
    mine = chain(3)
    node.put(*mine)
    node.put(*chain(2, start=70))
    assert node.present(*mine) == (True, False, False)
    assert all(node.present(*neighbours, space=other))
    assert node.state.status().counters["evicted:quota"] == 2


def test_quota_is_the_answer_when_everything_of_the_namespace_is_leased_or_the_payload_alone_is_too_big(
    host_node: Callable, chain: Callable, space
) -> None:
    node = host_node(16, quotas={space.namespace: Bytes(2 * PAGE)})
    mine = chain(2)
    assert node.put(*mine) == [CommitStatus.STORED] * 2
    node.acquire(*mine)
    assert node.put(chain(1, start=70)[0]) == [ReserveStatus.QUOTA]
    assert node.put(chain(1, start=80)[0], size=3 * PAGE) == [ReserveStatus.QUOTA]


def test_reservations_count_and_give_back_what_they_took(host_node: Callable, chain: Callable, space) -> None:
    node = host_node(16, quotas={space.namespace: Bytes(2 * PAGE)})
    node.reserve(*chain(2))
    assert node.reserve(chain(1, start=70)[0]).grants[0].status is ReserveStatus.QUOTA
    node.wait(31 * 10**9)
    assert node.reserve(chain(1, start=70)[0]).grants[0].status is ReserveStatus.GRANTED


@pytest.mark.parametrize("limit", [None, 2 * PAGE])
def test_a_restart_evicts_nothing_whatever_its_quota_table_says(ssd_node: Callable, chain: Callable, space, limit: int | None) -> None:
    """An empty table wipes no tenant; a smaller quota is paid by the tenant's next put, with its own blocks."""
    other = space._replace(namespace=Namespace("other"))
    before, mine, theirs = ssd_node(8, quotas={space.namespace: Bytes(100 * PAGE)}), chain(4), chain(3, space=other)
    before.put(*mine)
    before.put(*theirs, space=other)
    before.finish_io()
    regions = before.state._stock.regions
    found = tuple(
        RecoveredRegion(region.number, region.header.sequence, region.header.nonce, True, tuple(regions.footer_records(region)))
        for region in regions
        if region.header is not None
    )
    after = ssd_node(8, boot=2, quotas={} if limit is None else {space.namespace: Bytes(limit)})
    after.state = StoreState(after.state._stock.config, boot_id=BootId(b"2" * 16))
    after.send(RegionsRecovered(regions=found))
    assert not [note for note in after.notes() if note.startswith("evicted")]
    assert all(after.present(*mine))
    assert all(after.present(*theirs, space=other))
    after.put(chain(1, start=70)[0])
    assert all(after.present(*theirs, space=other)), "nobody else pays"
    assert sum(after.present(*mine)) == (4 if limit is None else 1)
