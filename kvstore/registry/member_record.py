"""A member as text: what Redis keeps of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId, StripeId
from kvstore.units import Bytes


def record_of(member: Member) -> str:
    """What stays the same during one start of the node; state, boot id and takeover are kept beside it, where scripts can check them."""
    return json.dumps(
        {
            "role": str(member.role),
            "address": member.address,
            "zone": member.zone,
            "weight": member.weight,
            "capacity_bytes": member.capacity_bytes,
        },
        sort_keys=True,
    )


def view_of(epoch: int, records: Mapping[str, str], states: Mapping[str, str], hot: Mapping[str, str]) -> View:
    """The view from the three hashes. A member that a newer version wrote in another way is left out: it cannot be talked to."""
    members = []
    for node_id, text in sorted(states.items()):
        try:
            boot, state, _, takeover = text.split(":")
            record = json.loads(records[node_id])
            members.append(
                Member(
                    node_id=NodeId(node_id),
                    boot_id=BootId(bytes.fromhex(boot)),
                    role=Role(record["role"]),
                    address=str(record["address"]),
                    zone=str(record["zone"]),
                    weight=float(record["weight"]),
                    capacity_bytes=Bytes(int(record["capacity_bytes"])),
                    takeover=int(takeover) / 1000,
                    state=MemberState(state),
                )
            )
        except (KeyError, ValueError, TypeError):
            continue
    extra = {StripeId(bytes.fromhex(stripe)): int(text.split(":")[0]) for stripe, text in hot.items()}
    return View(Epoch(epoch), tuple(members), extra)


def permille(takeover: float) -> int:
    """As Redis keeps it: scripts compare whole numbers."""
    return round(takeover * 1000)
