from __future__ import annotations

from pathlib import Path

from kvstore.admin.bench_rows import Row, parted_gaps_ms, percentile
from kvstore.admin.failover_bench import Struck
from kvstore.admin.hit_bench import HitPlan, hit_cluster
from kvstore.admin.stream_client import Stream
from kvstore.admin.write_behind_bench import plain_cluster


def test_a_row_is_judged_by_its_ratio_where_it_stands_beside_something() -> None:
    hit = Row(what="hit", value=50.0, unit="ms", beside=1000.0, most=0.1)
    assert (hit.ratio, hit.met) == (0.05, True)
    assert Row(what="hit", value=150.0, unit="ms", beside=1000.0, most=0.1).met is False
    assert Row(what="notice", value=99.0, unit="ms", most=100).met is True
    cold = Row(what="cold", value=5000.0, unit="ms")
    assert cold.met is None
    assert cold.record() == {"what": "cold", "value": 5000.0, "unit": "ms"}
    assert hit.record()["met"] is True


def test_gaps_are_parted_by_whether_they_touch_a_load() -> None:
    inside, outside = parted_gaps_ms([[0.0, 1.0, 2.0, 3.0], [1.5, 2.5]], [(1.2, 1.4), (2.0, 2.2)])
    assert inside == [1000.0, 1000.0, 1000.0]
    assert outside == [1000.0]
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_a_blow_is_noticed_from_its_instant_on_and_tokens_under_way_do_not_count() -> None:
    stream = Stream(sent_at=0.0, arrivals=[1.0, 2.0, 2.01, 2.3, 2.32], usage={"larder": {"takeover_ms": 200.0}})
    assert Struck(stream, at=2.005).notice_ms == 95.0


def test_the_pool_of_the_hits_has_let_go_of_each_prompt_when_its_turn_comes(tmp_path: Path) -> None:
    plan = HitPlan()
    blocks = -(-plan.prompt_tokens // plan.block_tokens)
    assert blocks <= plan.pool_blocks < (plan.prompts - 1) * (plan.prompt_tokens // plan.block_tokens)
    compute = dict(hit_cluster(plan, folder=tmp_path, model="m", cache_dir=None).compute)
    assert compute["pool_blocks"] == plan.pool_blocks


def test_sealing_is_measured_against_a_node_that_seals_nothing(tmp_path: Path) -> None:
    sealing = hit_cluster(HitPlan(), folder=tmp_path, model="m", cache_dir=None)
    plain = plain_cluster(sealing, folder=tmp_path)
    assert dict(plain.compute) == {**dict(sealing.compute), "seal": False}
    assert (sealing.store_nodes, plain.store_nodes) == (3, 0)
    assert sealing.decode_nodes == plain.decode_nodes == 1
