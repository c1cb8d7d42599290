"""Calibration and judgement of a tiny random model: not that the numbers are good, but that they are what they say."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore.codec import BlockCodec, Rung
from kvstore.codec.klt_tables import KltTables, load_tables, save_tables
from kvstore.errors import ConfigError
from prefill_node.model.load import LoadedModel
from prefill_node.model.tokenizer import load_tokenizer
from prefill_node.quality.calibrate import CalibrationPlan, calibrate
from prefill_node.quality.journal import Journal
from prefill_node.quality.judge import open_window, score
from prefill_node.quality.probe import Probe
from prefill_node.quality.report import ReportPlan, report

PLAN = CalibrationPlan(windows=3, window_tokens=256, group_layers=2, sample_blocks=6)


def silent(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def random_ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(count)]


@pytest.fixture(scope="module")
def probe(tiny: Callable[..., LoadedModel]) -> Probe:
    return Probe(tiny())


@pytest.fixture(scope="module")
def tables(probe: Probe, tmp_path_factory: pytest.TempPathFactory) -> KltTables:
    path = tmp_path_factory.mktemp("quality") / "tiny.klt"
    save_tables(calibrate(probe, [random_ids(1500)], PLAN, silent), path)
    return load_tables(path)


def codec_of(probe: Probe, rung: Rung, *, step: int = 4, calibration: KltTables | None = None) -> BlockCodec:
    layout = dataclasses.replace(probe.model.layout, dtype="bfloat16", block_tokens=32)
    return BlockCodec(layout, model_digest=probe.model.model_digest, rung=rung, calibration=calibration, step=step)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_prefix_and_what_follows_give_the_numbers_of_the_whole(tiny: Callable[..., LoadedModel], architecture: str) -> None:
    observer = Probe(tiny(architecture))
    ids = random_ids(40)
    whole = observer.observe(ids, score=True)
    first = observer.observe(ids[:25])
    second = observer.observe(ids[25:], prefix=first.kv, score=True)
    assert whole.log_probabilities is not None
    assert second.log_probabilities is not None
    assert torch.allclose(whole.kv[..., :25, :], first.kv, atol=1e-4)
    assert torch.allclose(whole.kv[..., 25:, :], second.kv, atol=1e-4)
    assert torch.allclose(whole.log_probabilities[25:], second.log_probabilities, atol=1e-3)
    assert torch.allclose(whole.query_squares, first.query_squares + second.query_squares, rtol=1e-3)


def test_tables_fit_the_model_and_carry_both_kinds_of_every_group(probe: Probe, tables: KltTables) -> None:
    assert tables.fits(probe.model.layout, probe.model.model_digest)
    assert (tables.groups, len(tables.bases[0]), len(tables.bases[1])) == (2, 2, 2)
    assert len(tables.digest) == 32


def test_calibrating_twice_gives_the_same_tables(probe: Probe, tables: KltTables, tmp_path: Path) -> None:
    assert save_tables(calibrate(probe, [random_ids(1500)], PLAN, silent), tmp_path / "again.klt") == tables.digest


def test_a_text_too_short_for_its_windows_is_a_configuration_error(probe: Probe) -> None:
    with pytest.raises(ConfigError, match="4 windows of 256 need 1024"):
        calibrate(probe, [random_ids(1000)], PLAN, silent)


def test_finer_steps_cost_more_bits_and_less_divergence(probe: Probe, tables: KltTables) -> None:
    window = open_window(probe, random_ids(256, seed=1), prefix_tokens=192)
    scores = [score(probe, window, codec_of(probe, Rung.KLT, step=step, calibration=tables)) for step in (1, 4, 16, 64)]
    sizes = [one.payload_bytes for one in scores]
    divergences = [float(one.divergences.mean()) for one in scores]
    assert sizes == sorted(sizes, reverse=True)
    assert divergences == sorted(divergences)
    assert scores[0].elements == 192 * 3 * 2 * 2 * 16


def test_exact_payloads_change_nothing(probe: Probe) -> None:
    window = open_window(probe, random_ids(200, seed=2), prefix_tokens=100, greedy_tokens=5)
    scores = score(probe, window, codec_of(probe, Rung.RAW))
    assert np.abs(scores.divergences).max() < 1e-6
    assert np.abs(scores.losses).max() < 1e-6
    assert scores.agreements.all()
    assert scores.first_divergence is None
    assert scores.elements == 96 * 3 * 2 * 2 * 16  # the tail of four tokens fills no block


def test_a_report_has_a_row_for_each_rung_with_intervals_around_the_mean(
    probe: Probe, tables: KltTables, tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ReportPlan(scored_tokens=256, window_tokens=256, prefix_tokens=192, greedy_windows=1, greedy_tokens=4)
    codecs = {
        "raw": codec_of(probe, Rung.RAW),
        "int4": codec_of(probe, Rung.INT4),
        "klt:32": codec_of(probe, Rung.KLT, step=32, calibration=tables),
    }
    published: list[int] = []
    texts = {"first": random_ids(700, seed=3), "second": random_ids(600, seed=4)}
    journal = Journal(tmp_path / "judged.jsonl")
    arguments = (probe, load_tokenizer(tiny_folder("llama")), texts, codecs, plan, silent)
    record = report(*arguments, journal=journal, publish=lambda rows: published.append(len(rows)))
    assert [row["rung"] for row in record["rows"]] == list(codecs)
    assert (record["scored_tokens"], published) == (256, [3, 3, 3, 3])
    for row in record["rows"]:
        low, high = row["kl_interval"]
        assert low <= row["kl"] <= high
        assert row["encode_gb_s"] > 0
        prefill_s_a_byte = record["prefill_ms_a_token"] / 1e3 / (codecs["raw"].layout.block_bytes / codecs["raw"].layout.block_tokens)
        assert row["decode_times_faster_than_prefill"] == pytest.approx(prefill_s_a_byte * row["decode_gb_s"] * 1e9)
        assert sorted(row["by_text"]) == ["first", "second"]
    raw, int4, klt = record["rows"]
    assert raw["kl"] < 1e-6 < int4["kl"]
    assert 16 < raw["bits"] < 18
    assert raw["first_greedy_divergence"] == [4]
    assert raw["retrieval"] == record["retrieval"]
    assert klt["bits"] < int4["bits"]

    lines = (tmp_path / "judged.jsonl").read_text().splitlines()
    (tmp_path / "judged.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:50]]) + "\n")  # stopped while it wrote the last one
    opened: list[int] = []
    monkeypatch.setattr("prefill_node.quality.report.open_window", lambda *a, **k: opened.append(1) or open_window(*a, **k))
    again = report(*arguments, journal=Journal(tmp_path / "judged.jsonl"))
    assert len(opened) == 1
    assert [row["kl"] for row in again["rows"]] == [row["kl"] for row in record["rows"]]
    with pytest.raises(ConfigError, match="resume: cannot use"):
        Journal(tmp_path / "none" / "judged.jsonl")
