"""What a store state is built with. Relations between the numbers are checked here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.core.admission import AdmissionConfig
from kvstore.core.expiry import MAX_TTL
from kvstore.core.extent import ALIGNMENT, MAX_SPAN_BYTES
from kvstore.core.lease import LeaseConfig
from kvstore.core.policies import PolicyName
from kvstore.core.step_down import StepDownRules
from kvstore.errors import ConfigError
from kvstore.ids import Namespace
from kvstore.units import GIB, MIB, Bytes, Nanos, milliseconds, seconds


class WritePolicy(StrEnum):
    """When a block that was put is written to the SSD."""

    WRITE_BACK = "write_back"
    """In the background, in the order they came, once the host tier is filled above `demote_above`."""
    WRITE_THROUGH = "write_through"
    """At once, and its commit is answered when it is there."""
    ON_EVICTION = "on_eviction"
    """Shortly before its host copy goes, coldest first: what is deleted, ends or stays hot is never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig:
    capacity: Bytes = Bytes(GIB)
    """Of all region files together; what does not fill a region is not used."""
    region_bytes: Bytes = Bytes(64 * MIB)
    write_policy: WritePolicy = WritePolicy.WRITE_BACK
    demote_above: float = 0.5
    """write_back: share of the host tier above which its copies are written to the SSD in the background; 0: each at once."""
    durable_within: Nanos = seconds(1)
    """write_through: how long a commit waits for the disk before its block is called stored and not durable."""
    max_moves: int = 8
    """Demotions, promotions and relocations under way at a time."""
    patience: Nanos = milliseconds(500)
    """How long a reservation waits for demotions under way before blocks that are not on SSD yet are evicted for it; 0: not at all."""
    min_dead_share: float = 0.25
    """A region is reclaimed when this share of it is dead. Bounds the bytes moved per byte gained to 1 / share - 1."""
    retry_after: Nanos = seconds(10)
    """Pause of all writes after one failed."""
    retry_after_while_stopping: Nanos = milliseconds(250)
    """The same for a node that stops: much shorter than its drain deadline."""
    step_down: StepDownRules = field(default_factory=dict)
    """Which blocks are re-coded on their way to the SSD. Blocks that a stop saves are not: nobody knows how long that would take."""

    def __post_init__(self) -> None:
        if self.region_bytes % ALIGNMENT or self.region_bytes < 16 * ALIGNMENT:
            raise ConfigError(f"ssd: region_bytes must be a multiple of {ALIGNMENT} and at least {16 * ALIGNMENT}, not {self.region_bytes}")
        if self.regions < 3:
            raise ConfigError(f"ssd: capacity must hold at least 3 regions of {self.region_bytes} bytes, not {self.capacity} bytes")
        if not (
            0 <= self.demote_above <= 1
            and 0 < self.min_dead_share < 1
            and self.max_moves >= 1
            and self.durable_within > 0
            and self.retry_after > 0 < self.retry_after_while_stopping
        ):
            raise ConfigError(f"ssd: shares must be from 0 to 1, max_moves and retry_after above 0: {self}")

    @property
    def regions(self) -> int:
        return self.capacity // self.region_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    capacity: Bytes
    """Of the one arena."""
    max_moves: int = 8
    """Promotions and demotions under way at a time."""

    def __post_init__(self) -> None:
        if not ALIGNMENT <= self.capacity <= MAX_SPAN_BYTES:
            raise ConfigError(f"gpu: capacity must be {ALIGNMENT} to {MAX_SPAN_BYTES} bytes, not {self.capacity}")
        if self.max_moves < 1:
            raise ConfigError(f"gpu: max_moves must be at least 1, not {self.max_moves}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    host_capacity: Bytes = Bytes(256 * MIB)
    """0: no host tier."""
    staging_capacity: Bytes = Bytes(64 * MIB)
    """Without a host tier: of the memory through which puts pass on their way to the others."""
    placed_within: Nanos = seconds(1)
    """Without a host tier: how long a commit waits for its blocks to come into a tier before it is refused."""
    ssd: SsdConfig | None = None
    gpu: GpuConfig | None = None
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    policy: PolicyName = PolicyName.LRU
    """Which blocks go first when room is needed."""
    reservation_timeout: Nanos = seconds(30)
    quotas: Mapping[Namespace, Bytes] = field(default_factory=dict)
    """Bytes of copies a namespace may have; not named: no limit."""
    weights: Mapping[Namespace, float] = field(default_factory=dict)
    """Shares of the room that namespaces have relative to each other when it is short; not named: 1."""
    ttls: Mapping[Namespace, Nanos] = field(default_factory=dict)
    """How long a block of a namespace lives when its put does not say; not named: without end."""

    def __post_init__(self) -> None:
        if self.host_capacity != 0 and not ALIGNMENT <= self.host_capacity <= MAX_SPAN_BYTES:
            raise ConfigError(f"host_capacity must be 0 (no host tier) or {ALIGNMENT} to {MAX_SPAN_BYTES} bytes, not {self.host_capacity}")
        if not ALIGNMENT <= self.staging_capacity <= MAX_SPAN_BYTES:
            raise ConfigError(f"staging_capacity must be {ALIGNMENT} to {MAX_SPAN_BYTES} bytes, not {self.staging_capacity}")
        if not self.has_host:
            if self.ssd is None and self.gpu is None:
                raise ConfigError("a node needs at least one tier: set host_capacity above 0, gpu_device or ssd_path")
            if self.ssd is not None and self.ssd.write_policy is WritePolicy.ON_EVICTION:
                raise ConfigError("write_policy on_eviction needs a host tier (host_capacity is 0): puts go straight to the SSD")
        if self.placed_within <= 0:
            raise ConfigError("placed_within must be above 0")
        if self.reservation_timeout <= 0:
            raise ConfigError("reservation_timeout must be above 0")
        for namespace, weight in self.weights.items():
            if not 0 < weight < math.inf:
                raise ConfigError(f"the weight of namespace {namespace!r} must be a number above 0, not {weight}")
        for namespace, ttl in self.ttls.items():
            if not 0 < ttl <= MAX_TTL:
                raise ConfigError(f"the time to live of namespace {namespace!r} must be above 0 and at most ten years, not {ttl} ns")

    @property
    def has_host(self) -> bool:
        return self.host_capacity > 0

    @property
    def arena_capacity(self) -> Bytes:
        """Of the memory that puts are written to: the host tier, or staging."""
        return self.host_capacity or self.staging_capacity
