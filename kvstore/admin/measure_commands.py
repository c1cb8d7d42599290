"""kvctl replay and kvctl bench: what the core would do, or costs, measured here. They need no cluster."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from kvstore.admin.core_bench import core_cost
from kvstore.admin.kill_bench import KillPlan, run_kill
from kvstore.admin.local_cluster import cache_dir_from_environment
from kvstore.admin.pd_bench import Load, compare
from kvstore.admin.pd_bench import save_plot as save_pd_plot
from kvstore.admin.placement_bench import placement_cost, work_of
from kvstore.admin.quality_commands import default_cache_dir, engine_speed
from kvstore.admin.replay import Row, optimum, replay
from kvstore.admin.replay_plot import save_plot
from kvstore.admin.seam_bench import PARTS, measure_seams
from kvstore.admin.ssd_bench import STEPS, ssd_speed
from kvstore.admin.terminal import JsonOption, err, out, progress_bars, show
from kvstore.admin.trace import load_trace
from kvstore.core.policies import PolicyName
from kvstore.errors import ConfigError
from kvstore.units import MIB, parse_size

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)", re.IGNORECASE)
_FACTOR = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
DEFAULT_BENCH = "transfers"
"""What `kvctl bench` measures when its first argument names no benchmark: `kvctl bench get put`."""


class BenchGroup(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [DEFAULT_BENCH, *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=BenchGroup,
    help="Measure puts and gets (put, get, mixed), or what the name says: core, placement, pd, engine, failover, kill.",
    no_args_is_help=True,
)

_LOAD = Load()
_KILL = KillPlan()


def replay_command(
    trace: Annotated[Path, typer.Argument(help="A .jsonl file: one request a line with input_length and hash_ids.")],
    capacity_tokens: Annotated[str, typer.Option(help="Capacities in tokens, with commas: 500K,1M,3M.")] = "1M,3M,5M,10M",
    policy: Annotated[str, typer.Option(help="Policies with commas: lru, s3fifo, adaptive.")] = "lru,s3fifo,adaptive",
    score_after: Annotated[float, typer.Option(min=0, max=0.99, help="Share of the requests that only warm the store up.")] = 0.0,
    plot: Annotated[Path | None, typer.Option(help="Write hit rate over capacity to this PNG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay a request trace through the core of a store node: token hit rate by policy and capacity, and the offline optimum."""
    requests = load_trace(trace)
    capacities = [_count(text) for text in capacity_tokens.split(",")]
    policies = [_policy(text) for text in policy.split(",")]
    warm_up = int(score_after * len(requests))
    rows: list[Row] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(requests) * len(capacities) * len(policies))
        for capacity in capacities:
            for name in policies:
                progress.update(task, description=f"{name.value} {capacity:,} tokens")
                rows.append(
                    replay(
                        requests,
                        policy=name,
                        capacity_tokens=capacity,
                        warm_up=warm_up,
                        on_progress=lambda done: progress.advance(task, done),
                    )
                )
            rows.append(optimum(requests, capacity_tokens=capacity, warm_up=warm_up))
    if plot is not None:
        save_plot(rows, title=trace.stem, path=plot)
    if as_json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}), flush=True)
    else:
        out.print(_replay_table(rows))


