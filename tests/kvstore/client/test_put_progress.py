from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.answers import Acknowledge, PutOutcome
from kvstore.client.put_progress import BlockProgress, PutProgress
from kvstore.ids import BlockHash, BlockRef, StripeId

REF = BlockRef(BlockHash(bytes(32)), BlockHash(bytes(32)), StripeId(bytes(32)), 0)


def block(*, stored: int = 0, existed: int = 0, outstanding: int = 0, failed: int = 0) -> BlockProgress:
    return BlockProgress(REF, b"x" * 10, 0, stored=stored, existed=existed, outstanding=outstanding, reasons=["no_room"] * failed)


def test_the_levels_count_replicas() -> None:
    assert [Acknowledge.ONE.replicas_needed(replicas) for replicas in (1, 2, 3)] == [1, 1, 1]
    assert [Acknowledge.QUORUM.replicas_needed(replicas) for replicas in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]
    assert [Acknowledge.ALL.replicas_needed(replicas) for replicas in (1, 2, 3)] == [1, 2, 3]


def test_an_outcome_says_what_is_known_and_no_more() -> None:
    assert block(failed=2).outcome(replicas_needed=1) is PutOutcome.FAILED
    assert block(stored=1, failed=1).outcome(replicas_needed=1) is PutOutcome.DEGRADED
    assert block(stored=1, failed=1).outcome(replicas_needed=2) is PutOutcome.DEGRADED
    assert block(stored=1, outstanding=1).outcome(replicas_needed=1) is PutOutcome.STORED
    assert block(stored=1, existed=1).outcome(replicas_needed=2) is PutOutcome.STORED
    assert block(existed=2).outcome(replicas_needed=2) is PutOutcome.EXISTS
    assert block(existed=1, failed=1).outcome(replicas_needed=1) is PutOutcome.DEGRADED


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from(Acknowledge))
def test_acknowledged_means_that_many_replicas_hold_it(
    stored: int, existed: int, outstanding: int, failed: int, level: Acknowledge
) -> None:
    one = block(stored=stored, existed=existed, outstanding=outstanding, failed=failed)
    needed = level.replicas_needed(max(1, stored + existed + outstanding + failed))
    outcome = one.outcome(replicas_needed=needed)
    if outcome in (PutOutcome.STORED, PutOutcome.EXISTS):
        assert stored + existed >= needed
        assert failed == 0
    if outcome is PutOutcome.FAILED:
        assert stored + existed == 0
    if not one.settled(replicas_needed=needed):
        assert outstanding > 0


def test_bytes_under_way_count_each_replica_once_even_for_a_block_asked_twice() -> None:
    one = block(outstanding=2)
    assert PutProgress([one, one], 1).outstanding_bytes == 20
