"""The traces here are made up: a few conversations that go on, among many prompts that come once."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from kvstore.admin.kvctl import app
from kvstore.admin.replay import optimum, replay
from kvstore.admin.trace import BLOCK_TOKENS, TracedRequest, load_trace
from kvstore.core.policies import PolicyName
from kvstore.errors import ConfigError


@pytest.fixture
def requests(seed: int) -> tuple[TracedRequest, ...]:
    rng = Random(seed)
    fresh = iter(range(1, 1_000_000))
    conversations = [[0, next(fresh)] for _ in range(12)]
    found = []
    for _ in range(500):
        if rng.random() < 0.4:
            ids = rng.choice(conversations)
            ids.append(next(fresh))
            if len(ids) > 14:
                del ids[2:]
        else:
            ids = [0, *(next(fresh) for _ in range(rng.randint(1, 9)))]
        found.append(TracedRequest(input_tokens=len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS), ids=tuple(ids)))
    return tuple(found)


def plain_lru(requests: tuple[TracedRequest, ...], blocks: int) -> float:
    """A model of its own: an ordered dict, the ends of chains older than their heads."""
    here: OrderedDict[int, None] = OrderedDict()
    hit = asked = 0
    for request in requests:
        run = next((at for at, one in enumerate(request.ids) if one not in here), len(request.ids))
        hit += request.tokens_of(run)
        asked += request.input_tokens
        for one in reversed(request.ids):
            here[one] = None
            here.move_to_end(one)
        while len(here) > blocks:
            here.popitem(last=False)
    return hit / asked


def test_lru_in_the_core_hits_what_a_plain_lru_hits(requests: tuple[TracedRequest, ...]) -> None:
    for blocks in (60, 200):
        row = replay(requests, policy=PolicyName.LRU, capacity_tokens=blocks * BLOCK_TOKENS)
        assert row.token_hit == pytest.approx(plain_lru(requests, blocks), abs=0.01)


@pytest.mark.parametrize("policy", list(PolicyName))
def test_no_policy_beats_the_optimum_and_with_room_for_all_every_policy_is_it(
    policy: PolicyName, requests: tuple[TracedRequest, ...]
) -> None:
    for blocks in (40, 150):
        best = optimum(requests, capacity_tokens=blocks * BLOCK_TOKENS)
        assert replay(requests, policy=policy, capacity_tokens=blocks * BLOCK_TOKENS).token_hit <= best.token_hit
    everything = 100_000 * BLOCK_TOKENS
    best = optimum(requests, capacity_tokens=everything)
    assert replay(requests, policy=policy, capacity_tokens=everything).token_hit == best.token_hit


def test_the_adaptive_policy_hits_more_than_lru_where_most_blocks_come_once(requests: tuple[TracedRequest, ...]) -> None:
    hits = {name: replay(requests, policy=name, capacity_tokens=60 * BLOCK_TOKENS).token_hit for name in PolicyName}
    assert hits[PolicyName.ADAPTIVE] > hits[PolicyName.LRU]


def write(path: Path, requests: tuple[TracedRequest, ...]) -> Path:
    lines = (json.dumps({"timestamp": 0, "input_length": one.input_tokens, "output_length": 1, "hash_ids": one.ids}) for one in requests)
    path.write_text("\n".join(lines))
    return path


def test_the_command_prints_one_document_and_draws_a_picture(requests: tuple[TracedRequest, ...], tmp_path: Path) -> None:
    trace, plot = write(tmp_path / "day.jsonl", requests[:100]), tmp_path / "plot.png"
    arguments = ["replay", str(trace), "--capacity-tokens", "20K,0.1M", "--policy", "lru,adaptive", "--json", "--plot", str(plot)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert {(row["policy"], row["capacity_tokens"]) for row in rows} == {
        (policy, capacity) for policy in ("lru", "adaptive", "optimum") for capacity in (20_000, 100_000)
    }
    assert all(0 <= row["token_hit"] <= 1 for row in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("line", ["{", "{}", '{"input_length": 600, "hash_ids": [1]}', '{"input_length": 600, "hash_ids": [1, 1]}'])
def test_a_line_that_is_no_request_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_length": 10, "hash_ids": [1]}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        load_trace(path)


@pytest.mark.parametrize("arguments", [["--policy", "fifo"], ["--capacity-tokens", "many"], ["--capacity-tokens", "100"]])
def test_a_wrong_argument_is_refused_with_what_would_be_right(arguments: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "day.jsonl"
    trace.write_text('{"input_length": 10, "hash_ids": [1]}\n')
    done = CliRunner().invoke(app, ["replay", str(trace), *arguments])
    assert isinstance(done.exception, ConfigError)
