from __future__ import annotations

from kvstore.admin import upkeep_tables
from kvstore.admin.render import repair_cell
from kvstore.admin.upkeep import repair_summary


def store(*, waiting: int = 0, endangered: int = 0, size: int = 0, eta_ms: int = 0, drain: dict | None = None) -> dict:
    repair = {"waiting_stripes": waiting, "endangered_stripes": endangered, "waiting_blocks": 8 * waiting, "waiting_bytes": size}
    return {"node_id": "s1", "repair": {**repair, "bytes_per_s": 1 << 20, "eta_ms": eta_ms}, "drain": drain}


def test_the_cluster_owes_what_its_nodes_owe_and_is_done_when_the_last_one_is() -> None:
    nodes = [
        store(waiting=2, endangered=1, size=3 << 20, eta_ms=3000),
        store(waiting=1, size=1 << 20, eta_ms=61_000),
        {"error": "no answer"},
    ]
    summary = repair_summary(nodes)
    assert (summary["under_replicated_stripes"], summary["endangered_stripes"], summary["eta_ms"]) == (3, 1, 61_000)
    line = upkeep_tables.repair_line(summary)
    assert "3 stripes short of a copy, 1 of them down to the last, 4.0 MiB to go at 2.0 MiB/s, about 1m01s" in line
    assert "where it should be" in upkeep_tables.repair_line(repair_summary([store()]))


def test_a_node_says_in_a_few_words_what_it_is_at() -> None:
    half = {"safe_to_stop": False, "blocks": 10, "remaining_blocks": 4, "remaining_bytes": 40}
    assert repair_cell(store()) == ""
    assert repair_cell(store(waiting=1, size=2048, eta_ms=1)) == "sends 2.0 KiB, 0m01s left"
    assert repair_cell(store(drain=half)) == "drains: 4 of 10 blocks left"
    assert "do not stop it" in upkeep_tables.drain_text({"node_id": "s1", "drain": half})
    done = {"safe_to_stop": True, "blocks": 10, "remaining_blocks": 0, "remaining_bytes": 0}
    assert "safe to stop" in repair_cell(store(drain=done))
    assert "it is safe to stop" in upkeep_tables.drain_text({"node_id": "s1", "drain": done})


def test_a_rebalance_says_what_would_move() -> None:
    move = {"node_id": "s2", "stripes": 1, "blocks": 8, "bytes": 8192}
    record = {"dry_run": True, "stripes": 1, "blocks": 8, "bytes": 8192, "surplus_blocks": 0, "surplus_bytes": 0}
    assert upkeep_tables.rebalance_line(record) == "would move: 1 stripes, 8 blocks, 8.0 KiB; surplus: 0 blocks, 0 B"
    table = upkeep_tables.rebalance_table({**record, "nodes": [{"node_id": "s1", "moves": [move]}, {"node_id": "s3", "error": "gone"}]})
    assert table.row_count == 2
