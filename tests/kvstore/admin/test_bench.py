"""The benchmark's arithmetic, and one short run of each of its ways."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.admin.bench_plan import Measurement, Row, WorkerResult, median_row, percentile, row_of
from kvstore.errors import ConfigError

MEASUREMENT = Measurement(
    op="get", size_bytes=1_000_000, batch=4, clients=2, transport="shm", replicas=1, seconds=1, in_place=True, verify=False
)
FIELDS = {
    *("op", "size_bytes", "batch", "clients", "transport", "replicas", "gb_per_s", "p50_ms", "p99_ms", "p999_ms"),
    *("client_cpu_s_per_gb", "server_cpu_s_per_gb", "slowest_client_share", "client_shares", "ssd_share"),
}


def _row(rate: float) -> Row:
    results = [WorkerResult(moved_bytes=int(rate * 1e9), wall_s=1, cpu_s=0.5, latencies_ms=(1.0, 2.0, 3.0))]
    return row_of(MEASUREMENT, results, server_cpu_s=0.25)


def test_rates_add_up_and_cpu_is_per_gigabyte() -> None:
    results = [
        WorkerResult(moved_bytes=3_000_000_000, wall_s=1.0, cpu_s=0.6, latencies_ms=(1.0, 3.0)),
        WorkerResult(moved_bytes=1_000_000_000, wall_s=1.0, cpu_s=0.2, latencies_ms=(2.0, 100.0)),
    ]
    row = row_of(MEASUREMENT, results, server_cpu_s=0.4)
    assert (row.gb_per_s, row.client_cpu_s_per_gb, row.server_cpu_s_per_gb) == (4.0, 0.2, 0.1)
    assert (row.p50_ms, row.p99_ms, row.slowest_client_share, row.client_shares) == (2.0, 100.0, 0.5, (0.5, 1.5))
    assert set(row.as_record()) == FIELDS


def test_the_median_of_rounds_is_taken_field_by_field() -> None:
    assert median_row([_row(1), _row(9), _row(2)]).gb_per_s == 2


@pytest.mark.parametrize(("share", "found"), [(0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100)])
def test_percentiles_are_of_the_nearest_rank(share: float, found: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], share) == found
    assert percentile([], share) == 0


def test_a_working_set_fits_into_the_store() -> None:
    for size in (1, 64 << 10, 4 << 20, 64 << 20):
        measurement = Measurement(
            op="get", size_bytes=size, batch=1, clients=4, transport="tcp", replicas=1, seconds=1, in_place=False, verify=True
        )
        assert measurement.stored_bytes <= max(128 << 20, 4 * size)


def test_a_batch_that_no_node_could_hold_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="a batch of 4 blocks of 10737418240 bytes is more than"):
        dataclasses.replace(MEASUREMENT, size_bytes=10 << 30)


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="no transport"):
        Measurement(op="get", size_bytes=1, batch=1, clients=1, transport="fax", replicas=1, seconds=1, in_place=True, verify=True)
    with pytest.raises(ConfigError, match="no operation"):
        Measurement(op="take", size_bytes=1, batch=1, clients=1, transport="tcp", replicas=1, seconds=1, in_place=True, verify=True)


def test_a_short_run_prints_one_row_for_each_way(tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    arguments = ["mixed", "--sizes", "64k", "--batch", "4", "--transport", "shm,tcp,redis,memcpy", "--seconds", "0.1", "--json"]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        pass
    else:
        arguments += ["--plot", str(picture)]
    done = subprocess.run([sys.executable, "-m", "kvstore.admin.kvctl", "bench", *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["transport"] for row in rows] == ["shm+verify", "tcp", "redis", "memcpy"]
    assert all(set(row) == FIELDS and row["gb_per_s"] > 0 for row in rows)
    assert picture.exists() == ("--plot" in arguments)
