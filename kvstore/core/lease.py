"""Leases: a reader's right, until a time, that what it found stays readable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstore.core.index import Entry
from kvstore.errors import ConfigError
from kvstore.ids import AS_SEALED, BlockHash, KeySpace, LeaseId, RungCode
from kvstore.units import Nanos, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseConfig:
    ttl: Nanos = seconds(10)
    """For a reader that asks for none."""
    max_ttl: Nanos = seconds(60)
    """Of one grant or renewal."""
    max_lifetime: Nanos = seconds(900)
    """From the grant, whatever the renewals."""
    max_leases: int = 100_000
    """At once; beyond it an acquire finds nothing."""
    max_leased_blocks: int = 4_000_000
    """Counted once for each lease on them: a lease of n blocks takes about 40 n bytes. Beyond it an acquire finds nothing."""
    max_read: Nanos = seconds(60)
    """One read; after it the reader is told to stop."""

    def __post_init__(self) -> None:
        if not 0 < self.ttl <= self.max_ttl <= self.max_lifetime:
            raise ConfigError(f"lease: 0 < ttl <= max_ttl <= max_lifetime must hold: {self}")
        if self.max_leases < 1 or self.max_leased_blocks < 1 or self.max_read <= 0:
            raise ConfigError(f"lease: max_leases, max_leased_blocks and max_read must be above 0: {self}")


class Lease:
    __slots__ = ("born_at", "entries", "expires_at", "key_space", "recoded")

    def __init__(self, *, key_space: KeySpace, entries: dict[BlockHash, Entry], now: Nanos, expires_at: Nanos) -> None:
        self.key_space = key_space
        self.entries = entries
        self.born_at = now
        self.expires_at = expires_at
        self.recoded: dict[BlockHash, RungCode] = {}
        """What the reader was told of blocks that are not here as sealed: it reads them at that rung or not at all."""


class LeaseTable:
    """Counts on each entry how many leases cover it; hands back the entries whose count fell to 0, for the caller to free or offer.

    Cost: grant and release O(blocks), renew O(log leases), expiry O(log leases) each.
    """

    def __init__(self, config: LeaseConfig, *, first_id: int) -> None:
        self._config = config
        self._next_id = first_id
        self._leases: dict[LeaseId, Lease] = {}
        self._covered = 0
        """Blocks of all leases."""
        self._expiries: list[tuple[Nanos, LeaseId]] = []  # outdated ones are skipped when met

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, key_space: KeySpace, entries: Iterable[Entry], *, ttl: Nanos | None, now: Nanos) -> tuple[LeaseId, Nanos] | None:
        """(id, ttl) of a lease on the entries; an entry named twice is covered once. None: too many leases, or blocks under them."""
        if len(self._leases) >= self._config.max_leases:
            return None
        covered = {entry.hash: entry for entry in entries}
        if self._covered + len(covered) > self._config.max_leased_blocks:
            return None
        self._covered += len(covered)
        for entry in covered.values():
            entry.leases += 1
        granted = self._bounded(ttl)
        lease_id = LeaseId(self._next_id)
        self._next_id += 1
        expires_at = Nanos(now + granted)
        self._leases[lease_id] = Lease(key_space=key_space, entries=covered, now=now, expires_at=expires_at)
        heappush(self._expiries, (expires_at, lease_id))
        return lease_id, granted

    def entry(self, lease_id: LeaseId, key_space: KeySpace, block: BlockHash, *, now: Nanos) -> Entry | None:
        """What the lease covers under this key; None when it does not, or is over."""
        lease = self._leases.get(lease_id)
        if lease is None or now >= lease.expires_at or lease.key_space != key_space:
            return None
        return lease.entries.get(block)

    def promise(self, lease_id: LeaseId, recoded: dict[BlockHash, RungCode]) -> None:
        """The lease, just granted, promises these blocks at these rungs, and all others as sealed."""
        self._leases[lease_id].recoded = recoded

    def rung(self, lease_id: LeaseId, block: BlockHash) -> RungCode:
        """That the lease, which covers the block, promises."""
        return self._leases[lease_id].recoded.get(block, AS_SEALED)

    def renew(self, lease_id: LeaseId, *, ttl: Nanos | None, now: Nanos) -> Nanos:
        """Time left from now; 0 when the lease is over. Never shortens a lease."""
        lease = self._leases.get(lease_id)
        if lease is None or now >= lease.expires_at:
            return Nanos(0)
        wanted = min(now + self._bounded(ttl), lease.born_at + self._config.max_lifetime)
        if wanted > lease.expires_at:
            lease.expires_at = Nanos(wanted)
            heappush(self._expiries, (lease.expires_at, lease_id))
        return Nanos(lease.expires_at - now)

    def release(self, lease_id: LeaseId, key_space: KeySpace, blocks: Iterable[BlockHash] | None) -> list[Entry]:
        """Takes the blocks (None: all) out of the lease; what is not in it is ignored, and so is a lease of another key space: ids can be
        guessed. A lease without blocks is over."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.key_space != key_space:
            return []
        gone = list(lease.entries) if blocks is None else list(blocks)
        unleased: list[Entry] = []
        for block in gone:
            entry = lease.entries.pop(block, None)
            if entry is not None:
                self._covered -= 1
                _unlease(entry, unleased)
        if not lease.entries:
            del self._leases[lease_id]
        return unleased

    def expire(self, now: Nanos) -> tuple[int, list[Entry]]:
        """Ends every lease whose time is over: (how many, entries not leased any more)."""
        ended = 0
        unleased: list[Entry] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, lease_id = heappop(self._expiries)
            lease = self._leases.get(lease_id)
            if lease is None or lease.expires_at > now:
                continue
            del self._leases[lease_id]
            ended += 1
            self._covered -= len(lease.entries)
            for entry in lease.entries.values():
                _unlease(entry, unleased)
        return ended, unleased

    def _bounded(self, ttl: Nanos | None) -> Nanos:
        return min(self._config.ttl if ttl is None or ttl <= 0 else ttl, self._config.max_ttl)


def _unlease(entry: Entry, unleased: list[Entry]) -> None:
    assert entry.leases > 0
    entry.leases -= 1
    if entry.leases == 0:
        unleased.append(entry)
