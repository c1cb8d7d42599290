from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidRequest
from prefill_node.engine.request import SamplingParams
from prefill_node.engine.sampler import logprobs, sample, uniform

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


def test_min_p_leaves_out_what_is_much_less_likely_than_the_likeliest():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    seen = _draws(logits, temperature=1.0, min_p=0.5)
    assert seen[2] == seen[3] == 0
    assert abs(seen[0] - 5 / 8) < 0.03
    both = _draws(logits, temperature=1.0, min_p=0.2, top_k=2)
    assert both[2] == 0
    assert abs(both[0] - 5 / 8) < 0.03


def _greedy(logits, prompt=(), answer=(), **params):
    row = np.array(logits, np.float32)
    return sample(row, SamplingParams(**params), position=9, prompt=prompt, answer=answer)


def test_a_bias_can_forbid_and_force_a_token():
    assert _greedy([1, 5, 2], logit_bias=((1, -100.0),)) == 2
    assert _greedy([1, 5, 2], logit_bias=((0, 100.0),)) == 0
    assert _draws(np.zeros(3, np.float32), temperature=1.0, logit_bias=((1, -100.0),))[1] == 0


def test_presence_counts_once_and_frequency_each_time_in_the_answer_only():
    assert _greedy([3.0, 2.0, 0.0], answer=[0, 0, 0], presence_penalty=0.9) == 0
    assert _greedy([3.0, 2.0, 0.0], answer=[0], presence_penalty=1.1) == 1
    assert _greedy([3.0, 2.0, 0.0], answer=[0, 0], frequency_penalty=0.6) == 1
    assert _greedy([3.0, 2.0, 0.0], answer=[0], frequency_penalty=0.6) == 0
    assert _greedy([3.0, 2.0, 0.0], prompt=[0, 0, 0], presence_penalty=2.0, frequency_penalty=2.0) == 0
    assert _greedy([3.0, 2.0, 0.0], answer=[2, 2], frequency_penalty=-2.0) == 2


def test_repetition_shrinks_positive_logits_and_lowers_negative_ones_of_prompt_and_answer():
    assert _greedy([3.0, 2.0], prompt=[0], repetition_penalty=2.0) == 1
    assert _greedy([3.0, 2.0], answer=[0], repetition_penalty=2.0) == 1
    assert _greedy([-1.0, -1.5], answer=[0], repetition_penalty=2.0) == 1
    assert _greedy([3.0, 2.0], prompt=[0, 0, 0], repetition_penalty=1.4) == 0


def test_penalties_agree_with_transformers(seed):
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = np.random.default_rng(seed)
    logits = generator.normal(size=200).astype(np.float32) * 3
    tokens = generator.integers(0, 200, size=50)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.from_numpy(tokens)[None], torch.from_numpy(logits)[None])[0].numpy()
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=1)
    plain = SamplingParams(temperature=1.0, seed=1)
    for position in range(50):
        ours = sample(logits, params, position=position, prompt=tokens[:20].tolist(), answer=tokens[20:].tolist())
        assert ours == sample(expected, plain, position=position)


def test_logprobs_are_those_of_the_model_and_sorted(seed):
    logits = np.random.default_rng(seed).normal(size=1000).astype(np.float32) * 4
    expected = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    found = logprobs(logits, 17, top=5)
    assert found.logprob == pytest.approx(float(expected[17]))
    values, ids = expected.topk(5)
    assert [token_id for token_id, _ in found.top] == ids.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(values.tolist())
    assert logprobs(logits, 17, top=0).top == ()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": 1.1},
        {"presence_penalty": float("inf")}, {"frequency_penalty": float("nan")}, {"repetition_penalty": 0.0},
        {"logit_bias": ((1, float("inf")),)},
    ],
)  # fmt: skip
def test_impossible_parameters_are_refused(bad):
    with pytest.raises(InvalidRequest, match="must be"):
        SamplingParams(**bad)
