"""kvctl bench: clients in processes of their own against a cluster, or against store nodes started for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.admin.bench_plan import NODE_CAPACITY, NODE_CAPACITY_BEFORE_SSD, PEERS, Measurement, Row, WorkerResult, median_row, row_of
from kvstore.admin.bench_redis import cpu_seconds, forget_all, limit_memory
from kvstore.admin.cluster_access import ClusterAccess, ask_each, reachable, read_view
from kvstore.admin.local_process import LocalProcess, process_environment, wait_until_ready
from kvstore.errors import ConfigError, LarderError, Unavailable
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.rpc.admin_stub import AdminStub
from kvstore.units import MIB, seconds

Tell = Callable[[str], None]

_START_TIMEOUT = seconds(60)
_WORKER_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Servers:
    redis_url: str
    """Of the members."""
    peer_redis_url: str | None
    """Of the Redis that is measured."""
    folder: str = ""
    """For files of the benchmark."""


@contextlib.contextmanager
def own_servers(folder: Path, *, store_nodes: int, peer_redis: bool, ssd: bool = False) -> Iterator[Servers]:
    """Store nodes and Redis for one benchmark, gone afterwards."""
    with contextlib.ExitStack() as running:
        members = running.enter_context(EmbeddedRedis())
        peer_url: str | None = None
        if peer_redis:
            peer_url = running.enter_context(EmbeddedRedis()).url
            limit_memory(peer_url, NODE_CAPACITY)
        nodes = []
        for number in range(1, store_nodes + 1):
            capacity = NODE_CAPACITY_BEFORE_SSD if ssd else NODE_CAPACITY
            settings: dict[str, object] = {"host_capacity": f"{capacity // MIB}MiB"}
            if ssd:
                settings |= {"ssd_path": str(folder / f"bench-{number}.ssd"), "demote_above": 0.0}
            node = bench_store(number, redis_url=members.url, folder=folder, **settings)
            running.callback(node.kill)
            node.start()
            nodes.append(node)
        wait_until_ready(nodes, timeout=_START_TIMEOUT, on_ready=lambda _: None)
        yield Servers(members.url, peer_url, str(folder))


def bench_store(number: int, *, redis_url: str, folder: Path, **settings: object) -> LocalProcess:
    """A store node in a zone of its own, not started yet; its name is its node id."""
    name = f"bench-{number}"
    known = {"node_id": name, "zone": f"zone-{number}", "redis_url": redis_url, "log_level": "warning", "drain_deadline": "0s"}
    return LocalProcess(name=name, role="store", module="kvstore.node", settings=known | settings, folder=folder)


def run_all(servers: Servers, measurements: Sequence[Measurement], *, rounds: int, tell: Tell) -> list[Row]:
    """One row a measurement: the median of `rounds`, which alternate, so that a busy minute hits all alike."""
    found: dict[Measurement, list[Row]] = {measurement: [] for measurement in measurements}
    for number in range(rounds):
        for measurement in measurements:
            row = run_one(servers, measurement)
            found[measurement].append(row)
            tell(f"round {number + 1} of {rounds}: {row.op} {row.size_bytes} B over {row.transport}: {row.gb_per_s} GB/s")
    return [median_row(rows) for rows in found.values()]


def run_one(servers: Servers, measurement: Measurement) -> Row:
    if measurement.transport == "redis":
        if servers.peer_redis_url is None:
            raise ConfigError("no Redis to measure: leave --redis away, so that the benchmark starts its own servers")
        forget_all(servers.peer_redis_url)
    elif measurement.transport not in PEERS:
        asyncio.run(_forget_blocks(servers))
    workers = [_start_worker(servers, measurement, number) for number in range(measurement.clients)]
    try:
        for worker in workers:
            if _line_of(worker).strip() != "READY":
                raise Unavailable("a client of the benchmark did not get ready; its error is above")
        before = _server_cpu_s(servers, measurement)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        results = [WorkerResult(**json.loads(_line_of(worker) or "null")) for worker in workers]
        after = _server_cpu_s(servers, measurement)
        for worker in workers:
            worker.wait(_WORKER_STOP_S)
    except TypeError:
        raise Unavailable("a client of the benchmark failed; its error is above") from None
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    results = [dataclasses.replace(result, latencies_ms=tuple(result.latencies_ms)) for result in results]
    return row_of(measurement, results, server_cpu_s=after - before)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Throughput over block size, a line per operation and transport. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'larder[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for op, transport in dict.fromkeys((row.op, row.transport) for row in rows):
        points = sorted((row.size_bytes, row.gb_per_s) for row in rows if (row.op, row.transport) == (op, transport))
        axes.plot([size / 1024 for size, _ in points], [rate for _, rate in points], marker="o", label=f"{op} {transport}")
    axes.set(xscale="log", xlabel="KiB a block", ylabel="GB/s")
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot to {path}: {error}") from None


def _start_worker(servers: Servers, measurement: Measurement, number: int) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "kvstore.admin.bench_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=process_environment(),
    )
    task = {
        "measurement": dataclasses.asdict(measurement),
        "number": number,
        "redis_url": servers.redis_url,
        "peer_redis_url": servers.peer_redis_url,
        "folder": servers.folder,
    }
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(task) + "\n")
    worker.stdin.flush()
    return worker


def _line_of(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline()


def _server_cpu_s(servers: Servers, measurement: Measurement) -> float:
    if measurement.transport in ("memcpy", "direct"):
        return 0.0
    if measurement.transport == "redis":
        assert servers.peer_redis_url is not None
        return cpu_seconds(servers.peer_redis_url)
    return asyncio.run(_store_cpu_s(servers))


async def _store_cpu_s(servers: Servers) -> float:
    view = await read_view(ClusterAccess(redis_url=servers.redis_url, gateway_url=None))
    answers = await ask_each(reachable(view.stores), lambda _, channel: AdminStub(channel).status(timeout=seconds(10)))
    failed = [answer for _, answer in answers if isinstance(answer, LarderError)]
    if failed:
        raise failed[0]
    return sum(answer.cpu_ns for _, answer in answers if not isinstance(answer, LarderError)) / 1e9


async def _forget_blocks(servers: Servers) -> None:
    """Of earlier measurements, and of nobody else."""
    view = await read_view(ClusterAccess(redis_url=servers.redis_url, gateway_url=None))
    await ask_each(reachable(view.stores), lambda _, channel: AdminStub(channel).evict_namespace("bench", timeout=seconds(10)))
