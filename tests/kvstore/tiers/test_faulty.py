import pytest

from kvstore.tiers.faulty import Faults, FaultyTier
from kvstore.tiers.host import HostArena
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import KIB, Bytes


@pytest.fixture
def medium():
    arena = HostArena(Bytes(64 * KIB))
    faults = Faults()
    yield FaultyTier(arena, faults), faults
    arena.close()


def read(tier, size):
    out = bytearray(size)
    tier.read_into(0, 0, memoryview(out))
    return bytes(out)


def test_without_faults_it_is_the_wrapped_tier(medium):
    tier, _ = medium
    tier.write(0, 0, [b"ab", b"cd"])
    tier.sync(0)
    assert read(tier, 4) == b"abcd"


@pytest.mark.parametrize(("fault", "reason"), [("failing_reads", FailureReason.IO_ERROR), ("short_reads", FailureReason.SHORT_READ)])
def test_a_failing_read_fails_as_often_as_told_and_then_no_more(medium, fault, reason):
    tier, faults = medium
    tier.write(0, 0, [b"abcd"])
    setattr(faults, fault, 2)
    for _ in range(2):
        with pytest.raises(TierFailure) as caught:
            read(tier, 4)
        assert caught.value.reason is reason
    assert read(tier, 4) == b"abcd"


@pytest.mark.parametrize(("fault", "reason"), [("failing_writes", FailureReason.IO_ERROR), ("full_writes", FailureReason.NO_SPACE)])
def test_a_failing_write_writes_nothing(medium, fault, reason):
    tier, faults = medium
    setattr(faults, fault, 1)
    with pytest.raises(TierFailure) as caught:
        tier.write(0, 0, [b"abcd"])
    assert caught.value.reason is reason
    assert read(tier, 4) == bytes(4)


def test_a_flipped_read_changes_one_bit_and_a_torn_write_half_of_the_bytes(medium):
    tier, faults = medium
    tier.write(0, 0, [b"\0" * 8])
    faults.flipped_reads = 1
    assert sum(byte.bit_count() for byte in read(tier, 8)) == 1
    faults.torn_writes = 1
    tier.write(0, 0, [b"\xff" * 8])
    assert read(tier, 8) == b"\xff" * 4 + bytes(4)


def test_a_failing_sync_fails_once(medium):
    tier, faults = medium
    faults.failing_syncs = 1
    with pytest.raises(TierFailure):
        tier.sync(0)
    tier.sync(0)
