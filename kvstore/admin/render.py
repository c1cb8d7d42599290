"""Tables for people. What a command prints with --json is the same record, unrendered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from kvstore.admin.bench_plan import Row

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


_CPU_HEADERS = ("client s/GB", "server s/GB")


def size_text(size: int) -> str:
    value = float(size)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


def duration_text(milliseconds: int) -> str:
    total = milliseconds // 1000
    hours, rest = divmod(total, 3600)
    return f"{hours}h{rest // 60:02d}m" if hours else f"{rest // 60}m{rest % 60:02d}s"


def table(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Columns of numbers (all cells int or float) are set right."""
    cells = [list(row) for row in rows]
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
    for number, header in enumerate(headers):
        numeric = bool(cells) and all(isinstance(row[number], int | float) for row in cells)
        made.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        made.add_row(*("" if cell is None else str(cell) for cell in row))
    return made


def nodes_table(record: Mapping[str, Any]) -> Table:
    rows = [
        (
            node["node_id"],
            node["role"],
            node["state"],
            node["address"],
            node["zone"],
            node["weight"] if node["role"] == "store" else "",
            size_text(node["capacity_bytes"]) if node["capacity_bytes"] else "",
            node["boot_id"][:8],
            node.get("transport", ""),
            node.get("transport_reason", ""),
        )
        for node in record["nodes"]
    ]
    return table(
        f"members at epoch {record['epoch']}",
        ("node", "role", "state", "address", "zone", "weight", "capacity", "boot", "transport", "why"),
        rows,
    )


def bench_table(rows: Sequence[Row]) -> Table:
    headers = (
        "op",
        "size",
        "batch",
        "clients",
        "transport",
        "replicas",
        "GB/s",
        "p50 ms",
        "p99 ms",
        "p99.9 ms",
        "client s/GB",
        "server s/GB",
        "shares of the clients",
        "SSD",
    )
    cells = [
        (
            *(row.op, size_text(row.size_bytes), row.batch, row.clients, row.transport, row.replicas),
            *(row.gb_per_s, row.p50_ms, row.p99_ms, row.p999_ms, row.client_cpu_s_per_gb, row.server_cpu_s_per_gb),
            *(" ".join(f"{share:.2f}" for share in row.client_shares), row.ssd_share),
        )
        for row in rows
    ]
    return table("benchmark", headers, cells)


def status_tables(record: Mapping[str, Any]) -> list[Table]:
    stores = []
    for node in record["stores"]:
        if "error" in node:
            stores.append((node["node_id"], node["state"], node["error"], "", "", "", "", ""))
            continue
        tiers = ", ".join(f"{tier['tier']} {size_text(tier['used_bytes'])}/{size_text(tier['capacity_bytes'])}" for tier in node["tiers"])
        if (staging := node["staging"]) is not None:
            tiers += f" (staging {size_text(staging['used_bytes'])}/{size_text(staging['capacity_bytes'])})"
        stores.append(
            (
                node["node_id"],
                node["state"],
                tiers,
                node["blocks"],
                node["leases"],
                node["reservations"],
                duration_text(node["uptime_ms"]),
                repair_cell(node),
            )
        )
    engines = [
        (node["node_id"], node["role"], node["state"], node["error"], "", "", "")
        if "error" in node
        else (
            node["node_id"],
            node["role"],
            node["state"],
            node["model"],
            node["running"],
            node["queued"],
            "" if node["total_pool_blocks"] is None else f"{node['free_pool_blocks']}/{node['total_pool_blocks']}",
        )
        for node in record["engines"]
    ]
    return [
        table("store nodes", ("node", "state", "tiers (used/capacity)", "blocks", "leases", "reservations", "up", "repair"), stores),
        table("engines", ("node", "role", "state", "model", "running", "queued", "free blocks"), engines),
    ]


def repair_cell(node: Mapping[str, Any]) -> str:
    """What a store is at, in a few words."""
    drain, repair = node.get("drain"), node["repair"]
    if drain is not None and drain["safe_to_stop"]:
        return "drained: safe to stop"
    if drain is not None:
        return f"drains: {drain['remaining_blocks']} of {drain['blocks']} blocks left"
    if repair["waiting_stripes"]:
        return f"sends {size_text(repair['waiting_bytes'])}, {duration_text(repair['eta_ms'] + 999)} left"
    return ""


def health_line(gateway: Mapping[str, Any] | None) -> str:
    if gateway is None:
        return "gateway: not known (give --gateway)"
    if "error" in gateway:
        return f"gateway {gateway['url']}: {gateway['error']}"
    health = gateway["health"]
    return f"gateway {gateway['url']}: {health.get('status')}" + "".join(f"; {why}" for why in health.get("degraded", ()))