@bench.command("core")
def bench_core(
    blocks: Annotated[str, typer.Option(help="Numbers of blocks, with commas.")] = "10K,100K,1M",
    policy: Annotated[str, typer.Option(help="Eviction policy: lru, s3fifo or adaptive.")] = PolicyName.ADAPTIVE.value,
    ssd_path: Annotated[Path | None, typer.Option(help="Measure the SSD tier in this folder too; a temporary one otherwise.")] = None,
    ssd_mib: Annotated[int, typer.Option(min=64, help="How much to write and read there.")] = 512,
    as_json: JsonOption = False,
) -> None:
    """Memory per block, put and acquire of the core by number of blocks; the SSD tier beside dd with direct I/O."""
    counts = [_count(text) for text in blocks.split(",")]
    name = _policy(policy)
    folder = ssd_path or Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    with _progress() as progress:
        task = progress.add_task("", total=len(counts) + STEPS)
        costs = []
        for count in counts:
            progress.update(task, description=f"{count:,} blocks")
            costs.append(core_cost(count, policy=name))
            progress.advance(task)
        progress.update(task, description=f"SSD in {folder}")
        speed = ssd_speed(folder, size=ssd_mib // 64 * 64 * MIB, on_progress=lambda done: progress.advance(task, done))
    record = {
        "core": [dataclasses.asdict(cost) for cost in costs],
        "ssd": {**dataclasses.asdict(speed), "write_share": speed.write_share, "read_share": speed.read_share},
    }
    if as_json:
        print(json.dumps(record), flush=True)
        return
    table = Table("blocks", "bytes/block", "blocks/s put", "events/s", "acquire 1,000 keys", title=f"core, {name.value}")
    for cost in costs:
        rates = (f"{cost.bytes_per_block:.0f}", f"{cost.blocks_per_second:,.0f}", f"{cost.events_per_second:,.0f}")
        table.add_row(f"{cost.blocks:,}", *rates, f"{cost.acquire_ms:.2f} ms")
    disk = Table("SSD tier", "GB/s", "dd, direct", "share")
    disk.add_row("write", f"{speed.write:.2f}", f"{speed.dd_write:.2f}", f"{speed.write_share:.2f}")
    disk.add_row("read", f"{speed.read:.2f}", f"{speed.dd_read:.2f}", f"{speed.read_share:.2f}")
    out.print(table, disk)


@bench.command("pd")
def bench_pd(
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals, for each way.")] = _LOAD.seconds,
    chats: Annotated[float, typer.Option(min=0.01, help="Short chats a second.")] = _LOAD.chats_per_s,
    longs: Annotated[float, typer.Option(min=0, help="Long prompts a second.")] = _LOAD.longs_per_s,
    long_words: Annotated[int, typer.Option(min=1, help="Words of a long prompt.")] = _LOAD.long_words,
    seed: Annotated[int, typer.Option(help="Of the load.")] = _LOAD.seed,
    model: Annotated[str, typer.Option(help="A Hugging Face folder, a .gguf file, or default.")] = "default",
    plot: Annotated[Path | None, typer.Option(help="Draw the gaps between tokens into this PNG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prefill beside decode under long prompts: first come first served, two queues in one process, two processes."""
    load = Load(seconds=seconds, chats_per_s=chats, longs_per_s=longs, long_words=long_words, seed=seed)
    rows = compare(load, model=model, cache_dir=cache_dir_from_environment(), tell=lambda text: err.print(text))
    if plot is not None:
        save_pd_plot(rows, plot)
    if as_json:
        print(json.dumps({"load": dataclasses.asdict(load), "rows": rows}), flush=True)
        return
    pairs = ("chat_itl_ms", "chat_ttft_ms", "long_ttft_ms")
    table = Table("way", *(f"{name.replace('_', ' ')} {at}" for name in pairs for at in ("p50", "p99")), "tokens/s", "failed")
    for row in rows:
        values = [str(row[name][at]) for name in pairs for at in ("p50", "p99")]
        table.add_row(row["way"], *values, str(row["tokens_per_s"]), str(row["failed"]))
    out.print(table)


@bench.command("kill")
def bench_kill(
    nodes: Annotated[int, typer.Option(min=3, help="Store nodes at the start; one more joins at the end.")] = _KILL.nodes,
    replicas: Annotated[int, typer.Option(min=2)] = _KILL.replicas,
    total: Annotated[str, typer.Option("--bytes", help="Of blocks, each counted once: 512m, 2g.")] = "2g",
    block: Annotated[str, typer.Option(help="Bytes of a block.")] = "368k",
    ops: Annotated[float, typer.Option(min=0.1, help="Gets and puts a second, of a stripe each.")] = _KILL.ops_per_s,
    calm: Annotated[float, typer.Option(min=1, help="Seconds before the kill, and after the repair.")] = _KILL.calm_s,
    transport: Annotated[str, typer.Option(help="tcp, shm or grpc.")] = _KILL.transport,
    as_json: JsonOption = False,
) -> None:
    """Kill -9 one of the store nodes under a load that knows every byte, then have a fresh one join: failed reads, wrong bytes, latency,
    time to full replication, bytes moved. Takes about two minutes, and four times BYTES of memory."""
    plan = KillPlan(
        nodes=nodes,
        replicas=replicas,
        total_bytes=parse_size(total),
        block_bytes=parse_size(block),
        ops_per_s=ops,
        calm_s=calm,
        transport=transport,
    )
    with tempfile.TemporaryDirectory(prefix="larder-bench-") as folder, progress_bars() as advance:
        record = run_kill(plan, Path(folder), advance)
    show(record, as_json, *_kill_parts(record))
    if record["failed_reads"] or record["wrong_bytes"]:
        raise typer.Exit(1)


@bench.command("failover")
def bench_failover(
    only: Annotated[str, typer.Option(help="Some of hits, failover, writes, with commas.")] = ",".join(PARTS),
    model: Annotated[str, typer.Option(help="A Hugging Face folder, a .gguf file, or default.")] = "default",
    as_json: JsonOption = False,
) -> None:
    """What hits, node deaths and write-behind cost a client, beside their targets: clusters of its own, some minutes."""
    parts = [part.strip() for part in only.split(",")]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    rows = measure_seams(parts, model=model, cache_dir=cache_dir_from_environment(), tell=lambda text: err.print(text, highlight=False))
    if as_json:
        print(json.dumps({"rows": [row.record() for row in rows]}), flush=True)
        return
    table = Table("what", "measured", "beside", "ratio", "target", "met", title="hits, failover, write-behind")
    for row in rows:
        beside = "" if row.beside is None else f"{row.beside:,.1f} {row.unit}"
        target = "" if row.most is None else f"<= {row.most:g}" if row.ratio is not None else f"<= {row.most:g} {row.unit}"
        table.add_row(
            *(row.what, f"{row.value:,.1f} {row.unit}", beside, "" if row.ratio is None else f"{row.ratio:.3f}"),
            *(target, "" if row.met is None else "yes" if row.met else "no"),
        )
    out.print(table)


@bench.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option(help="A Hugging Face folder, a .gguf file, or default.")] = "default",
    prefill: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas.")] = "512,2000",
    batch: Annotated[str, typer.Option(help="Sequences decoded at once, with commas.")] = "1,8,32",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Both take turns in each.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="0: one for each CPU.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Prefill and decode speed of the engine beside transformers' own generate: tokens a second, and the ratio."""
    options = {"prefill": prefill, "batch": batch, "dtype": dtype, "rounds": rounds, "threads": threads}
    with _progress() as progress:
        task = progress.add_task("loading the model", total=None)
        record = engine_speed(
            model,
            cache_dir=cache_dir_from_environment() or default_cache_dir(),
            options=options,
            progress=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    if as_json:
        print(json.dumps(record), flush=True)
        return
    title = f"{dtype}, {record['threads']} threads"
    table = Table("what", "tokens or batch", "larder tokens/s", "transformers tokens/s", "ratio", title=title)
    for row in record["rows"]:
        speeds = (str(row[name]["tokens_per_s"]) for name in ("larder", "transformers"))
        table.add_row(row["what"], str(row["size"]), *speeds, str(row["ratio"]))
    out.print(table)


@bench.command("placement")
def bench_placement(
    nodes: Annotated[int, typer.Option(min=2, help="Store nodes.")] = 1000,
    stripes: Annotated[str, typer.Option(help="How many: 500K, 10M.")] = "10M",
    zones: Annotated[int, typer.Option(min=1, help="Zones, of the same size.")] = 4,
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    as_json: JsonOption = False,
) -> None:
    """Place the stripes of a large cluster: time, balance, and what a join and a leave move beside the least they must."""
    count = _count(stripes)
    if not replicas <= zones <= nodes // 2:
        raise ConfigError("bench placement needs replicas <= zones <= nodes / 2")
    with _progress() as progress:
        task = progress.add_task(f"{count:,} stripes on {nodes:,} nodes", total=work_of(count))
        cost = placement_cost(
            nodes=nodes, stripes=count, zones=zones, replicas=replicas, on_progress=lambda done: progress.advance(task, done)
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(cost)), flush=True)
        return
    table = Table(
        "stripes", "nodes", "zones", "CPU seconds", "one call", "fullest", "emptiest", "join moves", "leave moves", title="placement"
    )
    table.add_row(
        *(f"{cost.stripes:,}", f"{cost.nodes:,}", str(cost.zones), f"{cost.seconds:.1f}", f"{cost.call_us:.0f} us"),
        *(f"{cost.most_loaded:.3f} of mean", f"{cost.least_loaded:.3f} of mean"),
        f"{cost.join_moved:.4%} (least {cost.join_least:.4%})",
        f"{cost.leave_moved:.4%} (least {cost.leave_least:.4%})",
    )
    out.print(table)


def _kill_parts(record: Mapping[str, Any]) -> list[str | Table]:
    titles = ("phase", "seconds", "reads", "failed", "wrong", "read p50 ms", "p99 ms", "puts", "degraded", "put p50 ms", "p99 ms")
    table = Table(*titles, title="one store killed, one joined")
    for row in record["phases"]:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
    repair, join = record["repair"], record["join"]
    return [
        table,
        f"dead after {repair['dead_after_s']} s, first copy after {repair['first_copy_after_s']} s, all replicas again after "
        f"{repair['whole_after_s']} s; {repair['sent_bytes'] / 1e6:,.0f} MB sent ({repair['lost_bytes'] / 1e6:,.0f} MB were lost) at "
        f"{repair['mb_per_s']} MB/s",
        f"join: {join['moved_bytes'] / 1e6:,.0f} MB moved, {join['least_bytes'] / 1e6:,.0f} MB fall to the new store "
        f"(x {join['moved_over_least']:.3f}); in its place after {join['whole_after_s']} s",
    ]


def _replay_table(rows: list[Row]) -> Table:
    capacities = list(dict.fromkeys(row.capacity_tokens for row in rows))
    table = Table("policy", *(f"{capacity:,}" for capacity in capacities), title="token hit rate by capacity in tokens")
    for policy in dict.fromkeys(row.policy for row in rows):
        hits = {row.capacity_tokens: row.token_hit for row in rows if row.policy == policy}
        table.add_row(policy, *(f"{hits[capacity]:.3f}" for capacity in capacities))
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)


def _count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if match is None or not (count := int(float(match[1]) * _FACTOR[match[2].upper()])):
        raise ConfigError(f"{text!r} is no number; write for example 500K or 3M")
    return count


def _policy(text: str) -> PolicyName:
    try:
        return PolicyName(text.strip().lower())
    except ValueError:
        raise ConfigError(f"no policy {text!r}; there are: {', '.join(PolicyName)}") from None
