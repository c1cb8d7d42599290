"""Payloads that lie in an arena mapped into this process: read without a word to the node.

The lease keeps the bytes where they are, and whether it lasted is looked at after the last touch of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvstore.client import metrics
from kvstore.client.answers import ReadBlock, owned
from kvstore.client.config import ClientConfig
from kvstore.client.lease_keeper import LeaseKeeper
from kvstore.client.node_calls import NodeCalls
from kvstore.client.prefix_lease import HeldLease, HeldState, LeasedCopy, PrefixLease
from kvstore.clock import Clock
from kvstore.codec.checksum import payload_checksum
from kvstore.ids import NodeId
from kvstore.transport import MappedArena, ReadOutcome
from kvstore.transport.shm_transport import INLINE_COPY_BYTES
from kvstore.units import MIB

_TURN_BYTES = 16 * MIB
"""Touched on the event loop without a pause at most: two milliseconds."""


_PORTION_BYTES = 4 * MIB
"""Touched before the first of them is handed out, and before it is looked whether their leases last."""

Mapped = tuple[int, LeasedCopy, memoryview]
"""Position in the run, where it lies, and its bytes in the arena."""


class MappedRead:
    """Of one read of one lease."""

    def __init__(
        self, lease: PrefixLease, nodes: NodeCalls, keeper: LeaseKeeper, *, config: ClientConfig, clock: Clock, in_place: bool
    ) -> None:
        """`in_place`: payloads are not copied out of the arena."""
        self._lease = lease
        self._nodes = nodes
        self._keeper = keeper
        self._clock = clock
        self._in_place = in_place
        self._verify = config.verify_mapped
        self._arenas: dict[NodeId, MappedArena | None] = {}
        self._still_good: dict[HeldLease, partial[bool]] = {}
        self._hits = 0
        self._touched = 0

    def view(self, copy: LeasedCopy) -> memoryview | None:
        """Its bytes, if they are mapped."""
        if copy.arena_offset is None:
            return None
        node_id = copy.held.node_id
        if node_id not in self._arenas:
            self._arenas[node_id] = self._nodes.arena(node_id)
        arena = self._arenas[node_id]
        return None if arena is None else arena.view(copy.arena_offset, copy.payload_bytes)

    def quick(self, indices: Sequence[int]) -> tuple[list[list[Mapped]], list[int]]:
        """(What is mapped, leased, and touched (if at all) in less than half a millisecond a block, in portions; the rest)."""
        copies, untouched = self._lease.copies, self._in_place and not self._verify
        portions: list[list[Mapped]] = []
        rest: list[int] = []
        left = 0
        for index in indices:
            copy = copies[index]
            size = copy.payload_bytes
            quick = (untouched or size <= INLINE_COPY_BYTES) and copy.held.state is HeldState.HELD
            found = self.view(copy) if quick else None
            if found is None:
                rest.append(index)
                continue
            if left < size:
                portions.append([])
                left = _PORTION_BYTES
            portions[-1].append((index, copy, found))
            left -= 0 if untouched else size
        return portions, rest

    def read_now(self, portion: Sequence[Mapped]) -> list[ReadBlock]:
        """One of the portions that `quick` gave. Without payload: the reason why it cannot be read here."""
        touched: Sequence[tuple[int, LeasedCopy, memoryview | None]] = portion
        if self._verify or not self._in_place:
            touched = [(index, copy, self._take(found, copy.checksum)) for index, copy, found in portion]
        blocks = self._blocks(touched)
        self._hits += sum([block.payload is not None for block in blocks])
        return blocks

    async def read(self, index: int, copy: LeasedCopy) -> ReadBlock:
        """The same of any that `view` gives; a large one is touched in a thread."""
        found = self.view(copy)
        assert found is not None
        if len(found) <= INLINE_COPY_BYTES or (self._in_place and not self._verify):
            payload = self._take(found, copy.checksum)
        else:
            payload = await asyncio.to_thread(self._take, found, copy.checksum)
        (block,) = self._blocks([(index, copy, payload)])
        return block

    def is_turn_over(self) -> bool:
        """So much was touched that others on the loop should have their turn."""
        if self._touched < _TURN_BYTES:
            return False
        self._touched = 0
        return True

    def count_hits(self) -> None:
        """Those of `read_now`, once for all: a counter's lock costs more than a look into the arena."""
        if self._hits:
            metrics.read_hits.inc(self._hits)
            self._hits = 0

    def _take(self, found: memoryview, checksum: int) -> memoryview | None:
        """The bytes, a copy unless they are used in place; None when they are not the right ones."""
        payload = found
        if not self._in_place:
            payload = fresh_memory(len(found))
            payload[:] = found
            self._touched += len(found)
        if self._verify:
            self._touched += len(found)
            if payload_checksum(payload) != checksum:
                return None
        return payload

    def _blocks(self, touched: Sequence[tuple[int, LeasedCopy, memoryview | None]]) -> list[ReadBlock]:
        """What is told of each, after the last touch of all: only now it is looked whether their leases last."""
        now = self._clock.now()
        blocks: list[ReadBlock] = []
        good: Callable[[], bool] = owned
        last, lasts = None, False
        for index, copy, payload in touched:
            held = copy.held
            if held is not last:
                last, lasts = held, held.lasts(now)
                good = self._good_while(held) if self._in_place else owned
            if not lasts:
                blocks.append(ReadBlock(index, None, None, None, ReadOutcome.NOT_LEASED.value))
            elif payload is None:
                self._keeper.report_corrupt(held, self._lease.chain[index].hash)
                blocks.append(ReadBlock(index, None, None, None, "bad_checksum"))
            else:
                blocks.append(ReadBlock(index, payload, copy.tier, held.node_id, "ok", copy.rung, good))
        return blocks

    def _good_while(self, held: HeldLease) -> Callable[[], bool]:
        good = self._still_good.get(held)
        if good is None:
            good = self._still_good[held] = partial(_lasts, held, self._clock)
        return good


def _lasts(held: HeldLease, clock: Clock) -> bool:
    return held.lasts(clock.now())


def fresh_memory(size: int) -> memoryview:
    """Not zeroed first: every byte of it is written before anybody reads it."""
    return np.empty(size, np.uint8).data
