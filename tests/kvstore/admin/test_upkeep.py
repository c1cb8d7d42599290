from __future__ import annotations

from kvstore.admin import upkeep_tables
from kvstore.admin.render import repair_cell
from kvstore.admin.upkeep import repair_summary, work_of_nobody_else
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId


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
    done = {"safe_to_stop": True, "blocks": 10, "remaining_blocks": 0, "remaining_bytes": 0, "no_room_blocks": 0}
    assert "safe to stop" in repair_cell(store(drain=done))
    assert "it is safe to stop" in upkeep_tables.drain_text({"node_id": "s1", "drain": done})
    assert "of its 10 blocks 3 found no room" in upkeep_tables.drain_text({"node_id": "s1", "drain": done | {"no_room_blocks": 3}})


def test_a_rebalance_says_what_would_move() -> None:
    move = {"node_id": "s2", "stripes": 1, "blocks": 8, "bytes": 8192}
    record = {"dry_run": True, "stripes": 1, "blocks": 8, "bytes": 8192, "surplus_blocks": 0, "surplus_bytes": 0}
    assert upkeep_tables.rebalance_line(record) == "would move: 1 stripes, 8 blocks, 8.0 KiB; surplus: 0 blocks, 0 B"
    table = upkeep_tables.rebalance_table({**record, "nodes": [{"node_id": "s1", "moves": [move]}, {"node_id": "s3", "error": "gone"}]})
    assert table.row_count == 2


def test_a_prefill_or_decode_node_is_drained_without_force_only_if_another_active_one_does_its_work() -> None:
    def member(name: str, role: Role, state: MemberState = MemberState.ACTIVE) -> Member:
        return Member(node_id=NodeId(name), boot_id=BootId(bytes(16)), role=role, address="127.0.0.1:1", state=state)

    decode, prefill, both = member("d1", Role.DECODE), member("p1", Role.PREFILL), member("b1", Role.BOTH)
    leaving = member("d2", Role.DECODE, MemberState.DRAINING)
    alone = View(Epoch(1), (decode, prefill, leaving, member("s1", Role.STORE)))
    assert "decode node" in str(work_of_nobody_else(alone, decode))
    assert "prefill node" in str(work_of_nobody_else(alone, prefill))
    with_both = View(Epoch(2), (decode, prefill, both))
    assert [work_of_nobody_else(with_both, each) for each in (decode, prefill, both)] == [None, None, None]
    assert "decode node" in str(work_of_nobody_else(View(Epoch(3), (both, prefill)), both))
