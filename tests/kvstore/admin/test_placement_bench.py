from __future__ import annotations

import pytest

from kvstore.admin.placement_bench import placement_cost, work_of


def test_placement_for_arrays_is_that_of_the_core_and_moves_the_least() -> None:
    done: list[int] = []
    cost = placement_cost(nodes=40, stripes=20_000, zones=4, replicas=2, on_progress=done.append)
    assert sum(done) == work_of(20_000)
    assert cost.join_moved == pytest.approx(cost.join_least, rel=0.1)
    assert cost.leave_moved == pytest.approx(cost.leave_least, rel=1e-9)
    assert 0.8 < cost.least_loaded <= 1 <= cost.most_loaded < 1.2
