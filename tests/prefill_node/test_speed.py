"""What `kvctl bench engine` measures, on a tiny model: that both sides do the work, not how fast."""

from __future__ import annotations

from prefill_node.speed import EngineSide, SpeedPlan, TransformersSide, measure


def test_both_sides_are_measured_in_turns_and_each_size_has_a_ratio(tiny_folder) -> None:
    plan = SpeedPlan(prefill_tokens=(70,), batches=(1, 3), decode_tokens=6, rounds=2, threads=1)
    folder, steps = tiny_folder("llama"), []
    sides = (EngineSide(folder, "float32", plan), TransformersSide(folder, "float32", plan))
    try:
        rows = measure(sides, plan, vocabulary=512, say=lambda *step: steps.append(step))
    finally:
        for side in sides:
            side.close()
    assert [(row["what"], row["size"]) for row in rows] == [("prefill", 70), ("decode", 1), ("decode", 3)]
    for row in rows:
        assert len(row["larder"]["rounds"]) == len(row["transformers"]["rounds"]) == 2
        assert min(row["larder"]["rounds"]) > 0
        assert row["ratio"] >= 0
    assert steps[-1] == ("decode 3", 3, 3)
