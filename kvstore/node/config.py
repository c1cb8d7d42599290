"""What an operator can set on a store node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvstore.core.lease import LeaseConfig
from kvstore.core.policies import PolicyName
from kvstore.core.store_config import GpuConfig, SsdConfig, StoreConfig, WritePolicy
from kvstore.core.upkeep.repair_config import RepairConfig
from kvstore.errors import ConfigError
from kvstore.ids import Namespace
from kvstore.node.step_down_rules import parse_step_down
from kvstore.registry.config import RegistryConfig
from kvstore.units import GIB, MIB, Bytes, Nanos, milliseconds, seconds

MAX_SSD_THREADS = 64
_LONGEST_TTL = seconds(86_400)
"""Of leases and reservations: longer is no lease any more, and their messages count milliseconds in 32 bits."""
_MAX_LEASE_TTL = seconds(60)
"""What a reader gets at most, unless the default is longer."""


class ShmAccess(StrEnum):
    OFF = "off"
    READ = "read"
    READ_WRITE = "read_write"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Read from TOML, `LARDER_*` and flags by kvstore/config.py; relations between the keys are checked here."""

    node_id: str = "store"
    """Name of this member, stable over restarts. Unique in the cluster."""
    host: str = "127.0.0.1"
    """Address it listens on, and by which the others reach it unless `advertise_host` names another."""
    advertise_host: str | None = None
    """By which the others reach it, at the same ports, when it is not `host`: behind a proxy, or where `host` is 0.0.0.0."""
    port: int = 0
    """0: a free one."""
    metrics_port: int = 0
    """Where Prometheus finds /metrics; 0: a free one."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis (6.2 or later, or Valkey) in which the members of the cluster meet: redis://, rediss:// (TLS), unix://,
    redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port (rediss+... for TLS)."""
    zone: str = "zone-a"
    """Replicas of a stripe go to different zones when there are enough of them."""
    weight: float = 1.0
    """Share of the stripes relative to the other nodes."""
    replicas: int = 2
    """How many nodes hold each stripe. The same in the whole cluster; repair goes by it."""
    log_level: str = "info"
    """debug, info, warning or error; to stderr."""

    host_capacity: Bytes = Bytes(256 * MIB)
    """Of the shared-memory arena. 0: no host tier; then ssd_path or gpu_device must be set, and a put is answered when it is on the SSD
    (durable, whatever write_policy says), or on the device where there is no SSD."""
    staging_capacity: Bytes = Bytes(64 * MIB)
    """Only with host_capacity = 0: memory through which puts pass on their way to the other tiers. No tier: nothing is read from it. A
    payload must fit into it, and so must all that are being put at a time."""
    gpu_device: str | None = None
    """A torch device ("cuda:0"; "cpu" to try it out) for a tier that gets copies of the hottest blocks. Not set: none, and torch is not
    needed."""
    gpu_capacity: Bytes = Bytes(GIB)
    """Of its arena, taken from the device at the start."""
    ssd_path: Path | None = None
    """Folder of this node alone, made when missing. Not set: no SSD tier, a restart starts empty."""
    ssd_capacity: Bytes = Bytes(GIB)
    """Of all region files together."""
    ssd_discard_other_formats: bool = False
    """Whether a folder that another format or region size laid out is emptied at the start. false: it is refused, nothing in it touched."""
    region_bytes: Bytes = Bytes(64 * MIB)
    """What is written front to back in one file and reclaimed whole. A payload must fit into one."""
    write_policy: WritePolicy = WritePolicy.WRITE_BACK
    """When blocks are written to the SSD: write_back (in the background), write_through (a put is answered when they are there),
    on_eviction (shortly before they leave the host tier)."""
    demote_above: float = 0.5
    """write_back: share of the host tier above which its copies are written to the SSD in the background; 0: each at once."""
    eviction: PolicyName = PolicyName.LRU
    """Which blocks go first when room is needed: lru, s3fifo or adaptive. Compare them on a trace of your own: kvctl replay."""
    step_down: Mapping[str, str] = field(default_factory=dict)
    """Which blocks are re-coded with fewer bits on their way to the SSD, by namespace ("*": those not named): rungs from finer to coarser,
    with what must be true of a block. "int4 after 10m", or "int5, int4 after 1h behind 16": at least 16 blocks of its chain behind it.
    Rungs: int5, int4 (of int8 and finer), klt:STEP. Not named: none. Numbers change: a running sequence does not read such copies."""
    step_down_tables: Path | None = None
    """Calibration file of rung klt, to step down from it. Without it such blocks stay as they are."""
    ssd_moves: int = 64
    """Copies between the tiers under way at a time; those to the SSD that come together share one sync (3 ms and more)."""
    ssd_threads: int = 4
    """Reads of the SSD at the same time. Writes have one thread of their own, in order."""
    read_buffer_capacity: Bytes = Bytes(256 * MIB)
    """Memory for payloads on their way from the SSD or the device to their readers, all readers together. What is more waits, in order of
    arrival and half of `read_deadline` at most; a payload that is larger than all of it passes alone."""
    quotas: Mapping[str, Bytes] = field(default_factory=dict)
    """Bytes of copies a namespace may have here; not named: no limit."""
    namespace_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of the room that namespaces have relative to each other when it is short: who is furthest above gives first. Not named: 1."""
    ttls: Mapping[str, Nanos] = field(default_factory=dict)
    """How long a block of a namespace lives when its put does not say; not named: until it is evicted."""

    tcp: bool = True
    """Offer payloads over TCP; off: only by gRPC (and shared memory)."""
    data_port: int = 0
    """Of the payloads over TCP, on `host`; 0: a free one."""
    ucx: bool = True
    """Offer payloads over UCX where ucxx is installed (extra ucx), arranged over `data_port`. UCX opens ports of its own, on the interfaces
    of UCX_NET_DEVICES; the hosts that reach them must be trusted."""
    shm: ShmAccess = ShmAccess.READ_WRITE
    """Whether processes of the same user on the same machine map the host tier: off, read (the kernel refuses every write but the
    node's own), or read_write (writers put payloads in place, and could spoil others')."""

    lease_ttl: Nanos = seconds(10)
    """Of a reader that asks for none."""
    reservation_ttl: Nanos = seconds(30)
    """A put that is not committed by then is discarded."""
    read_deadline: Nanos = seconds(20)
    """A read that is not done by then is cut off, so that its extents can be reused."""
    tick_every: Nanos = milliseconds(100)
    """Period of the sweep of leases, reservations and reads."""
    scrub_rate: Bytes = Bytes(8 * MIB)
    """Bytes a second that are read back and compared with their checksums in the background; 0: none."""
    drain_deadline: Nanos = seconds(10)
    """How long a stopping node goes on demoting hot copies to SSD."""

    registry: RegistryConfig = field(default_factory=RegistryConfig)
    repair: RepairConfig = field(default_factory=RepairConfig)

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ConfigError("node_id must not be empty")
        for key in ("port", "metrics_port", "data_port"):
            if not 0 <= getattr(self, key) <= 65535:
                raise ConfigError(f"{key} must be 0 to 65535: {getattr(self, key)}")
        for key in (
            "staging_capacity",
            "read_buffer_capacity",
            "gpu_capacity",
            "ssd_capacity",
            "region_bytes",
            "tick_every",
            "lease_ttl",
            "reservation_ttl",
            "read_deadline",
        ):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be above 0: {getattr(self, key)}")
        if max(self.lease_ttl, self.reservation_ttl) > _LONGEST_TTL:
            raise ConfigError("lease_ttl and reservation_ttl must be at most a day")
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1: {self.replicas}")
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"weight must be a number above 0: {self.weight}")
        if not 1 <= self.ssd_threads <= MAX_SSD_THREADS:
            raise ConfigError(f"ssd_threads must be 1 to {MAX_SSD_THREADS}: {self.ssd_threads}")
        if self.tick_every > seconds(1):
            raise ConfigError(f"tick_every must be at most 1 s: {self.tick_every} ns")
        if self.scrub_rate < 0:
            raise ConfigError(f"scrub_rate must not be negative: {self.scrub_rate}")
        if self.drain_deadline < 0:
            raise ConfigError(f"drain_deadline must not be negative: {self.drain_deadline}")
        if self.tick_every * 3 > min(self.lease_ttl, self.reservation_ttl):
            raise ConfigError(f"tick_every ({self.tick_every} ns) must be at most a third of lease_ttl and reservation_ttl")
        if self.ssd_path is None and self.step_down:
            raise ConfigError("step_down needs an SSD tier: set ssd_path")
        if self.ssd_path is None and self.write_policy is not WritePolicy.WRITE_BACK:
            raise ConfigError(f"write_policy {self.write_policy.value} needs an SSD tier: set ssd_path")
        self.store_config()

    @property
    def arena_capacity(self) -> Bytes:
        """Of the memory that puts are written to: the host tier, or staging."""
        return self.host_capacity or self.staging_capacity

    def store_config(self) -> StoreConfig:
        """The part that the core is built with; it checks the relations between its own keys. Raises ConfigError."""
        ssd = SsdConfig(
            capacity=self.ssd_capacity,
            region_bytes=self.region_bytes,
            write_policy=self.write_policy,
            demote_above=self.demote_above,
            max_moves=self.ssd_moves,
            step_down={Namespace(name): parse_step_down(text) for name, text in self.step_down.items()},
        )
        max_ttl = max(self.lease_ttl, _MAX_LEASE_TTL)
        return StoreConfig(
            host_capacity=self.host_capacity,
            staging_capacity=self.staging_capacity,
            ssd=None if self.ssd_path is None else ssd,
            gpu=None if self.gpu_device is None else GpuConfig(capacity=self.gpu_capacity),
            lease=LeaseConfig(ttl=self.lease_ttl, max_ttl=max_ttl, max_lifetime=Nanos(15 * max_ttl), max_read=self.read_deadline),
            policy=self.eviction,
            reservation_timeout=self.reservation_ttl,
            quotas={Namespace(name): limit for name, limit in self.quotas.items()},
            weights={Namespace(name): weight for name, weight in self.namespace_weights.items()},
            ttls={Namespace(name): ttl for name, ttl in self.ttls.items()},
        )
