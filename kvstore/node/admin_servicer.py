"""The admin service: what kvctl calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from kvpb.v1 import admin_pb2, admin_pb2_grpc

from kvstore.core.events import (
    AnswerEvict,
    AnswerLocate,
    AnswerVerify,
    CopyVerdict,
    EvictRequested,
    LocateRequested,
    VerifyRequested,
)
from kvstore.errors import InvalidRequest
from kvstore.ids import Namespace
from kvstore.node.handover import Handover
from kvstore.node.node import Node
from kvstore.node.repair import Repair
from kvstore.node.repairer import Repairer
from kvstore.node.walk import walk
from kvstore.rpc.convert import block_refs_from_proto, hashes_from_proto, key_space_from_proto
from kvstore.rpc.server import guarded

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
    ) -> None:
        self._node = node
        self._repairer = repairer
        self._handover = handover
        self._drain = drain
        self._status = status
        self._make_repair = make_repair

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
                admin_pb2.BlockLocation(tiers=[int(tier) for tier in place.tiers], payload_bytes=place.payload_bytes, leases=place.leases)
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
