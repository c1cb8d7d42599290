"""Which blocks of a prefix to fetch from the store and which tokens to compute again. Pure: speeds and sizes come in, a plan goes out.

Computing a token costs the same wherever it stands, and so does fetching a block, so what decides is one comparison: the store's
whole run, or none of it. The deadline then bounds what a store that got slower since the last measurement can cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.units import Nanos, milliseconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    max_wait: Nanos = seconds(5)
    """Longest any load may take, whatever it would save."""
    min_wait: Nanos = milliseconds(50)
    """A load gets at least this long: below it, timer and scheduling noise decide, not the store."""
    patience: float = 1.0
    """A load may take this many times what computing the same tokens is expected to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What was measured lately; 0 means not measured yet."""

    fetch_blocks_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    local_blocks: int
    fetch_blocks: int
    """Blocks to fetch, directly behind the local ones."""
    recompute_tokens: int
    """Tokens to compute if every fetch succeeds; at least one, because the next token needs the last one's logits."""
    wait: Nanos
    """When this has passed, what is there is used and the rest is computed."""
    left_for_room: int
    """Blocks worth fetching that the pool has no room for now."""


def loadable_blocks(tokens: int, *, block_tokens: int) -> int:
    """How many leading blocks a sequence of `tokens` may take from a cache and still have one token left to compute."""
    assert tokens > 0
    return (tokens - 1) // block_tokens


def plan_fetch(
    *,
    tokens: int,
    block_tokens: int,
    local_blocks: int,
    store_blocks: int,
    room_blocks: int,
    speeds: Speeds,
    continuation: bool,
    policy: FetchPolicy,
) -> FetchPlan:
    """Plan the load of a sequence of `tokens` tokens.

    `store_blocks` is the run the store leased directly behind the `local_blocks` leading ones; `room_blocks` is what the pool can
    take. A `continuation` (the client already has tokens of the answer) fetches whatever the store has: the stored numbers are the
    ones its earlier tokens were drawn from, and equal tokens are worth more than the time.
    """
    assert local_blocks + store_blocks <= loadable_blocks(tokens, block_tokens=block_tokens)
    fetch_blocks = min(store_blocks, room_blocks)
    left_for_room = store_blocks - fetch_blocks
    wait = policy.max_wait
    if fetch_blocks and not continuation and speeds.prefill_tokens_per_s > 0:
        recompute_s = fetch_blocks * block_tokens / speeds.prefill_tokens_per_s
        if speeds.fetch_blocks_per_s > 0 and fetch_blocks / speeds.fetch_blocks_per_s > recompute_s:
            fetch_blocks = left_for_room = 0
        wait = Nanos(min(policy.max_wait, max(policy.min_wait, seconds(recompute_s * policy.patience))))
    return FetchPlan(
        local_blocks=local_blocks,
        fetch_blocks=fetch_blocks,
        recompute_tokens=tokens - (local_blocks + fetch_blocks) * block_tokens,
        wait=wait,
        left_for_room=left_for_room,
    )


class FetchSpeed:
    """Blocks per second from lease to decoded pool block, as an exponential mean over loads.

    A mean that says "slower than computing" would never be measured again, since nothing would be fetched; so every
    `probe_every`-th load that is planned while it says so sees an unknown speed instead, and tries.
    """

    def __init__(self, *, weight: float = 0.3, probe_every: int = 8) -> None:
        self._weight = weight
        self._probe_every = probe_every
        self._blocks_per_s = 0.0
        self._reads_since_observation = 0

    def observe(self, *, blocks: int, took: Nanos) -> None:
        """Count a load that was let run to its end or its deadline. Loads of fewer than 2 blocks measure latency only: ignored."""
        if blocks < 2 or took <= 0:
            return
        sample = blocks / (took / 1e9)
        self._blocks_per_s = sample if self._blocks_per_s == 0 else self._blocks_per_s + self._weight * (sample - self._blocks_per_s)
        self._reads_since_observation = 0

    def planned_with(self) -> float:
        """The speed to plan the next load with; 0 when unknown or due for a new try."""
        self._reads_since_observation += 1
        if self._reads_since_observation >= self._probe_every:
            self._reads_since_observation = 0
            return 0.0
        return self._blocks_per_s
