from __future__ import annotations

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.gpu import STAGING_BYTES, GpuArena
from kvstore.tiers.tier import TierFailure
from kvstore.units import KIB, Bytes


def test_what_was_written_in_parts_is_read_back_whole_also_across_several_stagings() -> None:
    arena = GpuArena("cpu", Bytes(2 * STAGING_BYTES + 64 * KIB))
    data = bytes(range(251)) * (1 + (STAGING_BYTES + 5 * KIB) // 251)
    arena.write(0, 4096, [data[:100], memoryview(data)[100:]])
    arena.sync(0)
    out = memoryview(bytearray(len(data)))
    arena.read_into(0, 4096, out)
    assert bytes(out) == data
    arena.close()


def test_a_span_outside_the_arena_is_a_failure_and_not_the_bytes_of_a_neighbour() -> None:
    arena = GpuArena("cpu", Bytes(8 * KIB))
    with pytest.raises(TierFailure, match="outside"):
        arena.write(0, 4 * KIB, [bytes(5 * KIB)])
    with pytest.raises(TierFailure, match="outside"):
        arena.read_into(0, 8 * KIB, memoryview(bytearray(1)))


def test_more_than_the_device_has_is_refused_before_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"gpu_capacity is .* cpu has"):
        GpuArena("cpu", Bytes(1 << 50))


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_device 'abacus:0' cannot be used"):
        GpuArena("abacus:0", Bytes(4 * KIB))


def test_a_device_that_keeps_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_device 'meta' cannot be used"):
        GpuArena("meta", Bytes(4 * KIB))
