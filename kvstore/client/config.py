"""What can be set on a client. Every wait of it has its bound here."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.transport import ALL_KINDS
from kvstore.transport.stream_pool import MOST_IDLE
from kvstore.units import MIB, Bytes, Nanos, milliseconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitConfig:
    failures_to_open: int = 3
    """Consecutive failures. A passed deadline opens at once: it is the one failure that costs time."""
    first_probe_after: Nanos = milliseconds(250)
    """From the opening to the first probe."""
    longest_probe_after: Nanos = seconds(5)
    """The pause doubles from the first to this with every probe that fails."""

    def __post_init__(self) -> None:
        if self.failures_to_open < 1:
            raise ConfigError(f"circuit.failures_to_open must be at least 1: {self.failures_to_open}")
        if not 0 < self.first_probe_after <= self.longest_probe_after:
            raise ConfigError("circuit.first_probe_after must be above 0 and at most circuit.longest_probe_after")


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeConfig:
    percentile: float = 0.95
    """An answer that takes longer than this share of the node's last ones is late: the next replica is asked too."""
    most_share: float = 0.05
    """Second requests as a share of the first ones, over time; 0: none."""
    least_wait: Nanos = milliseconds(5)
    """Nothing is late before this: what a busy scheduler costs is no reason to ask somebody else."""
    least_answers: int = 20
    """Of a node, before anything is known of it."""

    def __post_init__(self) -> None:
        if not 0 < self.percentile < 1:
            raise ConfigError(f"hedge.percentile must be between 0 and 1: {self.percentile}")
        if not 0 <= self.most_share <= 1:
            raise ConfigError(f"hedge.most_share must be 0 to 1: {self.most_share}")
        if self.least_wait <= 0 or self.least_answers < 1:
            raise ConfigError("hedge.least_wait must be above 0, hedge.least_answers at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    rpc_timeout: Nanos = milliseconds(1500)
    """Of every call without payload: it answers in a millisecond, so more is a frozen peer or a starved machine."""
    read_idle_timeout: Nanos = milliseconds(1500)
    """How long a payload stream may stand still before the next replica is asked."""
    read_timeout: Nanos = seconds(20)
    """Of one payload stream as a whole."""
    write_timeout: Nanos = seconds(10)
    """Of one payload stream to a node."""
    put_timeout: Nanos = seconds(30)
    """Of one put at one node, from the first reservation to the last commit, waits included."""
    lease_ttl: Nanos = seconds(10)
    """Asked of the nodes; renewed at a third of what they grant."""
    lease_longest_hold: Nanos = seconds(600)
    """A lease that nobody released is no longer renewed after this."""
    pending_wait: Nanos = milliseconds(100)
    """Between two reservations while another writer holds the block's."""
    pending_attempts: int = 5
    """Reservations of a block before a put gives it up."""
    batch_blocks: int = 64
    """Of one reserve-write-commit round, or one read, at one node."""
    batch_bytes: Bytes = Bytes(32 * MIB)
    """Of one reserve-write-commit round at one node."""
    read_streams: int = 1
    """Connections over which a batch of more than 4 MiB is read from one node at once. More than 1 where one TCP stream does not fill the
    network, or a node's answers take turns on several cores; on loopback they only cost (kvstore/transport/LOG.md)."""
    read_ahead_bytes: Bytes = Bytes(128 * MIB)
    """Payload bytes of one read that were asked for and not yet taken by its consumer; a single batch may be larger."""
    background_bytes: Bytes = Bytes(256 * MIB)
    """Payload bytes that may still be on their way to further replicas after `put` returned; above it `put` waits for them."""
    previous_views: Nanos = seconds(60)
    """How long the owners of the view before are still asked for what the present owners lack."""
    close_timeout: Nanos = seconds(5)
    """How long `close` waits for the rest of the puts and the releases."""
    transports: tuple[str, ...] = ALL_KINDS
    """Ways of the payload bytes that this client allows; the fastest that a node offers too is used with it."""
    verify_mapped: bool = True
    """Compare the checksum of payloads that are read from a mapped arena too. The node compared it when the block was committed; off
    saves 0.1 to 0.2 s of CPU a GB, and then a bit that flipped in memory since, or that a faulty writer on the same machine changed, is
    found by the codec alone."""
    circuit: CircuitConfig = field(default_factory=CircuitConfig)
    hedge: HedgeConfig = field(default_factory=HedgeConfig)

    def __post_init__(self) -> None:
        for key in (
            *("rpc_timeout", "read_idle_timeout", "read_timeout", "write_timeout", "put_timeout", "lease_ttl", "lease_longest_hold"),
            *("pending_wait", "pending_attempts", "batch_blocks", "batch_bytes", "read_ahead_bytes", "close_timeout"),
        ):
            if getattr(self, key) <= 0:
                raise ConfigError(f"client.{key} must be above 0: {getattr(self, key)}")
        if not 0 < self.read_streams <= MOST_IDLE:
            raise ConfigError(f"client.read_streams must be 1 to {MOST_IDLE}: {self.read_streams}")
        if self.background_bytes < 0 or self.previous_views < 0:
            raise ConfigError("client.background_bytes and client.previous_views must not be negative")
        if self.rpc_timeout * 3 > self.lease_ttl:
            raise ConfigError("client.lease_ttl must be at least three times client.rpc_timeout: a renewal must come in time")