def locate_table(record: Mapping[str, Any]) -> Table:
    rows = []
    for block in record["blocks"]:
        copies = ", ".join(f"{copy['node_id']} ({'+'.join(map(_copy_text, copy['tiers'], copy['rungs']))})" for copy in block["copies"])
        copies = copies or "nowhere"
        size = max((copy["payload_bytes"] for copy in block["copies"]), default=0)
        rows.append(
            (block["index"], block["hash"][:12], block["stripe"][:8], ", ".join(block["owners"]), copies, size_text(size) if size else "")
        )
    title = f"{record['tokens']} tokens, {len(record['blocks'])} full blocks, the first {record['held_prefix_blocks']} held"
    return table(title, ("block", "hash", "stripe", "owners", "copies", "payload"), rows)


def _copy_text(tier: str, rung: str) -> str:
    return tier if rung == "as sealed" else f"{tier}: {rung}"


def outcome_table(title: str, record: Mapping[str, Any]) -> Table:
    """One line a node, one column a counter; a node that failed says why."""
    keys = list(dict.fromkeys(key for node in record["nodes"] for key in node if key not in ("node_id", "error")))
    if any("error" in node for node in record["nodes"]):
        keys.append("error")
    rows = [(node["node_id"], *(_outcome_cell(key, node) for key in keys)) for node in record["nodes"]]
    return table(title, ("node", *(key.replace("_", " ") for key in keys)), rows)


def _outcome_cell(key: str, node: Mapping[str, Any]) -> object:
    if key not in node:
        return ""
    if node[key] is None:
        return "none"
    return size_text(node[key]) if key.endswith("_bytes") else node[key]


def processes_table(record: Mapping[str, Any]) -> Table:
    rows = [
        (
            process["name"],
            process["pid"],
            "alive" if process["alive"] else "ended",
            " ".join(f"{kind}={address}" for kind, address in process["addresses"].items()),
            process["log"],
        )
        for process in record["processes"]
    ]
    return table(f"local cluster at {record['gateway_url']}", ("process", "pid", "", "addresses", "log"), rows)


def demo_table(acts: Sequence[Mapping[str, Any]]) -> Table:
    titles = {
        "cold": "1  long prompt, cold",
        "hit": "2  another question on the same text",
        "streams": "3  eight streams of mixed lengths",
        "decode_killed": "4  kill -9 of the decode node in mid stream",
        "store_killed": "5  kill -9 of a store node, act 2 again",
    }
    made = table("five acts", ("act", "blocks hit", "TTFT", "tokens/s", "outcome"), [])
    for act in acts:
        hit = f"{act['hit_blocks']}/{act['prompt_blocks']}" if "prompt_blocks" in act else ""
        ttft = f"{act['ttft_ms']:.0f} ms" if "ttft_ms" in act else ""
        rate = f"{act['tokens_per_s']:.1f}" if "tokens_per_s" in act else ""
        made.add_row(titles[act["name"]], hit, ttft, rate, _outcome(act))
    return made


def _outcome(act: Mapping[str, Any]) -> str:
    equal = {True: "the same tokens", False: "OTHER TOKENS"}
    match act["name"]:
        case "cold":
            return f"{act['prompt_tokens']} tokens in the prompt"
        case "hit":
            return f"TTFT {act['ttft_ratio']:.2f} of cold; {_origins(act)}"
        case "streams":
            return f"{act['completed']} of 8 complete"
        case "decode_killed":
            return f"{act['killed']} killed, gap {act['gap_ms']:.0f} ms, {equal[act['tokens_equal']]}"
        case _:
            return f"{act['killed']} killed, TTFT {act['ttft_ratio']:.2f} of cold, {equal[act['tokens_equal']]}; {_origins(act)}"


def _origins(act: Mapping[str, Any]) -> str:
    names = {"pool": "the node's own pool", "host": "store memory", "ssd": "store SSD"}
    return "from " + (" and ".join(names[tier] for tier in act["tokens_from"] if tier in names) or "nowhere")


def codec_table(record: Mapping[str, Any]) -> Table:
    title = f"{record['model']}: {record['scored_tokens']} tokens scored, perplexity {record['perplexity']:.3f} on unencoded KV"
    headers = [
        "rung",
        "bits",
        "KL (95 %)",
        "perplexity (95 %)",
        "top-1",
        "first divergence",
        "retrieval",
        "encode GB/s",
        "decode GB/s",
        "x prefill",
    ]
    rows = []
    for row in record["rows"]:
        low, high = row["kl_interval"]
        less, more = row["perplexity_change_interval"]
        rows.append(
            [
                row["rung"],
                f"{row['bits']:.3f}",
                f"{row['kl']:.5f} ({low:.5f} to {high:.5f})",
                f"{row['perplexity_change']:+.2%} ({less:+.2%} to {more:+.2%})",
                f"{row['top1_agreement']:.4f}",
                " ".join(str(tokens) for tokens in row["first_greedy_divergence"]),
                f"{row['retrieval']:.0%} of {record['retrieval']:.0%}",
                f"{row['encode_gb_s']:.3f}",
                f"{row['decode_gb_s']:.3f}",
                f"{row['decode_times_faster_than_prefill']:.0f}",
            ]
        )
    return table(title, headers, rows)
