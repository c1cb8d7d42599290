"""The admin service of one store node as kvctl sees it: types of ours in and out, a deadline on every call.

Every method raises a LarderError, as in store_stub.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.codec.rung_code import rung_name
from kvstore.core.extent import Tier
from kvstore.core.picture import BlockEvent, BlockEventKind
from kvstore.ids import BlockRef, BootId, Epoch, KeySpace, NodeId, RungCode
from kvstore.rpc.calls import answer_of, messages_of
from kvstore.rpc.convert import MAX_BATCH_ITEMS, block_ref_from_proto, block_refs_to_proto, key_space_from_proto, key_space_to_proto
from kvstore.units import Nanos, milliseconds, to_seconds


@dataclass(frozen=True, slots=True)
class TierReport:
    tier: str
    capacity_bytes: int
    used_bytes: int
    copies: int


@dataclass(frozen=True, slots=True)
class StagingReport:
    """Memory through which puts pass on a node without a host tier."""

    capacity_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a node owes to others; see admin.proto."""

    settled_epoch: int
    waiting_stripes: int
    endangered_stripes: int
    waiting_blocks: int
    waiting_bytes: int
    sent_blocks: int
    sent_bytes: int
    refused_blocks: int
    failed_blocks: int
    bytes_per_s: int
    eta_ms: int
    found_blocks: int
    dropped_blocks: int


@dataclass(frozen=True, slots=True)
class DrainReport:
    safe_to_stop: bool
    blocks: int
    remaining_blocks: int
    remaining_bytes: int
    no_room_blocks: int


@dataclass(frozen=True, slots=True)
class Move:
    node_id: str
    """To whom."""
    stripes: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RebalanceReport:
    moves: tuple[Move, ...]
    surplus_blocks: int
    surplus_bytes: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    node_id: str
    boot_id: str
    """Hex."""
    epoch: int
    state: str
    uptime_ms: int
    tiers: tuple[TierReport, ...]
    staging: StagingReport | None
    """None on a node with a host tier."""
    blocks: int
    leases: int
    reservations: int
    operations: int
    """Reads, copies and writes of payloads under way."""
    counters: dict[str, int]
    cpu_ns: int
    """User and system time of the process since its start."""
    data_connections: dict[str, int]
    """Open now, by kind of door."""
    repair: RepairReport
    drain: DrainReport | None
    """None: it does not drain."""


@dataclass(frozen=True, slots=True)
class BlockReport:
    tiers: tuple[str, ...]
    """Empty: not on this node."""
    payload_bytes: int
    """Of the first copy."""
    leases: int
    rungs: tuple[str, ...]
    """Of each copy."""
    copy_bytes: tuple[int, ...]
    """Of each copy."""


@dataclass(frozen=True, slots=True)
class Evicted:
    copies: int
    bytes: int
    leased_copies_kept: int


@dataclass(frozen=True, slots=True)
class Pinned:
    pinned_blocks: int
    absent_blocks: int
    refused_blocks: int
    """Hard pins have all of the room that they may have."""
    lasts: bool
    """Over a restart."""


@dataclass(frozen=True, slots=True)
class QuotaReport:
    used_bytes: int
    limit_bytes: int | None
    """None: no limit."""
    lasts: bool
    """Over a restart."""


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    checked_copies: int
    total_copies: int
    bad_copies: int
    checked_bytes: int


@dataclass(frozen=True, slots=True)
class RepairProgress:
    copied_blocks: int
    missing_blocks: int
    failed_blocks: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class DepartureReport:
    reason: str
    ago_ms: int


@dataclass(frozen=True, slots=True)
class RecallReport:
    departures: tuple[DepartureReport | None, ...]
    """One per block; None: none is remembered."""
    key_spaces: tuple[KeySpace, ...]
    forgotten: int


