from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.admin.pd_bench import Arrival, Load, arrivals, save_plot, summary, ways
from kvstore.admin.stream_client import Stream
from kvstore.errors import ConfigError, Unavailable


def test_a_load_is_the_same_for_the_same_seed_and_has_both_kinds_at_their_rates() -> None:
    load = Load(seconds=2000, chats_per_s=0.5, longs_per_s=0.1, seed=3)
    made = arrivals(load)
    assert made == arrivals(load)
    assert made != arrivals(Load(seconds=2000, chats_per_s=0.5, longs_per_s=0.1, seed=4))
    assert [arrival.at_s for arrival in made] == sorted(arrival.at_s for arrival in made)
    longs = [arrival for arrival in made if arrival.long]
    assert 150 < len(longs) < 250
    assert 850 < len(made) - len(longs) < 1150
    assert len({arrival.prompt[:20] for arrival in made}) == len(made)  # nothing to find in a cache
    assert not any(arrival.long for arrival in arrivals(Load(seconds=50, longs_per_s=0)))
    with pytest.raises(ConfigError):
        Load(chats_per_s=0)


def test_the_three_ways_have_the_same_threads_and_store(tmp_path: Path) -> None:
    plans = dict(ways(folder=tmp_path, model="m", cache_dir=None, cores=4))
    assert list(plans) == ["first-come", "two-queues", "two-processes"]
    for plan in plans.values():
        nodes = plan.prefill_nodes + plan.decode_nodes + plan.both_nodes
        assert nodes * int(str(dict(plan.compute)["threads"])) == 4
    assert dict(plans["first-come"].compute)["first_come"] is True
    assert "first_come" not in dict(plans["two-queues"].compute)
    assert plans["two-processes"].both_nodes == 0


def _stream(sent_at: float, arrivals: list[float]) -> Stream:
    return Stream(sent_at=sent_at, arrivals=arrivals, token_ids=[1] * len(arrivals))


def _arrival(*, long: bool) -> Arrival:
    return Arrival(at_s=0, long=long, prompt="p", max_tokens=1)


def test_gaps_are_those_of_chats_and_failures_are_counted(tmp_path: Path) -> None:
    chat = _stream(0.0, [1.0, 1.1, 1.3, 3.0])
    row = summary([(_arrival(long=False), chat), (_arrival(long=True), _stream(1.0, [4.0, 9.0])), (_arrival(long=False), None)])
    assert (row["requests"], row["failed"]) == (3, 1)
    assert row["itl_ms"] == [100.0, 200.0, 1700.0]
    assert row["chat_itl_ms"] == {"p50": 200.0, "p99": 1700.0}
    assert row["chat_ttft_ms"]["p50"] == 1000.0
    assert row["long_ttft_ms"]["p99"] == 3000.0
    assert row["tokens_per_s"] == round(6 / 9, 1)
    plot = tmp_path / "gaps.png"
    save_plot([{"way": "first-come", **row}, {"way": "two-queues", **row}], plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Unavailable):
        summary([(_arrival(long=True), None)])
