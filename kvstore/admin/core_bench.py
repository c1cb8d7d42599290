"""What the core costs at a given number of blocks: memory, time of a put, time of an acquire."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore.core.chain import BLOCKS_PER_STRIPE
from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import AcquireRequested, AnswerAcquire, ReleaseRequested
from kvstore.core.events.puts import AnswerReserve, CommitItem, CommitRequested, ReserveItem, ReserveRequested
from kvstore.core.events.verification import ExtentsVerified, VerifyExtents, VerifyOutcome
from kvstore.core.extent import ALIGNMENT
from kvstore.core.policies import PolicyName
from kvstore.core.store_config import StoreConfig
from kvstore.core.store_state import StoreState
from kvstore.ids import BOOT_ID_BYTES, HASH_BYTES, BlockHash, BlockRef, BootId, KeySpace, LayoutFingerprint, Namespace, RequestId, StripeId
from kvstore.units import Bytes, Nanos

ACQUIRED_KEYS = 1000
_CHAIN_BLOCKS = 1000
_BATCH = 32
_ACQUIRES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreCost:
    blocks: int
    bytes_per_block: float
    """Growth of the process per listed block, hashes included."""
    blocks_per_second: float
    """Reserved, committed, verified and listed; by processor time, so that what else runs here does not count."""
    events_per_second: float
    """One reserve, one commit and one verification per 32 blocks."""
    acquire_ms: float
    """Of 1,000 keys, the best of 20: the rest is what the machine does beside."""


def core_cost(blocks: int, *, policy: PolicyName) -> CoreCost:
    """Measured in a process of its own, whose memory nothing else has used before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as one:
        return one.submit(_measure, blocks, policy).result()


def _measure(blocks: int, policy: PolicyName) -> CoreCost:
    config = StoreConfig(host_capacity=Bytes(blocks * ALIGNMENT), policy=policy)
    state = StoreState(config, boot_id=BootId(bytes(BOOT_ID_BYTES)))
    space = KeySpace(Namespace("bench"), LayoutFingerprint(bytes(HASH_BYTES)))
    gc.collect()
    resident_before = _resident_bytes()
    spent = events = 0
    left = blocks
    for chain in _chains():
        put = chain[:left]
        left -= len(put)
        started = time.process_time_ns()
        events += _put(state, space, put)
        spent += time.process_time_ns() - started
        if not left:
            break
    del chain, put
    gc.collect()
    size = (_resident_bytes() - resident_before) / blocks
    kept = next(_chains())[: min(blocks, ACQUIRED_KEYS)]
    return CoreCost(
        blocks=state.status().blocks,
        bytes_per_block=size,
        blocks_per_second=blocks / spent * 1e9,
        events_per_second=events / spent * 1e9,
        acquire_ms=min(_acquire(state, space, kept) for _ in range(_ACQUIRES)) / 1e6,
    )


def _chains() -> Iterator[tuple[BlockRef, ...]]:
    number = 0
    while True:
        hashes = [BlockHash(hashlib.blake2b(b"%d/%d" % (number, at), digest_size=HASH_BYTES).digest()) for at in range(-1, _CHAIN_BLOCKS)]
        root, blocks = hashes[0], hashes[1:]
        yield tuple(
            BlockRef(hash=block, parent=blocks[at - 1] if at else root, stripe=StripeId(blocks[at - at % BLOCKS_PER_STRIPE]), index=at)
            for at, block in enumerate(blocks)
        )
        number += 1


def _put(state: StoreState, space: KeySpace, blocks: tuple[BlockRef, ...]) -> int:
    """Number of events."""
    events = 0

    def handle(event: Event) -> list[Instruction]:
        nonlocal events
        events += 1
        return state.handle(event, Nanos(0))

    for start in range(0, len(blocks), _BATCH):
        items = tuple([ReserveItem(block, ALIGNMENT) for block in blocks[start : start + _BATCH]])
        [answer] = [
            said
            for said in handle(ReserveRequested(request_id=RequestId(1), key_space=space, items=items))
            if isinstance(said, AnswerReserve)
        ]
        commits = tuple([CommitItem(grant.write_token, grant.write_token << 32, ALIGNMENT) for grant in answer.grants])
        for said in handle(CommitRequested(request_id=RequestId(2), items=commits)):
            if isinstance(said, VerifyExtents):
                handle(ExtentsVerified(operation=said.operation, outcomes=(VerifyOutcome.OK,) * len(said.extents)))
    return events


def _acquire(state: StoreState, space: KeySpace, chain: tuple[BlockRef, ...]) -> int:
    """Nanoseconds of one acquire; the release after it is not counted."""
    request = AcquireRequested(request_id=RequestId(3), key_space=space, blocks=chain)
    started = time.perf_counter_ns()
    said = state.handle(request, Nanos(0))
    spent = time.perf_counter_ns() - started
    [answer] = [one for one in said if isinstance(one, AnswerAcquire)]
    assert None not in answer.blocks
    state.handle(ReleaseRequested(request_id=RequestId(4), lease_id=answer.lease_id, key_space=space), Nanos(0))
    return spent


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