class AdminStub:
    """Calls on one channel. Cheap to make."""

    def __init__(self, channel: Any) -> None:
        self._stub = admin_pb2_grpc.AdminServiceStub(channel)

    async def status(self, *, timeout: Nanos) -> NodeReport:
        answer = await answer_of(self._stub.Status(admin_pb2.StatusRequest(), timeout=to_seconds(timeout)))
        return NodeReport(
            node_id=answer.node_id,
            boot_id=answer.boot_id.hex(),
            epoch=answer.epoch,
            state=answer.state,
            uptime_ms=answer.uptime_ms,
            tiers=tuple(TierReport(_tier_name(tier.tier), tier.capacity_bytes, tier.used_bytes, tier.copies) for tier in answer.tiers),
            staging=StagingReport(answer.staging.capacity_bytes, answer.staging.used_bytes) if answer.HasField("staging") else None,
            blocks=answer.blocks,
            leases=answer.leases,
            reservations=answer.reservations,
            operations=answer.operations,
            counters=dict(sorted(answer.counters.items())),
            cpu_ns=answer.cpu_ns,
            data_connections=dict(sorted(answer.data_connections.items())),
            repair=RepairReport(**{each.name: getattr(answer.repair, each.name) for each in dataclasses.fields(RepairReport)}),
            drain=DrainReport(**{each.name: getattr(answer.drain, each.name) for each in dataclasses.fields(DrainReport)})
            if answer.HasField("drain")
            else None,
        )

    async def locate(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, timeout: Nanos) -> list[BlockReport]:
        """One report per block, in order."""
        reports: list[BlockReport] = []
        for start in range(0, len(blocks), MAX_BATCH_ITEMS):
            request = admin_pb2.LocateRequest(
                key_space=key_space_to_proto(key_space), blocks=block_refs_to_proto(blocks[start : start + MAX_BATCH_ITEMS])
            )
            answer = await answer_of(self._stub.Locate(request, timeout=to_seconds(timeout)))
            reports += [
                BlockReport(
                    tuple(map(_tier_name, block.tiers)),
                    block.payload_bytes,
                    block.leases,
                    tuple(rung_name(RungCode(rung)) for rung in block.rungs),
                    tuple(block.copy_bytes),
                )
                for block in answer.blocks
            ]
        return reports

    async def recall(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, timeout: Nanos) -> RecallReport:
        """Why blocks are not there, as far as the node remembers."""
        departures: list[DepartureReport | None] = []
        spaces: dict[KeySpace, None] = {}
        forgotten = 0
        for start in range(0, len(blocks), MAX_BATCH_ITEMS):
            request = admin_pb2.LocateRequest(
                key_space=key_space_to_proto(key_space), blocks=block_refs_to_proto(blocks[start : start + MAX_BATCH_ITEMS])
            )
            answer = await answer_of(self._stub.Recall(request, timeout=to_seconds(timeout)))
            departures += [DepartureReport(gone.reason, gone.ago_ms) if gone.reason else None for gone in answer.departures]
            spaces |= dict.fromkeys(map(key_space_from_proto, answer.key_spaces))
            forgotten = answer.forgotten
        return RecallReport(tuple(departures), tuple(spaces), forgotten)

    async def evict_all(self, *, timeout: Nanos) -> Evicted:
        return await self._evict(admin_pb2.EvictRequest(all=True), timeout=timeout)

    async def evict_namespace(self, namespace: str, *, timeout: Nanos) -> Evicted:
        return await self._evict(admin_pb2.EvictRequest(namespace=namespace), timeout=timeout)

    async def evict_blocks(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, timeout: Nanos) -> Evicted:
        request = admin_pb2.EvictRequest(key_space=key_space_to_proto(key_space), hashes=[block.hash for block in blocks])
        return await self._evict(request, timeout=timeout)

    async def pin(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, hard: bool, ttl: Nanos, timeout: Nanos) -> Pinned:
        request = admin_pb2.PinRequest(
            key_space=key_space_to_proto(key_space), hashes=[block.hash for block in blocks], hard=hard, ttl_ms=ttl // milliseconds(1)
        )
        answer = await answer_of(self._stub.Pin(request, timeout=to_seconds(timeout)))
        return Pinned(answer.pinned_blocks, answer.absent_blocks, answer.refused_blocks, answer.lasts)

    async def unpin(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, timeout: Nanos) -> int:
        """How many had a pin."""
        request = admin_pb2.UnpinRequest(key_space=key_space_to_proto(key_space), hashes=[block.hash for block in blocks])
        return int((await answer_of(self._stub.Unpin(request, timeout=to_seconds(timeout)))).unpinned_blocks)

    async def quota(self, namespace: str, *, timeout: Nanos) -> QuotaReport:
        return await self._quota(admin_pb2.QuotaRequest(namespace=namespace), timeout=timeout)

    async def set_quota(self, namespace: str, limit: int | None, *, timeout: Nanos) -> QuotaReport:
        """`limit` None: no limit."""
        return await self._quota(admin_pb2.QuotaRequest(namespace=namespace, change=True, limit_bytes=limit), timeout=timeout)

    async def _quota(self, request: admin_pb2.QuotaRequest, *, timeout: Nanos) -> QuotaReport:
        answer = await answer_of(self._stub.Quota(request, timeout=to_seconds(timeout)))
        return QuotaReport(answer.used_bytes, answer.limit_bytes if answer.HasField("limit_bytes") else None, answer.lasts)

    async def events(self, *, boot_id: bytes = b"", after: int = 0) -> AsyncGenerator[BlockEvent, None]:
        """What the node holds and every change, without end and without a deadline: until it is closed or the node is gone. `boot_id`,
        `after`: of the last event seen; without them it begins with a snapshot."""
        async for message in messages_of(self._stub.Events(admin_pb2.EventsRequest(boot_id=boot_id, after=after))):
            named = message.HasField("block")
            yield BlockEvent(
                kind=BlockEventKind(message.kind),
                node_id=NodeId(message.node_id),
                boot_id=BootId(message.boot_id),
                epoch=Epoch(message.epoch),
                sequence=message.sequence,
                key_space=key_space_from_proto(message.key_space) if named else None,
                block=block_ref_from_proto(message.block) if named else None,
                reason=message.reason,
            )

    async def verify(self, *, timeout: Nanos) -> AsyncGenerator[VerifyProgress, None]:
        """Progress as it comes; the last one is the result."""
        async for message in messages_of(self._stub.Verify(admin_pb2.VerifyRequest(), timeout=to_seconds(timeout))):
            yield VerifyProgress(message.checked_copies, message.total_copies, message.bad_copies, message.checked_bytes)

    async def repair(self, *, timeout: Nanos) -> AsyncGenerator[RepairProgress, None]:
        """Progress as it comes; the last one is the result."""
        async for message in messages_of(self._stub.Repair(admin_pb2.RepairRequest(), timeout=to_seconds(timeout))):
            yield RepairProgress(message.copied_blocks, message.missing_blocks, message.failed_blocks, message.copied_bytes)

    async def drain(self, *, timeout: Nanos) -> None:
        """The node owns nothing from now on and hands over what it has; `status` says how far it is."""
        await answer_of(self._stub.Drain(admin_pb2.DrainStoreRequest(), timeout=to_seconds(timeout)))

    async def rebalance(self, *, dry_run: bool, timeout: Nanos) -> RebalanceReport:
        answer = await answer_of(self._stub.Rebalance(admin_pb2.RebalanceRequest(dry_run=dry_run), timeout=to_seconds(timeout)))
        moves = tuple(Move(move.node_id, move.stripes, move.blocks, move.bytes) for move in answer.moves)
        return RebalanceReport(moves, answer.surplus_blocks, answer.surplus_bytes)

    async def _evict(self, request: admin_pb2.EvictRequest, *, timeout: Nanos) -> Evicted:
        answer = await answer_of(self._stub.Evict(request, timeout=to_seconds(timeout)))
        return Evicted(answer.evicted_copies, answer.evicted_bytes, answer.leased_copies_kept)


def _tier_name(number: int) -> str:
    return Tier(number).name.lower() if number in Tier.__members__.values() else f"tier-{number}"
