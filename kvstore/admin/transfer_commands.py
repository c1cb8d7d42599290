"""kvctl bench put, get, mixed, acquire: payloads between a client and store nodes."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvstore.admin import bench as benchmark
from kvstore.admin import render
from kvstore.admin.bench_plan import Measurement
from kvstore.admin.terminal import JsonOption, RedisOption, show, tell
from kvstore.units import parse_size


def transfers(
    ops: Annotated[list[str], typer.Argument(metavar="put|get|mixed|acquire ...", help="What to measure; acquire: the lease alone.")],
    sizes: Annotated[str, typer.Option(help="Bytes of a block, separated by commas.")] = "64k,368k,1m,4m",
    batch: Annotated[int, typer.Option(min=1, help="Blocks of one operation.")] = 16,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 1,
    transport: Annotated[
        str,
        typer.Option(
            help="shm, ucx, tcp, grpc, or redis, memcpy and direct (reads of a file) for comparison; several with commas take turns."
        ),
    ] = "shm,tcp,grpc",
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="Store nodes to start; default: as many as replicas.")] = None,
    streams: Annotated[int, typer.Option(help="Gets over a wire: connections a client reads a large batch over at once.")] = 1,
    ssd: Annotated[bool, typer.Option("--ssd", help="Get from the SSD: a small host tier before it.")] = False,
    ssd_path: Annotated[Path | None, typer.Option(help="Folder of the SSD files; a temporary one otherwise.")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Of one measurement.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of all of it; the medians are shown.")] = 1,
    in_place: Annotated[bool, typer.Option("--in-place/--copy", help="shm: use the bytes where they lie, or copy them.")] = True,
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="shm: compare the checksum at every get.")] = True,
    redis: RedisOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput over size into this PNG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Throughput, latency and CPU of puts and gets. Without --redis it starts store nodes of its own, and stops them."""
    measurements = [
        Measurement(
            op=op,
            size_bytes=parse_size(size),
            batch=batch,
            clients=clients,
            transport=route,
            replicas=replicas,
            seconds=seconds,
            in_place=in_place,
            verify=check,
            streams=streams,
            ssd=ssd,
        )
        for op in ops
        for size in sizes.split(",")
        for route in transport.split(",")
    ]
    with contextlib.ExitStack() as stack:
        if redis is not None:
            servers = benchmark.Servers(redis, None)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="larder-bench-", dir=ssd_path)))
            peer = any(measurement.transport == "redis" for measurement in measurements)
            servers = stack.enter_context(benchmark.own_servers(folder, store_nodes=max(nodes or 0, replicas), peer_redis=peer, ssd=ssd))
        rows = benchmark.run_all(servers, measurements, rounds=rounds, tell=tell)
    if plot is not None:
        benchmark.plot(rows, plot)
    show({"rows": [row.as_record() for row in rows]}, as_json, render.bench_table(rows))
