"""`kvctl bench failover`: its parts, one after the other, each on clusters of its own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.admin.bench_rows import Row
from kvstore.admin.failover_bench import FailoverPlan, failover_cluster, measure_failover
from kvstore.admin.hit_bench import HitPlan, hit_cluster, measure_hits
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.write_behind_bench import WriteBehindPlan, measure_write_behind, write_behind_clusters

Tell = Callable[[str], None]

PARTS = ("hits", "failover", "writes")


def measure_seams(parts: Sequence[str], *, model: str, cache_dir: Path | None, tell: Tell) -> list[Row]:
    """Blocking; leaves no process behind."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="larder-seam-") as name:
        folder = Path(name)
        if "hits" in parts:
            hits = HitPlan()
            tell("hits: starting a cluster")
            with LocalCluster(hit_cluster(hits, folder=folder / "hits", model=model, cache_dir=cache_dir)) as cluster:
                cluster.start()
                rows += asyncio.run(measure_hits(cluster, hits, tell))
        if "failover" in parts:
            deaths = FailoverPlan()
            tell("failover: starting a cluster")
            with LocalCluster(failover_cluster(deaths, folder=folder / "failover", model=model, cache_dir=cache_dir)) as cluster:
                cluster.start()
                rows += asyncio.run(measure_failover(cluster, deaths, tell))
        if "writes" in parts:
            sealing, plain = write_behind_clusters(folder=folder, model=model, cache_dir=cache_dir)
            tell("write-behind: starting two clusters")
            with LocalCluster(sealing) as with_it, LocalCluster(plain) as without:
                with_it.start()
                without.start()
                rows += asyncio.run(measure_write_behind(with_it, without, WriteBehindPlan(), tell))
    return rows
