"""Tables for people: repair, drain, rebalance, top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvstore.admin.render import duration_text, repair_cell, size_text, table


def repair_line(summary: Mapping[str, Any]) -> str:
    if not summary["under_replicated_stripes"]:
        return "repair: everything is where it should be, as far as the nodes know"
    return (
        f"repair: {summary['under_replicated_stripes']} stripes short of a copy, "
        f"{summary['endangered_stripes']} of them down to the last, "
        f"{size_text(summary['under_replicated_bytes'])} to go at {size_text(summary['bytes_per_s'])}/s, "
        f"about {duration_text(summary['eta_ms'] + 999)}"
    )


def drain_text(record: Mapping[str, Any]) -> str:
    if "live_calls" in record:
        calls = record["live_calls"]
        return f"{record['node_id']} drains: {calls} calls are left" if calls else f"{record['node_id']} is drained; it is safe to stop"
    drain = record["drain"]
    if drain is None:
        return f"{record['node_id']} begins to drain"
    if drain["safe_to_stop"]:
        found = f"each of its {drain['blocks']} blocks was read back at every owner"
        if drain["no_room_blocks"]:
            found = (
                f"of its {drain['blocks']} blocks {drain['no_room_blocks']} found no room at an owner, which took and evicted them; "
                "each of the others was read back"
            )
        return f"{record['node_id']} is drained: {found}; it is safe to stop"
    return (
        f"{record['node_id']} drains: {drain['remaining_blocks']} of {drain['blocks']} blocks "
        f"({size_text(drain['remaining_bytes'])}) are not confirmed at their owners yet; do not stop it"
    )


def rebalance_table(record: Mapping[str, Any]) -> Table:
    rows: list[tuple[object, ...]] = []
    for node in record["nodes"]:
        if "error" in node:
            rows.append((node["node_id"], node["error"], "", "", ""))
        for move in node.get("moves", ()):
            rows.append((node["node_id"], move["node_id"], move["stripes"], move["blocks"], size_text(move["bytes"])))
    return table("moves", ("from", "to", "stripes", "blocks", "bytes"), rows)


def rebalance_line(record: Mapping[str, Any]) -> str:
    verb = "would move" if record["dry_run"] else "moving"
    return (
        f"{verb}: {record['stripes']} stripes, {record['blocks']} blocks, {size_text(record['bytes'])}; "
        f"surplus: {record['surplus_blocks']} blocks, {size_text(record['surplus_bytes'])}"
    )


def top_table(record: Mapping[str, Any]) -> Table:
    rows = []
    for node in record["nodes"]:
        state = node["state"] if node["takeover"] >= 1 else f"{node['state']} {node['takeover']:.0%}"
        if "error" in node:
            rows.append((node["node_id"], state, node["error"], *[""] * 7))
            continue
        tiers = "  ".join(
            f"{tier['tier']} {size_text(tier['used_bytes'])} ({tier['used_bytes'] / max(tier['capacity_bytes'], 1):.0%})"
            for tier in node["tiers"]
        )
        rates = (f"{node['stored_per_s']:.0f}", f"{node['evicted_per_s']:.0f}", f"{node['cpu_percent']:.0f} %")
        rows.append((node["node_id"], state, tiers, node["blocks"], node["leases"], node["connections"], *rates, repair_cell(node)))
    headers = ("node", "state", "tiers", "blocks", "leases", "conns", "stored/s", "evicted/s", "CPU", "repair")
    return table(f"store nodes at epoch {record['epoch']}, {record['hot_stripes']} hot stripes", headers, rows)


def event_line(record: Mapping[str, Any]) -> str:
    words = [record["node_id"], f"#{record['sequence']}" if "sequence" in record else "", record["event"]]
    words += [record["hash"][:12], record["namespace"]] if "hash" in record else []
    words += [record["reason"], f"({record['blocks']} blocks)" if record["exact"] else "(not exact)"]
    return "  ".join(filter(None, words))
