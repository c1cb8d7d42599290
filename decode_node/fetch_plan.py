"""Which blocks of a prefix to fetch from the store and which tokens to compute again. Pure: speeds and sizes come in, a plan goes out.

Two things keep a slow tier from making a hit slower than a recompute. Before: with the measured speed of each tier, only that leading
part of the run is fetched that costs less than computing it. During: a load that has brought k blocks may have taken what computing
these k blocks takes, plus a small credit. So wherever it is given up, load and computing the rest together take at most what computing
everything takes, plus the credit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.units import Nanos, milliseconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    max_wait: Nanos = seconds(5)
    """Longest the fetches of one load may take together, whatever they would save."""
    min_credit: Nanos = milliseconds(50)
    """Below it, timer and scheduling noise decide, not the store."""
    patience: float = 0.25
    """Share of what computing the whole run takes that may be lost to a store that turns out slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What was measured lately; 0 or absent: not measured yet."""

    fetch_blocks_per_s: Mapping[str, float]
    """By tier."""
    prefill_tokens_per_s: float

    def fetch_s(self, tier: str) -> float:
        """Of one block; 0 when unknown, which means try."""
        speed = self.fetch_blocks_per_s.get(tier, 0.0)
        return 1 / speed if speed > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    local_blocks: int
    fetch_blocks: int
    """Blocks to fetch, directly behind the local ones."""
    recompute_tokens: int
    """Tokens to compute if every fetch succeeds; at least one, because the next token needs the last one's logits."""
    left_for_room: int
    """Blocks worth fetching that the pool has no room for now."""
    pace: FetchPace


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPace:
    """How long a fetch may take, by what it has brought."""

    block_cost: Nanos | None
    """Of computing one block; None: unknown, or not to be compared."""
    credit: Nanos
    most: Nanos

    def allowed(self, blocks: int) -> Nanos:
        """Time from its start after which a fetch with so many leading blocks is given up."""
        if self.block_cost is None:
            return self.most
        return Nanos(min(self.most, self.credit + blocks * self.block_cost))

    def after(self, *, blocks: int, took: Nanos) -> FetchPace:
        """What is left for the next fetch of the same load."""
        credit = self.credit if self.block_cost is None else self.credit + blocks * self.block_cost - took
        return FetchPace(block_cost=self.block_cost, credit=Nanos(max(0, credit)), most=Nanos(max(0, self.most - took)))


def loadable_blocks(tokens: int, *, block_tokens: int) -> int:
    """How many leading blocks a sequence of `tokens` may take from a cache and still have one token left to compute."""
    assert tokens > 0
    return (tokens - 1) // block_tokens


def plan_fetch(
    *,
    tokens: int,
    block_tokens: int,
    local_blocks: int,
    store_tiers: Sequence[str],
    room_blocks: int,
    speeds: Speeds,
    continuation: bool,
    policy: FetchPolicy,
    pace: FetchPace | None = None,
) -> FetchPlan:
    """Plan the load of a sequence of `tokens` tokens.

    `store_tiers` names the tier of each block of the run that the store leased directly behind the `local_blocks` leading ones;
    `room_blocks` is what the pool can take. `pace` is what earlier fetches of the same load have left. A `continuation` (the client
    already has tokens of the answer) fetches whatever the store has: the stored numbers are the ones its earlier tokens were drawn
    from, and equal tokens are worth more than the time.
    """
    store_blocks = len(store_tiers)
    assert local_blocks + store_blocks <= loadable_blocks(tokens, block_tokens=block_tokens)
    worth = store_blocks
    block_cost = None
    if not continuation and speeds.prefill_tokens_per_s > 0:
        block_cost = seconds(block_tokens / speeds.prefill_tokens_per_s)
        worth = _worth_fetching([seconds(speeds.fetch_s(tier)) for tier in store_tiers], block_cost)
    fetch_blocks = min(worth, room_blocks)
    if pace is None:
        credit = Nanos(0) if block_cost is None else Nanos(max(policy.min_credit, int(fetch_blocks * block_cost * policy.patience)))
        pace = FetchPace(block_cost=block_cost, credit=credit, most=policy.max_wait)
    return FetchPlan(
        local_blocks=local_blocks,
        fetch_blocks=fetch_blocks,
        recompute_tokens=tokens - (local_blocks + fetch_blocks) * block_tokens,
        left_for_room=worth - fetch_blocks,
        pace=pace,
    )


def _worth_fetching(fetch_costs: Sequence[Nanos], block_cost: Nanos) -> int:
    """The leading part for which fetching saves most; the longest of equals."""
    best, best_saving, saving = 0, 0, 0
    for blocks, cost in enumerate(fetch_costs, 1):
        saving += block_cost - cost
        if saving >= best_saving:
            best, best_saving = blocks, saving
    return best


class FetchSpeed:
    """Blocks per second from lease to decoded pool block, of one tier, as an exponential mean over loads.

    A mean that says "slower than computing" would never be measured again, since nothing would be fetched; so every
    `probe_every`-th load that is planned while it says so sees an unknown speed instead, and tries.
    """

    def __init__(self, *, weight: float = 0.3, probe_every: int = 8) -> None:
        self._weight = weight
        self._probe_every = probe_every
        self._blocks_per_s = 0.0
        self._reads_since_observation = 0

    def observe(self, *, blocks: int, took: Nanos, given_up: bool) -> None:
        """Count a load. One of fewer than 2 blocks measures latency only and is ignored, unless it was given up as too slow: then it was
        slower than the next block would have made it."""
        if took <= 0 or (blocks < 2 and not given_up):
            return
        sample = (blocks + given_up) / (took / 1e9)
        self._blocks_per_s = sample if self._blocks_per_s == 0 else self._blocks_per_s + self._weight * (sample - self._blocks_per_s)
        self._reads_since_observation = 0

    def planned_with(self) -> float:
        """The speed to plan the next load with; 0 when unknown or due for a new try."""
        self._reads_since_observation += 1
        if self._reads_since_observation >= self._probe_every:
            self._reads_since_observation = 0
            return 0.0
        return self._blocks_per_s


class FetchSpeeds:
    """One for each tier that was met."""

    def __init__(self) -> None:
        self._by_tier: dict[str, FetchSpeed] = {}

    def observe(self, tier: str, *, blocks: int, took: Nanos, given_up: bool) -> None:
        self._by_tier.setdefault(tier, FetchSpeed()).observe(blocks=blocks, took=took, given_up=given_up)

    def planned_with(self, tiers: Iterable[str]) -> dict[str, float]:
        return {tier: self._by_tier[tier].planned_with() for tier in sorted(set(tiers)) if tier in self._by_tier}
