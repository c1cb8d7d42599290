"""kvctl local: a cluster on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstore.admin import local_supervisor, render
from kvstore.admin.local_cluster import ClusterPlan, cache_dir_from_environment
from kvstore.admin.saved_cluster import default_state_folder
from kvstore.admin.terminal import JsonOption, ModelOption, show, tell

local = typer.Typer(help="A whole cluster on this machine.", no_args_is_help=True)

StateOption = Annotated[Path | None, typer.Option("--state-dir", help="Where a local cluster keeps its files.")]


@local.command()
def up(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the gateway; 0 for any free one.")] = 8000,
    model: ModelOption = "default",
    store_nodes: Annotated[int, typer.Option(min=0)] = 3,
    prefill_nodes: Annotated[int, typer.Option(min=0)] = 1,
    decode_nodes: Annotated[int, typer.Option(min=1)] = 2,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay until Ctrl-C instead of going to the background.")] = False,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a cluster on loopback."""
    folder = (state_dir or default_state_folder()).absolute()
    plan = ClusterPlan(
        folder=folder,
        model=model,
        cache_dir=cache_dir_from_environment(),
        store_nodes=store_nodes,
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        gateway_port=port,
    )
    if foreground:
        local_supervisor.run_in_foreground(plan, tell, lambda record: show(record, as_json, *_how_to_use(record)))
    else:
        record = local_supervisor.start_in_background(plan, tell)
        show(record, as_json, *_how_to_use(record), "stop it with: kvctl local down")


@local.command()
def down(state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """Stop the cluster that `local up` started."""
    record = local_supervisor.stop(state_dir or default_state_folder())
    show(record, as_json, "stopped" if record["stopped"] else "no local cluster was running")


@local.command()
def status(state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """The processes of the local cluster. Exit code 1 when none runs."""
    record = local_supervisor.status(state_dir or default_state_folder())
    show(record, as_json, render.processes_table(record) if record["running"] else "no local cluster is running")
    if not record["running"]:
        raise typer.Exit(1)


def _how_to_use(record: Mapping[str, Any]) -> list[str]:
    body = json.dumps({"model": record["model"], "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    return [
        f"gateway  {record['gateway_url']}",
        f"redis    {record['redis_url']}",
        f"logs     {record['folder']}",
        f"curl -N {record['gateway_url']}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    ]
