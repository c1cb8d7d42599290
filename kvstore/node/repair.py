"""Repair: fetch from peers what this node should hold under the present view and does not."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.gets import AnswerProbe, ProbeRequested
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitItem,
    CommitRequested,
    ReservationsAbandoned,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.view import Member, MemberState
from kvstore.errors import LarderError
from kvstore.ids import BlockHash, BlockRef, Epoch, KeySpace, NodeId, StripeId, WriteToken
from kvstore.node.node import Node
from kvstore.registry.view_source import ViewSource
from kvstore.rpc.channel import ChannelPool
from kvstore.rpc.peer_stub import PeerBlock, PeerStub
from kvstore.transport import PayloadSlot, PayloadTransport, Peer, ReadOutcome, Ticket
from kvstore.units import Nanos, seconds

logger = logging.getLogger(__name__)

_BATCH_BLOCKS = 16
"""Reserved, pulled and committed together: a few MiB, so that repair takes little of the host tier at a time."""
_LIST_TIMEOUT: Nanos = seconds(60)
_PULL_TIMEOUT: Nanos = seconds(30)
_IDLE_TIMEOUT: Nanos = seconds(5)
_ACQUIRE_TIMEOUT: Nanos = seconds(5)
_SOURCE_STATES = (MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING)


@dataclass(slots=True)
class RepairCount:
    copied_blocks: int = 0
    missing_blocks: int = 0
    """Found at a peer and not here, so far."""
    copied_bytes: int = 0

    @property
    def failed_blocks(self) -> int:
        """Meaningful at the end: what no peer could give, or this node could not take."""
        return self.missing_blocks - self.copied_blocks


class Repair:
    """One run. A peer that fails is passed over: what it alone had stays missing, and is counted."""

    def __init__(self, node: Node, *, node_id: NodeId, views: ViewSource, channels: ChannelPool, transport: PayloadTransport) -> None:
        self._node = node
        self._node_id = node_id
        self._views = views
        self._channels = channels
        self._transport = transport
        self.count = RepairCount()

    async def run(self) -> AsyncGenerator[RepairCount, None]:
        """Yields the running count after each batch."""
        view = self._views.view
        missed: set[tuple[KeySpace, BlockHash]] = set()
        for peer in view.stores:
            if peer.node_id == self._node_id or peer.state not in _SOURCE_STATES:
                continue
            for key_space, blocks in await self._missing_here(peer, view.epoch):
                blocks.sort(key=lambda block: block.block.index)  # heads first: a prefix without its head is worthless
                for start in range(0, len(blocks), _BATCH_BLOCKS):
                    batch = blocks[start : start + _BATCH_BLOCKS]
                    missed.update((key_space, block.block.hash) for block in batch)
                    self.count.missing_blocks = self.count.copied_blocks + len(missed)
                    copied, here = await self._copy(peer, key_space, batch)
                    missed.difference_update((key_space, block.block.hash) for block in copied + here)
                    self.count.copied_blocks += len(copied)
                    self.count.copied_bytes += sum(block.payload_bytes for block in copied)
                    self.count.missing_blocks = self.count.copied_blocks + len(missed)
                    yield self.count

    async def _missing_here(self, peer: Member, epoch: Epoch) -> list[tuple[KeySpace, list[PeerBlock]]]:
        missing: list[tuple[KeySpace, list[PeerBlock]]] = []
        listing = PeerStub(self._channels.get(peer.address)).list_owned(self._node_id, epoch, timeout=_LIST_TIMEOUT)
        try:
            async with aclosing(listing):
                async for key_space, blocks in listing:
                    probe = ProbeRequested(
                        request_id=self._node.next_request_id(),
                        key_space=key_space,
                        hashes=tuple(block.block.hash for block in blocks),
                    )
                    present = (await self._node.ask(probe, AnswerProbe)).present
                    missing.append((key_space, [block for block, here in zip(blocks, present, strict=True) if not here]))
        except LarderError as error:
            logger.warning("repair: %s did not list its blocks: %s", peer.node_id, error)
        return missing

    async def _copy(self, peer: Member, key_space: KeySpace, blocks: Sequence[PeerBlock]) -> tuple[list[PeerBlock], list[PeerBlock]]:
        """(copied now, here already by another way)."""
        items = tuple(ReserveItem(block.block, block.payload_bytes, block.ttl, block.rung) for block in blocks)
        reserve = ReserveRequested(request_id=self._node.next_request_id(), key_space=key_space, items=items)
        answers = list(zip(blocks, (await self._node.ask(reserve, AnswerReserve)).grants, strict=True))
        granted = [(block, grant.write_token) for block, grant in answers if grant.status is ReserveStatus.GRANTED]
        try:
            await self._pull(peer, key_space, granted)
        except LarderError as error:
            logger.warning("repair: %s broke off: %s", peer.node_id, error)  # what came whole is still good
        except BaseException:
            self._node.feed(ReservationsAbandoned(write_tokens=tuple(token for _, token in granted)))
            raise
        commit = CommitRequested(request_id=self._node.next_request_id(), items=tuple(self._commit_item(*one) for one in granted))
        statuses = (await self._node.ask(commit, AnswerCommit)).statuses
        copied = [block for (block, _), status in zip(granted, statuses, strict=True) if status.is_stored]
        return copied, [block for block, grant in answers if grant.status is ReserveStatus.EXISTS]

    def _commit_item(self, block: PeerBlock, token: WriteToken) -> CommitItem:
        return CommitItem(token, block.checksum, self._node.incoming.close(token))

    async def _pull(self, peer: Member, key_space: KeySpace, granted: Sequence[tuple[PeerBlock, WriteToken]]) -> None:
        """As any reader: under a lease that ends with this call, by the best transport. Bytes go into the reserved extents; what did not
        come whole is found out by the commit."""
        if not granted:
            return
        source = Peer(peer.node_id, peer.boot_id, peer.address)
        stub = await self._transport.stub(source)
        alone = [_alone(block.block.hash) for block, _ in granted]
        acquired = await stub.acquire_prefix(key_space, alone, ttl=_PULL_TIMEOUT, timeout=_ACQUIRE_TIMEOUT)
        if not acquired.lease_id:
            return
        # Not straight into the extents: a reservation may end while its bytes are on the way.
        slots = [PayloadSlot(block.block.hash, memoryview(bytearray(block.payload_bytes))) for block, _ in granted]
        payloads = self._transport.read(
            source,
            acquired.lease_id,
            key_space,
            slots,
            ticket=Ticket.from_bytes(acquired.ticket),
            timeout=_PULL_TIMEOUT,
            idle_timeout=_IDLE_TIMEOUT,
        )
        corrupt: list[BlockHash] = []
        try:
            async with aclosing(payloads):
                async for payload in payloads:
                    (block, token), data = granted[payload.item], slots[payload.item].into
                    if payload.outcome is not ReadOutcome.OK:
                        continue
                    if payload_checksum(data) == block.checksum:
                        self._node.incoming.take(token, 0, data)
                    else:
                        corrupt.append(block.block.hash)  # the peer shall look at its copy
        finally:
            await stub.release(acquired.lease_id, key_space, corrupt_hashes=corrupt, timeout=_ACQUIRE_TIMEOUT)


def _alone(digest: BlockHash) -> BlockRef:
    """A chain of its own: a repair takes single blocks."""
    return BlockRef(hash=digest, parent=digest, stripe=StripeId(digest), index=0)
