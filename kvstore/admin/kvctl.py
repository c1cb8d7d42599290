"""kvctl: look at a cluster, act on it, or have one on this machine.

With --json a command prints one JSON document on stdout and nothing else. Progress and errors go to stderr; an error is one line and a
non-zero exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Group
from rich.live import Live

from kvstore.admin import (
    codec_commands,
    commands,
    demo,
    explain,
    local_commands,
    local_supervisor,
    measure_commands,
    render,
    transfer_commands,
    upkeep,
    upkeep_tables,
)
from kvstore.admin.cluster_access import ClusterAccess, find_cluster
from kvstore.admin.local_cluster import ClusterPlan, LocalCluster, cache_dir_from_environment
from kvstore.admin.saved_cluster import default_state_folder
from kvstore.admin.terminal import JsonOption, ModelOption, RedisOption, err, out, progress_bars, show, tell
from kvstore.errors import ConfigError, LarderError
from kvstore.process import operator_line
from kvstore.units import parse_duration, parse_size

app = typer.Typer(
    help="Look at a Larder cluster, act on it, or run one on this machine.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(local_commands.local, name="local")
app.add_typer(measure_commands.bench, name="bench")

ClickError: type[Exception] = typer.BadParameter.__mro__[2]
"""Every error of the command line parser; typer does not name it."""
assert ClickError.__name__ == "ClickException"

GatewayOption = Annotated[str | None, typer.Option("--gateway", envvar="LARDER_GATEWAY_URL", help="URL of the gateway.")]
ApiKeyOption = Annotated[str | None, typer.Option("--api-key", envvar="LARDER_API_KEY", help="Key for the gateway; decides the namespace.")]

Result = TypeVar("Result")


@app.command()
def status(redis: RedisOption = None, gateway: GatewayOption = None, api_key: ApiKeyOption = None, as_json: JsonOption = False) -> None:
    """Gateway, store nodes with their tiers, prefill and decode nodes."""
    record = _run(commands.status(_access(redis, gateway, api_key)))
    show(record, as_json, render.health_line(record["gateway"]), upkeep_tables.repair_line(record["repair"]), *render.status_tables(record))


@app.command()
def nodes(redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """The members of the cluster as Redis lists them."""
    record = _run(commands.nodes(_access(redis, None, None)))
    show(record, as_json, render.nodes_table(record))


@app.command()
def locate(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" for stdin.')],
    redis: RedisOption = None,
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
    replicas: Annotated[int, typer.Option(min=1, help="Owners shown for each block.")] = commands.DEFAULT_REPLICAS,
    as_json: JsonOption = False,
) -> None:
    """Which nodes and tiers hold the blocks of a completion prompt."""
    record = _run(commands.locate(_access(redis, gateway, api_key), {"prompt": _text(prompt)}, replicas=replicas))
    show(record, as_json, render.locate_table(record), *(f"{node['node_id']}: {node['error']}" for node in record["unreachable"]))


@app.command("explain")
def explain_command(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" for stdin.')],
    redis: RedisOption = None,
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
    replicas: Annotated[int, typer.Option(min=1, help="Owners shown of the block that is missing.")] = commands.DEFAULT_REPLICAS,
    as_json: JsonOption = False,
) -> None:
    """Why the held prefix of a completion prompt ends where it ends: the parts of its key, the block that is missing, and why."""
    record = _run(explain.explain(_access(redis, gateway, api_key), {"prompt": _text(prompt)}, replicas=replicas))
    show(record, as_json, *explain.explained_lines(record))


@app.command()
def evict(
    everything: Annotated[bool, typer.Option("--all", help="All copies of all namespaces.")] = False,
    namespace: Annotated[str | None, typer.Option(help="All copies of this namespace.")] = None,
    prompt: Annotated[str | None, typer.Option(help='The blocks of this prompt; "-" for stdin.')] = None,
    redis: RedisOption = None,
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget copies on every store node. Leased copies stay until their lease ends."""
    if [everything, namespace is not None, prompt is not None].count(True) != 1:
        raise ConfigError("evict needs exactly one of --all, --namespace NAME and --prompt TEXT")
    access = _access(redis, gateway, api_key)
    if everything:
        record = _run(commands.evict_all(access))
    elif namespace is not None:
        record = _run(commands.evict_namespace(access, namespace))
    else:
        record = _run(commands.evict_prompt(access, _text(prompt or "")))
    show(record, as_json, render.outcome_table("evicted", record))
    _exit_if(any("error" in node for node in record["nodes"]))


