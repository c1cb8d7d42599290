from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from prefill_node.engine.request import SamplingParams
from prefill_node.engine.sampler import sample, uniform

GOLDEN = [0.6524484863740322, 0.36818951565166946, 0.49050645623222144, 0.07565152216319326]


def _draws(logits, count=4000, **params):
    return np.bincount([sample(logits, SamplingParams(seed=3, **params), position=i) for i in range(count)], minlength=len(logits)) / count


def test_the_generator_has_golden_values():
    """A change here changes every sampled answer in the middle of a failover between versions."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(2**64 - 1, 10**6)] == pytest.approx(GOLDEN, abs=0)


def test_the_generator_is_flat():
    values = np.array([uniform(11, position) for position in range(20000)])
    histogram, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(values.mean() - 0.5) < 0.01
    assert histogram.min() > 850


def test_neighbouring_seeds_and_positions_are_unrelated():
    a = np.array([uniform(5, p) for p in range(5000)])
    b = np.array([uniform(6, p) for p in range(5000)])
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05


def test_greedy_takes_the_smallest_id_of_equals():
    assert sample(np.array([0.0, 2.0, 2.0], np.float32), SamplingParams(), position=0) == 1


def test_frequencies_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert np.abs(_draws(logits, temperature=1.0) - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_a_low_temperature_sharpens():
    logits = np.log(np.array([0.6, 0.4], np.float32))
    assert _draws(logits, temperature=0.1)[0] > 0.97


def test_top_k_keeps_the_k_largest():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    seen = _draws(logits, temperature=1.0, top_k=2)
    assert seen[0] == seen[2] == 0
    assert abs(seen[1] - 4 / 7) < 0.03


def test_top_p_keeps_the_token_that_crosses_the_line_and_none_after():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    seen = _draws(logits, temperature=1.0, top_p=0.5)
    assert seen[0] == seen[2] == 0
    assert abs(seen[1] - 4 / 7) < 0.03


def test_top_p_over_a_flat_large_vocabulary_needs_more_than_the_sorted_head():
    logits = np.zeros(5000, np.float32)
    drawn = {sample(logits, SamplingParams(temperature=1.0, top_p=0.9, seed=1), position=i) for i in range(300)}
    assert max(drawn) > 3000
    assert max(drawn) < 4501


def test_a_draw_depends_on_seed_and_position_only():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=42)
    before = logits.copy()
    assert sample(logits, params, position=9) == sample(logits, params, position=9)
    assert np.array_equal(before, logits)
    assert len({sample(logits, params, position=i) for i in range(50)}) > 10


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.5}])
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(InvalidRequest, match="must be"):
        SamplingParams(**bad)
