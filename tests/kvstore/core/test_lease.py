from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.index import Entry
from kvstore.core.lease import LeaseConfig, LeaseTable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, LeaseId, Namespace, StripeId
from kvstore.units import Nanos

SPACE = KeySpace(Namespace("n"), LayoutFingerprint(b"l" * 32))
OTHER_SPACE = KeySpace(Namespace("other"), SPACE.layout)
CONFIG = LeaseConfig(ttl=Nanos(10), max_ttl=Nanos(30), max_lifetime=Nanos(100), max_leases=8, max_leased_blocks=20, max_read=Nanos(5))


def entry(number: int) -> Entry:
    hashed = BlockHash(bytes([number]) * 32)
    return Entry(key_space=SPACE, block=BlockRef(hash=hashed, parent=hashed, stripe=StripeId(hashed), index=0), length=1, checksum=1)


class LeasesAgainstAModel(RuleBasedStateMachine):
    """The model: lease id -> (end, latest end, hashes)."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = [entry(number) for number in range(6)]
        self.table = LeaseTable(CONFIG, first_id=1)
        self.model: dict[LeaseId, list] = {}
        self.ids: list[LeaseId] = [LeaseId(999)]
        self.now = Nanos(0)

    def live(self) -> dict[LeaseId, list]:
        return {lease: state for lease, state in self.model.items() if state[0] > self.now}

    @rule(which=st.lists(st.integers(0, 5), min_size=1, max_size=8), ttl=st.sampled_from([None, 0, 5, 25, 500]))
    def grant(self, which: list[int], ttl: int | None) -> None:
        granted = self.table.grant(SPACE, [self.entries[number] for number in which], ttl=None if ttl is None else Nanos(ttl), now=self.now)
        blocks = sum(len(state[2]) for state in self.model.values())
        if len(self.model) >= CONFIG.max_leases or blocks + len(set(which)) > CONFIG.max_leased_blocks:
            assert granted is None
            return
        assert granted is not None
        lease, got = granted
        assert got == min(ttl or 10, 30)
        assert lease not in self.ids
        self.ids.append(lease)
        self.model[lease] = [self.now + got, self.now + 100, {self.entries[number].hash for number in which}]

    @rule(pick=st.integers(0, 100), which=st.none() | st.lists(st.integers(0, 5), max_size=4), foreign=st.booleans())
    def release(self, pick: int, which: list[int] | None, foreign: bool) -> None:
        """Often a lease that is over, of another key space, or blocks that were released before: harmless."""
        lease = self.ids[pick % len(self.ids)]
        hashes = None if which is None else [self.entries[number].hash for number in which]
        self.table.release(lease, OTHER_SPACE if foreign else SPACE, hashes)
        if not foreign and lease in self.model:
            self.model[lease][2] -= self.model[lease][2].copy() if hashes is None else set(hashes)
            if not self.model[lease][2]:
                del self.model[lease]

    @rule(pick=st.integers(0, 100), ttl=st.sampled_from([None, 3, 29, 1000]))
    def renew(self, pick: int, ttl: int | None) -> None:
        lease = self.ids[pick % len(self.ids)]
        left = self.table.renew(lease, ttl=None if ttl is None else Nanos(ttl), now=self.now)
        state = self.live().get(lease)
        if state is None:
            assert left == 0
            return
        state[0] = max(state[0], min(self.now + min(ttl or 10, 30), state[1]))
        assert left == state[0] - self.now

    @rule(turns=st.integers(1, 5))
    def readers_renew_for_long(self, turns: int) -> None:
        """Up to the longest life of a lease."""
        for _ in range(turns):
            self.time_goes_by(25, sweep=True)
            for pick in range(len(self.ids)):
                self.renew(pick, 1000)

    @rule(by=st.integers(0, 15), sweep=st.booleans())
    def time_goes_by(self, by: int, sweep: bool) -> None:
        self.now = Nanos(self.now + by)
        if sweep:
            self.table.expire(self.now)
            self.model = self.live()

    @invariant()
    def counts_are_those_of_the_model_and_never_negative(self) -> None:
        for known in self.entries:
            assert known.leases == sum(known.hash in state[2] for state in self.model.values())
        assert len(self.table) == len(self.model)

    @invariant()
    def a_lease_covers_its_blocks_to_its_end_and_not_longer(self) -> None:
        live = self.live()
        for lease in self.ids:
            for known in self.entries:
                covered = self.table.entry(lease, SPACE, known.hash, now=self.now) is known
                assert covered == (lease in live and known.hash in live[lease][2])


LeasesAgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLeasesAgainstAModel = LeasesAgainstAModel.TestCase


def test_a_lease_says_nothing_about_another_key_space() -> None:
    table = LeaseTable(CONFIG, first_id=1)
    known = entry(1)
    granted = table.grant(SPACE, [known], ttl=None, now=Nanos(0))
    assert granted is not None
    assert table.entry(granted[0], OTHER_SPACE, known.hash, now=Nanos(0)) is None
