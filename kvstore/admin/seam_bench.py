"""`kvctl bench failover`: its parts, one after the other, on as few clusters as they can share."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.admin.bench_rows import Row
from kvstore.admin.failover_bench import FailoverPlan, failover_cluster, measure_failover
from kvstore.admin.hit_bench import HitPlan, hit_cluster, measure_hits
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.write_behind_bench import WriteBehindPlan, measure_write_behind, plain_cluster

Tell = Callable[[str], None]

PARTS = ("hits", "failover", "writes")


def measure_seams(parts: Sequence[str], *, model: str, cache_dir: Path | None, tell: Tell) -> list[Row]:
    """Blocking; leaves no process behind."""
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="larder-seam-") as name:
        folder = Path(name)
        if "hits" in parts or "writes" in parts:
            hits = HitPlan()
            tell("starting a cluster of one decode node")
            with LocalCluster(hit_cluster(hits, folder=folder / "hits", model=model, cache_dir=cache_dir)) as cluster:
                cluster.start()
                if "hits" in parts:
                    found["hits"] = asyncio.run(measure_hits(cluster, hits, tell))
                if "writes" in parts:
                    tell("write-behind: starting the same without sealing")
                    with LocalCluster(plain_cluster(cluster.plan, folder=folder / "plain")) as plain:
                        plain.start()
                        found["writes"] = asyncio.run(measure_write_behind(cluster, plain, WriteBehindPlan(), tell))
        if "failover" in parts:
            deaths = FailoverPlan()
            tell("failover: starting a cluster")
            with LocalCluster(failover_cluster(deaths, folder=folder / "failover", model=model, cache_dir=cache_dir)) as cluster:
                cluster.start()
                found["failover"] = asyncio.run(measure_failover(cluster, deaths, tell))
    return [row for part in PARTS for row in found.get(part, ())]
