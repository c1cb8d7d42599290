"""What a node says of its repair, as the admin service tells it."""

from __future__ import annotations

from kvpb.v1 import admin_pb2

from kvstore.core.upkeep.handover import Handover
from kvstore.core.upkeep.repairer import Repairer


def repair_status(repairer: Repairer) -> admin_pb2.RepairStatus:
    """Cost: O(what waits)."""
    waiting = repairer.waiting()
    waiting_bytes = sum(shipment.bytes for shipment in waiting)
    rate = repairer.bytes_per_s() or float(repairer.config.rate)
    counters = repairer.counters
    return admin_pb2.RepairStatus(
        settled_epoch=repairer.settled_epoch,
        waiting_stripes=len(waiting),
        endangered_stripes=sum(shipment.living == 1 for shipment in waiting),
        waiting_blocks=sum(len(shipment.blocks) for shipment in waiting),
        waiting_bytes=waiting_bytes,
        sent_blocks=counters.sent_blocks,
        sent_bytes=counters.sent_bytes,
        refused_blocks=counters.refused_blocks,
        failed_blocks=counters.failed_blocks,
        bytes_per_s=int(repairer.bytes_per_s()),
        eta_ms=max(1, int(waiting_bytes / rate * 1000)) if waiting and rate else 0,
        found_blocks=counters.found_blocks,
        dropped_blocks=counters.dropped_blocks,
    )


def drain_status(handover: Handover) -> admin_pb2.DrainStatus | None:
    """None: it does not drain."""
    progress = handover.drain_progress()
    if progress is None:
        return None
    return admin_pb2.DrainStatus(
        safe_to_stop=progress.safe_to_stop,
        blocks=progress.blocks,
        remaining_blocks=progress.remaining_blocks,
        remaining_bytes=progress.remaining_bytes,
        no_room_blocks=progress.no_room_blocks,
    )
