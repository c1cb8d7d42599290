from __future__ import annotations

import pytest

from kvstore.admin.bench_worker import chain_of
from kvstore.admin.kill_bench import KillPlan
from kvstore.admin.kill_load import Oracle, Phase, joined
from kvstore.errors import ConfigError
from kvstore.units import MIB, Bytes


def test_the_oracle_knows_each_byte_of_each_block_and_no_other_payload() -> None:
    oracle = Oracle(4096, seed=1)
    first, second = chain_of("a", 2)
    payload = oracle.payload(first)
    assert len(payload) == 4096
    assert payload == Oracle(4096, seed=1).payload(first) != oracle.payload(second)
    assert oracle.knows(first, memoryview(payload))
    assert not oracle.knows(second, memoryview(payload))
    for at in (0, 31, 32, 4095):
        flipped = bytearray(payload)
        flipped[at] ^= 1
        assert not oracle.knows(first, memoryview(flipped))
    assert not oracle.knows(first, memoryview(payload[:-1]))


def test_two_stretches_of_time_are_counted_as_one() -> None:
    unnoticed = Phase(seconds=2.0, gets_ms=[1.0, 2.0], failed_reads=1)
    repair = Phase(seconds=1.0, gets_ms=[4.0], puts_ms=[5.0], wrong_bytes=2, degraded_puts=1)
    record = joined([unnoticed, repair]).as_record("during")
    assert (record["phase"], record["seconds"], record["reads"], record["puts"]) == ("during", 3.0, 3, 1)
    assert (record["failed_reads"], record["wrong_bytes"], record["degraded_puts"]) == (1, 2, 1)
    assert (record["read_p50_ms"], record["read_p99_ms"], record["put_p99_ms"]) == (2.0, 4.0, 5.0)


def test_the_nodes_that_are_left_after_the_kill_have_room_for_everything() -> None:
    for nodes, replicas in ((3, 2), (4, 2), (8, 3)):
        plan = KillPlan(nodes=nodes, replicas=replicas)
        assert plan.node_capacity * (nodes - 1) > 1.3 * replicas * plan.chains * plan.chain_blocks * plan.block_bytes


@pytest.mark.parametrize(
    "wrong", [{"nodes": 2}, {"replicas": 1}, {"total_bytes": Bytes(MIB)}, {"transport": "ucx"}, {"ops_per_s": 0}, {"put_share": 1.0}]
)
def test_a_plan_that_shows_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        KillPlan(**wrong)  # type: ignore[arg-type]