@app.command()
def pin(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" for stdin.')],
    hard: Annotated[bool, typer.Option("--hard/--soft", help="Never evicted, or only when nothing else can go.")] = False,
    ttl: Annotated[str, typer.Option(help="How long: 90s, 30min, 12h; a year at most.")] = "1h",
    redis: RedisOption = None,
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep the blocks of a prompt from eviction for a time, on every store node that has them. Exit code 1 when a hard pin was refused."""
    record = _run(commands.pin_prompt(_access(redis, gateway, api_key), _text(prompt), hard=hard, ttl=parse_duration(ttl)))
    show(record, as_json, render.outcome_table("pinned", record))
    _exit_if(any("error" in node or node["refused_blocks"] for node in record["nodes"]))


@app.command()
def unpin(
    prompt: Annotated[str, typer.Argument(help='The prompt, or "-" for stdin.')],
    redis: RedisOption = None,
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the pins off the blocks of a prompt."""
    record = _run(commands.unpin_prompt(_access(redis, gateway, api_key), _text(prompt)))
    show(record, as_json, render.outcome_table("unpinned", record))
    _exit_if(any("error" in node for node in record["nodes"]))


@app.command()
def quota(
    namespace: Annotated[str, typer.Argument(help="Whose.")],
    limit: Annotated[str | None, typer.Argument(metavar="[BYTES|none]", help="From now on; not given: only shown.")] = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """What a namespace has on each store node and may have; or set that. Nodes with an SSD keep it over restarts, before their config."""
    access = _access(redis, None, None)
    if limit is None:
        record = _run(commands.quota(access, namespace))
    else:
        record = _run(commands.set_quota(access, namespace, None if limit == "none" else parse_size(limit)))
    show(record, as_json, render.outcome_table("quota", record))
    _exit_if(any("error" in node for node in record["nodes"]))


@app.command()
def verify(redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Read back and check every copy on every store node. Exit code 1 when one was bad."""
    with err.status("verifying") as spinner:
        record = _run(
            commands.verify(_access(redis, None, None), lambda *step: spinner.update("{}: {} of {} copies checked".format(*step)))
        )
    show(record, as_json, render.outcome_table("verified", record))
    _exit_if(record["bad_copies"] > 0 or any("error" in node for node in record["nodes"]))


@app.command()
def repair(redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Have every store node fetch what it should own and lacks. Exit code 1 when a block could not be had."""
    with err.status("repairing") as spinner:
        record = _run(commands.repair(_access(redis, None, None), lambda *step: spinner.update("{}: {} of {} blocks".format(*step))))
    show(record, as_json, render.outcome_table("repaired", record))
    _exit_if(record["failed_blocks"] > 0 or any("error" in node for node in record["nodes"]))


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Node id of a store, prefill or decode node.")],
    wait: Annotated[bool, typer.Option("--wait", help="Until it is safe to stop the node.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if it is the only active prefill or decode node.")] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Empty a node to the others, and say when it is safe to stop. A store node serves its blocks until then; the streams of a decode node
    move to another one, each when that one has its prefix."""
    with progress_bars() as advance:
        work = upkeep.drain(
            _access(redis, None, None), node, wait=wait, force=force, on_progress=lambda *step: advance(f"{node} drains", *step)
        )
        record = _run(work)
    show(record, as_json, upkeep_tables.drain_text(record))


@app.command()
def rebalance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would move.")] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look on every store node for copies that are not where they should be, and send them there at the repair rate."""
    with err.status("comparing what the nodes hold"):
        record = _run(upkeep.rebalance(_access(redis, None, None), dry_run=dry_run))
    show(record, as_json, upkeep_tables.rebalance_line(record), *([upkeep_tables.rebalance_table(record)] if record["blocks"] else []))
    _exit_if(any("error" in each for each in record["nodes"]))


@app.command()
def top(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then end; for scripts.")] = False,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """The store nodes, live: tiers, rates, CPU, repair. Ctrl-C ends it."""
    access = _access(redis, None, None)

    async def follow() -> None:
        async with contextlib.aclosing(upkeep.samples(access, every_s=every)) as looks:
            with contextlib.nullcontext() if once or as_json else Live(console=out, screen=True) as screen:
                async for record in looks:
                    if screen is not None:
                        screen.update(Group(upkeep_tables.repair_line(record["repair"]), upkeep_tables.top_table(record)), refresh=True)
                        continue
                    show(record, as_json, upkeep_tables.repair_line(record["repair"]), upkeep_tables.top_table(record))
                    if once:
                        return

    _run(follow())


@app.command()
def events(redis: RedisOption = None, as_json: JsonOption = False) -> None:
    """Blocks that come to the store nodes and go, as it happens, a line each (with --json an object each); also of stores that join
    meanwhile. Ctrl-C ends it."""
    access = _access(redis, None, None)

    async def follow() -> None:
        async with contextlib.aclosing(upkeep.events(access)) as records:
            async for record in records:
                print(json.dumps(record) if as_json else upkeep_tables.event_line(record), flush=True)

    _run(follow())


@app.command("demo")
def demo_command(
    model: ModelOption = "default",
    folder: Annotated[Path | None, typer.Option(help="Keep configs and logs here; a temporary folder otherwise.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a cluster on loopback, play five acts on it, stop it."""
    acts: list[demo.Act] = []

    async def play(cluster: LocalCluster) -> None:
        async for act in demo.play(cluster, tell):
            acts.append(act)

    with tempfile.TemporaryDirectory(prefix="larder-demo-") as temporary:
        plan = ClusterPlan(folder=folder or Path(temporary), model=model, cache_dir=cache_dir_from_environment())
        with LocalCluster(plan) as cluster:
            local_supervisor.start(cluster, tell)
            _run(play(cluster))
            tell("stopping")
    show({"acts": acts}, as_json, render.demo_table(acts))
    failed = [act["name"] for act in acts if not demo.is_good(act)]
    if failed:
        raise LarderError(f"not as it should be: {', '.join(failed)}")


app.command("replay")(measure_commands.replay_command)
measure_commands.bench.command(measure_commands.DEFAULT_BENCH)(transfer_commands.transfers)
app.command("calibrate")(codec_commands.calibrate)
app.command("codec-report")(codec_commands.codec_report)


def main() -> NoReturn:
    """The console script: any error becomes one line on stderr and a non-zero exit."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    code: object = 0
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except ClickError as error:
        text = getattr(error, "format_message", error.__str__)()
        # `kvctl` alone asks for help; the parser calls that an error too.
        print(text if type(error).__name__ == "NoArgsIsHelpError" else f"kvctl: {' '.join(text.split())} (kvctl --help)", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("kvctl: interrupted", file=sys.stderr)
        code = 130
    except LarderError as error:
        print(f"kvctl: {error}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        code = 1
    except OSError as error:
        print(f"kvctl: {operator_line(error) or error}", file=sys.stderr)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _end(number: int, frame: object) -> NoReturn:
    """Unwinds, so that what this command started is stopped."""
    sys.exit(128 + number)


def _access(redis: str | None, gateway: str | None, api_key: str | None) -> ClusterAccess:
    return find_cluster(redis_url=redis, gateway_url=gateway, api_key=api_key, state_folder=default_state_folder())


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


def _exit_if(bad: bool) -> None:
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
