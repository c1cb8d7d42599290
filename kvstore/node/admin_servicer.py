"""The admin service: what kvctl calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.events.removals import AnswerEvict, EvictRequested
from kvstore.core.events.verification import AnswerVerify, CopyVerdict, VerifyRequested
from kvstore.core.events.wishes import AnswerPin, AnswerQuota, AnswerUnpin, PinKind, PinRequested, PinStatus, QuotaRequested, UnpinRequested
from kvstore.core.pins import MAX_PIN_TTL
from kvstore.core.upkeep.handover import Handover
from kvstore.core.upkeep.repairer import Repairer
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.ids import Namespace
from kvstore.node.event_feed import EventFeed
from kvstore.node.node import Node
from kvstore.node.repair import Repair
from kvstore.node.saved_wishes import SavedWishes
from kvstore.node.walk import walk
from kvstore.rpc.convert import block_refs_from_proto, hashes_from_proto, key_space_from_proto, key_space_to_proto, namespace_from_proto
from kvstore.rpc.server import guarded
from kvstore.units import Bytes, milliseconds

_MOST_KEY_SPACES = 256
_PROGRESS_EVERY = 64
"""Copies between two progress messages of a verify."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(
        self,
        node: Node,
        repairer: Repairer,
        handover: Handover,
        *,
        status: Callable[[], admin_pb2.StatusResponse],
        make_repair: Callable[[], Repair],
        drain: Callable[[], Awaitable[None]],
        wishes: SavedWishes,
        feed: EventFeed,
    ) -> None:
        self._feed = feed
        self._node = node
        self._repairer = repairer
        self._handover = handover
        self._drain = drain
        self._status = status
        self._make_repair = make_repair
        self._wishes = wishes
        self._saving = asyncio.Lock()

    @guarded
    async def Status(self, request: admin_pb2.StatusRequest, context: Any) -> admin_pb2.StatusResponse:
        return self._status()

    @guarded
    async def Locate(self, request: admin_pb2.LocateRequest, context: Any) -> admin_pb2.LocateResponse:
        locate = LocateRequested(
            request_id=self._node.next_request_id(),
            key_space=key_space_from_proto(request.key_space),
            hashes=tuple(block.hash for block in block_refs_from_proto(request.blocks)),
        )
        answer = await self._node.ask(locate, AnswerLocate)
        return admin_pb2.LocateResponse(
            blocks=[
                admin_pb2.BlockLocation(
                    tiers=[int(tier) for tier in place.tiers],
                    payload_bytes=place.copies[0].payload_bytes if place.copies else 0,
                    leases=place.leases,
                    rungs=[copy.rung for copy in place.copies],
                    copy_bytes=[copy.payload_bytes for copy in place.copies],
                )
                for place in answer.places
            ]
        )

    @guarded
    async def Evict(self, request: admin_pb2.EvictRequest, context: Any) -> admin_pb2.EvictResponse:
        named = request.HasField("key_space")
        if sum((request.all, bool(request.namespace), named)) != 1:
            raise InvalidRequest("evict needs exactly one of: all, namespace, key_space (with or without hashes)")
        if request.hashes and not named:
            raise InvalidRequest("evict: hashes need a key_space")
        evict = EvictRequested(
            request_id=self._node.next_request_id(),
            everything=request.all,
            namespace=Namespace(request.namespace) if request.namespace else None,
            key_space=key_space_from_proto(request.key_space) if named else None,
            hashes=tuple(hashes_from_proto(request.hashes)),
        )
        answer = await self._node.ask(evict, AnswerEvict)
        return admin_pb2.EvictResponse(
            evicted_copies=answer.evicted_copies, evicted_bytes=answer.evicted_bytes, leased_copies_kept=answer.leased_copies_kept
        )

    @guarded
    async def Pin(self, request: admin_pb2.PinRequest, context: Any) -> admin_pb2.PinResponse:
        ttl = milliseconds(request.ttl_ms)
        if not 0 < ttl <= MAX_PIN_TTL:
            raise InvalidRequest(f"ttl_ms must be 1 to {MAX_PIN_TTL // milliseconds(1)}: every pin ends, {request.ttl_ms} is none of these")
        pin = PinRequested(
            request_id=self._node.next_request_id(),
            key_space=key_space_from_proto(request.key_space),
            hashes=tuple(hashes_from_proto(request.hashes)),
            kind=PinKind.HARD if request.hard else PinKind.SOFT,
            ttl=ttl,
        )
        statuses = (await self._node.ask(pin, AnswerPin)).statuses
        await self._save()
        return admin_pb2.PinResponse(
            pinned_blocks=statuses.count(PinStatus.PINNED),
            absent_blocks=statuses.count(PinStatus.ABSENT),
            refused_blocks=statuses.count(PinStatus.NO_SHARE),
            lasts=self._wishes.lasts,
        )

    @guarded
    async def Unpin(self, request: admin_pb2.UnpinRequest, context: Any) -> admin_pb2.UnpinResponse:
        unpin = UnpinRequested(
            request_id=self._node.next_request_id(),
            key_space=key_space_from_proto(request.key_space),
            hashes=tuple(hashes_from_proto(request.hashes)),
        )
        answer = await self._node.ask(unpin, AnswerUnpin)
        await self._save()
        return admin_pb2.UnpinResponse(unpinned_blocks=sum(answer.unpinned))

    @guarded
    async def Quota(self, request: admin_pb2.QuotaRequest, context: Any) -> admin_pb2.QuotaResponse:
        namespace = namespace_from_proto(request.namespace)
        limit = Bytes(request.limit_bytes) if request.HasField("limit_bytes") else None
        quota = QuotaRequested(request_id=self._node.next_request_id(), namespace=namespace, change=request.change, limit=limit)
        answer = await self._node.ask(quota, AnswerQuota)
        if request.change:
            self._wishes.quotas[namespace] = limit
            await self._save()
        return admin_pb2.QuotaResponse(used_bytes=answer.used, limit_bytes=answer.limit, lasts=self._wishes.lasts)

    async def _save(self) -> None:
        """Before the answer, so that what was answered is there after a restart."""
        async with self._saving:
            try:
                await asyncio.to_thread(self._wishes.save, self._node.state.pins())
            except OSError as error:
                raise Unavailable(f"it holds now, but could not be saved for the next start: {error.strerror}") from None

    @guarded
    async def Recall(self, request: admin_pb2.LocateRequest, context: Any) -> admin_pb2.RecallResponse:
        key_space, now, departures = key_space_from_proto(request.key_space), self._node.now(), self._feed.departures
        found = [departures.find(key_space, block.hash) for block in block_refs_from_proto(request.blocks)]
        spaces = sorted(self._repairer.catalog.key_spaces())[:_MOST_KEY_SPACES]
        return admin_pb2.RecallResponse(
            departures=[
                admin_pb2.Departure()
                if gone is None
                else admin_pb2.Departure(reason=gone.reason, ago_ms=(now - gone.at) // milliseconds(1))
                for gone in found
            ],
            key_spaces=map(key_space_to_proto, spaces),
            forgotten=departures.forgotten,
        )

    @guarded
    async def Events(self, request: admin_pb2.EventsRequest, context: Any) -> None:
        async with aclosing(self._feed.follow(self._node, boot_id=request.boot_id, after=request.after)) as events:
            async for event in events:
                await context.write(event)

    @guarded
    async def Verify(self, request: admin_pb2.VerifyRequest, context: Any) -> None:
        """One copy after the other, so that it takes at most one thread from readers."""
        progress = admin_pb2.VerifyProgress(total_copies=sum(tier.copies for tier in self._node.state.status().tiers))
        async with aclosing(walk(self._node)) as blocks:
            async for key_space, owned in blocks:
                for tier in owned.tiers:
                    verify = VerifyRequested(request_id=self._node.next_request_id(), key_space=key_space, hash=owned.block.hash, tier=tier)
                    verdict = await self._node.ask(verify, AnswerVerify)
                    progress.checked_copies += 1
                    progress.checked_bytes += verdict.checked_bytes
                    progress.bad_copies += verdict.verdict is CopyVerdict.BAD
                    if progress.checked_copies % _PROGRESS_EVERY == 0:
                        progress.total_copies = max(progress.total_copies, progress.checked_copies)
                        await context.write(progress)
        progress.total_copies = progress.checked_copies
        await context.write(progress)

    @guarded
    async def Repair(self, request: admin_pb2.RepairRequest, context: Any) -> None:
        repair = self._make_repair()
        async with aclosing(repair.run()) as counts:
            async for count in counts:
                await context.write(
                    admin_pb2.RepairProgress(
                        copied_blocks=count.copied_blocks, missing_blocks=count.missing_blocks, copied_bytes=count.copied_bytes
                    )
                )
        count = repair.count
        await context.write(
            admin_pb2.RepairProgress(
                copied_blocks=count.copied_blocks,
                missing_blocks=count.missing_blocks,
                failed_blocks=count.failed_blocks,
                copied_bytes=count.copied_bytes,
            )
        )

    @guarded
    async def Drain(self, request: admin_pb2.DrainStoreRequest, context: Any) -> admin_pb2.DrainStoreResponse:
        await self._drain()
        return admin_pb2.DrainStoreResponse()

    @guarded
    async def Rebalance(self, request: admin_pb2.RebalanceRequest, context: Any) -> admin_pb2.RebalanceResponse:
        if not self._repairer.config.rate and not request.dry_run:
            raise InvalidRequest("repair.rate is 0 on this node: it sends nothing by itself")
        found = await self._handover.misplaced()
        moves: dict[str, admin_pb2.Moves] = {}
        for shipment in found.shipments:
            move = moves.setdefault(shipment.target, admin_pb2.Moves(node_id=shipment.target))
            move.stripes += 1
            move.blocks += len(shipment.blocks)
            move.bytes += shipment.bytes
            if not request.dry_run:
                self._repairer.queue.put(shipment)
        return admin_pb2.RebalanceResponse(
            moves=list(moves.values()), surplus_blocks=found.surplus_blocks, surplus_bytes=found.surplus_bytes
        )
