"""What an operator can set on a store node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.registry.config import RegistryConfig
from kvstore.units import GIB, MIB, Bytes, Nanos, milliseconds, seconds

MAX_SSD_THREADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Read from TOML, `LARDER_*` and flags by kvstore/config.py; relations between the keys are checked here."""

    node_id: str = "store"
    """Name of this member, stable over restarts. Unique in the cluster."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    metrics_port: int = 0
    redis_url: str = "redis://127.0.0.1:6379/0"
    zone: str = "zone-a"
    """Replicas of a stripe go to different zones when there are enough of them."""
    weight: float = 1.0
    """Share of the stripes relative to the other nodes."""
    replicas: int = 2
    """How many nodes hold each stripe. The same in the whole cluster; repair goes by it."""
    log_level: str = "info"

    host_capacity: Bytes = Bytes(256 * MIB)
    ssd_path: Path | None = None
    """Folder of this node alone, made when missing. Not set: no SSD tier, a restart starts empty."""
    ssd_capacity: Bytes = Bytes(GIB)
    region_bytes: Bytes = Bytes(64 * MIB)
    """What is written front to back in one file and reclaimed whole. A payload must fit into one."""
    ssd_threads: int = 4
    """Reads of the SSD at the same time. Writes have one thread of their own, in order."""

    lease_ttl: Nanos = seconds(10)
    """Of a reader that asks for none, and the most that it gets."""
    reservation_ttl: Nanos = seconds(30)
    """A put that is not committed by then is discarded."""
    read_deadline: Nanos = seconds(20)
    """A reader that has not taken a payload by then is cut off, so that its extent can be reused."""
    tick_every: Nanos = milliseconds(100)
    """Period of the sweep of leases, reservations and reads."""
    drain_deadline: Nanos = seconds(10)
    """How long a stopping node goes on demoting hot copies to SSD."""

    registry: RegistryConfig = RegistryConfig()

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ConfigError("node_id must not be empty")
        for key in ("port", "metrics_port"):
            if not 0 <= getattr(self, key) <= 65535:
                raise ConfigError(f"{key} must be 0 to 65535: {getattr(self, key)}")
        for key in (
            "host_capacity",
            "ssd_capacity",
            "region_bytes",
            "tick_every",
            "lease_ttl",
            "reservation_ttl",
            "read_deadline",
        ):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be above 0: {getattr(self, key)}")
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1: {self.replicas}")
        if not self.weight > 0:
            raise ConfigError(f"weight must be above 0: {self.weight}")
        if not 1 <= self.ssd_threads <= MAX_SSD_THREADS:
            raise ConfigError(f"ssd_threads must be 1 to {MAX_SSD_THREADS}: {self.ssd_threads}")
        if self.ssd_path is not None and self.region_bytes * 2 > self.ssd_capacity:
            raise ConfigError(
                f"ssd_capacity ({self.ssd_capacity} bytes) must hold at least two regions of region_bytes ({self.region_bytes} bytes)"
            )
        if self.tick_every * 3 > min(self.lease_ttl, self.reservation_ttl):
            raise ConfigError(f"tick_every ({self.tick_every} ns) must be at most a third of lease_ttl and reservation_ttl")
