"""Sending copies to other nodes: a peer reads here as any reader does, and writes there as any writer does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.core.events.gets import AcquireRequested, AnswerAcquire, AnswerRelease, ReadOutcome, ReadStatus, ReleaseRequested
from kvstore.core.events.puts import CommitStatus, ReserveItem, ReserveStatus
from kvstore.core.events.questions import AnswerDescribe, DescribeRequested, OwnedBlock
from kvstore.core.repair_plan import Shipment
from kvstore.core.upkeep.surroundings import PeerCalls, PeerGrant, PeerWrite, Surroundings
from kvstore.core.view import Member
from kvstore.errors import CorruptPayload, LarderError
from kvstore.ids import BlockHash, Epoch, KeySpace
from kvstore.units import Nanos, seconds

CALL_TIMEOUT: Nanos = seconds(5)
_WRITE_TIMEOUT: Nanos = seconds(30)
_VERIFY_TIMEOUT: Nanos = seconds(60)
_LEASE: Nanos = seconds(40)
_HASHES_OF_A_CALL = 256
"""Probed in one go over there: a millisecond or two."""

_ANY_EPOCH = Epoch(0)
"""Every node knows a later one."""

_HERE = (ReserveStatus.EXISTS, ReserveStatus.PENDING)
"""Nothing to send: the block is there, or another writer is about to put it there."""


@dataclass(slots=True)
class Sent:
    sent_blocks: int = 0
    sent_bytes: int = 0
    refused_blocks: int = 0
    """No room or quota there."""
    lost_blocks: int = 0
    """Did not arrive whole, or could not be read here."""


class Sender:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    async def held_by(
        self, member: Member, key_space: KeySpace, hashes: Sequence[BlockHash], *, verify: bool = False, epoch: Epoch = _ANY_EPOCH
    ) -> set[BlockHash]:
        """Which of them the node has; with `verify` it reads each back first. Raises LarderError, StaleView when it does not know that
        epoch yet."""
        held: set[BlockHash] = set()
        for start in range(0, len(hashes), _HASHES_OF_A_CALL):
            part = hashes[start : start + _HASHES_OF_A_CALL]
            answers = await self._surroundings.peer(member).holds(
                key_space, part, verify=verify, epoch=epoch, timeout=_VERIFY_TIMEOUT if verify else CALL_TIMEOUT
            )
            held.update(digest for digest, here in zip(part, answers, strict=True) if here)
        return held

    async def send(self, member: Member, shipment: Shipment) -> Sent:
        """Blocks that are gone here by now, or are there already, cost nothing. Raises LarderError when the node fails as a whole."""
        request = DescribeRequested(request_id=self._surroundings.next_request_id(), key_space=shipment.key_space, hashes=shipment.blocks)
        found = [block for block in (await self._surroundings.ask(request, AnswerDescribe)).blocks if block is not None]
        found.sort(key=lambda owned: owned.block.index)  # a prefix without its head is worthless
        if not found:
            return Sent()
        peer = self._surroundings.peer(member)
        items = [ReserveItem(owned.block, owned.payload_bytes, owned.ttl, owned.rung) for owned in found]
        grants = await peer.reserve(shipment.key_space, items, spare_room_only=shipment.spare_room_only, timeout=CALL_TIMEOUT)
        granted = [(owned, grant) for owned, grant in zip(found, grants, strict=True) if grant.status is ReserveStatus.GRANTED]
        sent = Sent(refused_blocks=sum(grant.status not in _HERE for grant in grants) - len(granted))
        if granted:
            statuses = await self._write(peer, shipment.key_space, granted)
            for (owned, _), status in zip(granted, statuses, strict=True):
                if status.is_stored:
                    sent.sent_blocks += 1
                    sent.sent_bytes += owned.payload_bytes
                else:
                    sent.lost_blocks += 1
        return sent

    async def _write(self, peer: PeerCalls, key_space: KeySpace, granted: Sequence[tuple[OwnedBlock, PeerGrant]]) -> list[CommitStatus]:
        """Straight from where the payloads lie, under a lease of this node on its own copies."""
        own = self._surroundings
        acquire = AcquireRequested(
            request_id=own.next_request_id(),
            key_space=key_space,
            blocks=tuple(owned.block for owned, _ in granted),
            ttl=_LEASE,
            counts=False,
        )
        lease_id = (await own.ask(acquire, AnswerAcquire)).lease_id
        if not lease_id:
            return [CommitStatus.EXPIRED] * len(granted)
        read = await own.open_read(lease_id, key_space, [owned.block.hash for owned, _ in granted], counts=False)
        writes: list[PeerWrite] = []
        try:
            for number, (item, (_, grant)) in enumerate(zip(read.items, granted, strict=True)):
                if item.status is not ReadStatus.OK or item.extent is None or not read.is_open:
                    continue
                try:
                    payload = await own.read_payload(item.extent, item.checksum)
                except CorruptPayload:
                    read.outcomes[number] = ReadOutcome.CORRUPT
                    continue
                except LarderError:
                    read.outcomes[number] = ReadOutcome.IO_ERROR
                    continue
                read.outcomes[number] = ReadOutcome.OK
                writes.append(PeerWrite(grant, payload))
            refused = await peer.write(writes, timeout=_WRITE_TIMEOUT) if writes else frozenset()
        finally:
            read.finish()
            release = ReleaseRequested(request_id=own.next_request_id(), lease_id=lease_id, key_space=key_space)
            await own.ask(release, AnswerRelease)
        taken = {write.grant.write_token for write in writes} - refused
        commits = [(grant.write_token, owned.checksum) for owned, grant in granted if grant.write_token in taken]
        answers = (
            dict(zip((token for token, _ in commits), await peer.commit(commits, timeout=CALL_TIMEOUT), strict=True)) if commits else {}
        )
        return [answers.get(grant.write_token, CommitStatus.EXPIRED) for _, grant in granted]


def by_key_space(blocks: Iterable[tuple[KeySpace, Sequence[BlockHash]]]) -> dict[KeySpace, list[BlockHash]]:
    grouped: dict[KeySpace, list[BlockHash]] = {}
    for key_space, hashes in blocks:
        grouped.setdefault(key_space, []).extend(hashes)
    return grouped
