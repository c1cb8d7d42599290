"""Replay: a trace through a real StoreState whose copies are as large as their tokens, and the best that anyone could have done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstore.admin.trace import BLOCK_TOKENS, TracedRequest, chain_of_ids
from kvstore.core.chain import BLOCKS_PER_STRIPE
from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import AcquireRequested, AnswerAcquire, ReleaseRequested
from kvstore.core.events.puts import AnswerReserve, CommitItem, CommitRequested, ReserveItem, ReserveRequested, ReserveStatus
from kvstore.core.events.verification import ExtentsVerified, VerifyExtents, VerifyOutcome
from kvstore.core.extent import ALIGNMENT
from kvstore.core.policies import PolicyName
from kvstore.core.store_config import StoreConfig
from kvstore.core.store_state import StoreState
from kvstore.errors import ConfigError
from kvstore.ids import BOOT_ID_BYTES, HASH_BYTES, BlockRef, BootId, KeySpace, LayoutFingerprint, Namespace, RequestId
from kvstore.units import Bytes, Nanos, milliseconds

OPTIMUM = "optimum"
BYTES_PER_TOKEN = ALIGNMENT // BLOCK_TOKENS
"""So that a block of the trace is one page of the arena: no room is lost to rounding."""
_PROGRESS_EVERY = 64

Progress = Callable[[int], None]
"""Requests replayed since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    policy: str
    capacity_tokens: int
    token_hit: float
    """Of the prompt tokens of the scored requests, those in leading runs of blocks that were here."""


def replay(
    requests: Sequence[TracedRequest],
    *,
    policy: PolicyName,
    capacity_tokens: int,
    warm_up: int = 0,
    on_progress: Progress = lambda done: None,
) -> Row:
    """One request after the other: acquire, release, put what was missing, stripe by stripe. The first `warm_up` requests are not
    scored."""
    store = _TokenStore(policy, capacity_tokens)
    hit = asked = 0
    for number, request in enumerate(requests, start=1):
        chain = chain_of_ids(request.ids)
        run = store.get(chain)
        store.put(chain[run:])
        if number > warm_up:
            hit += request.tokens_of(run)
            asked += request.input_tokens
        if number % _PROGRESS_EVERY == 0:
            on_progress(_PROGRESS_EVERY)
    on_progress(len(requests) % _PROGRESS_EVERY)
    return Row(policy=policy.value, capacity_tokens=capacity_tokens, token_hit=hit / max(1, asked))


class _TokenStore:
    """A StoreState without a disk, and a shell that finds every payload good."""

    def __init__(self, policy: PolicyName, capacity_tokens: int) -> None:
        if capacity_tokens < BLOCK_TOKENS:
            raise ConfigError(f"a capacity of {capacity_tokens} tokens holds no block of {BLOCK_TOKENS}")
        config = StoreConfig(host_capacity=Bytes(capacity_tokens * BYTES_PER_TOKEN), policy=policy)
        self._state = StoreState(config, boot_id=BootId(bytes(BOOT_ID_BYTES)))
        self._space = KeySpace(Namespace("trace"), LayoutFingerprint(bytes(HASH_BYTES)))
        self._now = Nanos(0)
        self._last_request = 0

    def get(self, chain: tuple[BlockRef, ...]) -> int:
        """Leading blocks that are here."""
        acquire = AcquireRequested(request_id=self._request(), key_space=self._space, blocks=chain)
        answer = next(said for said in self._handle(acquire) if isinstance(said, AnswerAcquire))
        if answer.lease_id:
            self._handle(ReleaseRequested(request_id=self._request(), lease_id=answer.lease_id, key_space=self._space))
        return next((at for at, found in enumerate(answer.blocks) if found is None), len(chain))

    def put(self, blocks: tuple[BlockRef, ...]) -> None:
        for start in range(0, len(blocks), BLOCKS_PER_STRIPE):
            items = tuple(ReserveItem(block, ALIGNMENT) for block in blocks[start : start + BLOCKS_PER_STRIPE])
            reserve = ReserveRequested(request_id=self._request(), key_space=self._space, items=items)
            answer = next(said for said in self._handle(reserve) if isinstance(said, AnswerReserve))
            granted = tuple(CommitItem(grant.write_token, 0, ALIGNMENT) for grant in answer.grants if grant.status is ReserveStatus.GRANTED)
            if not granted:
                continue
            for said in self._handle(CommitRequested(request_id=self._request(), items=granted)):
                if isinstance(said, VerifyExtents):
                    self._handle(ExtentsVerified(operation=said.operation, outcomes=(VerifyOutcome.OK,) * len(said.extents)))

    def _request(self) -> RequestId:
        self._last_request += 1
        return RequestId(self._last_request)

    def _handle(self, event: Event) -> list[Instruction]:
        self._now = Nanos(self._now + milliseconds(1))
        return self._state.handle(event, self._now)


def optimum(requests: Sequence[TracedRequest], *, capacity_tokens: int, warm_up: int = 0) -> Row:
    """What a store that knows the future would have hit: it keeps those blocks whose next use is nearest, and does not take in a block
    that would be the first to go. A block's next use is never before its parent's, so this keeps whole prefixes.

    Source: Belady, IBM Systems Journal 1966, with bypass.
    """
    never = len(requests)
    next_use = _next_uses(requests)
    room = capacity_tokens // BLOCK_TOKENS
    here: dict[int, tuple[int, int]] = {}  # id -> (-next use, -depth)
    farthest: list[tuple[int, int, int]] = []  # the same with the id; outdated ones are skipped when met
    hit = asked = 0
    for number, request in enumerate(requests):
        run = next((at for at, one in enumerate(request.ids) if one not in here), len(request.ids))
        if number >= warm_up:
            hit += request.tokens_of(run)
            asked += request.input_tokens
        for depth, (one, following) in enumerate(zip(request.ids, next_use[number], strict=True)):
            if following == never:
                here.pop(one, None)
                continue
            rank = (-following, -depth)
            if one not in here and len(here) >= room:
                while farthest and here.get(farthest[0][2]) != farthest[0][:2]:
                    heappop(farthest)
                if not farthest or farthest[0][:2] >= rank:
                    continue
                del here[heappop(farthest)[2]]
            here[one] = rank
            heappush(farthest, (*rank, one))
    return Row(policy=OPTIMUM, capacity_tokens=capacity_tokens, token_hit=hit / max(1, asked))


def _next_uses(requests: Sequence[TracedRequest]) -> list[list[int]]:
    """Per request and block the number of the next request with that block; len(requests): none."""
    later: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].ids
        uses.append([later.get(one, len(requests)) for one in ids])
        later.update(dict.fromkeys(ids, number))
    uses.reverse()
    return uses
