"""What a benchmark runs and what it finds. Pure: no processes, no clocks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvstore.errors import ConfigError
from kvstore.transport import ALL_KINDS
from kvstore.units import MIB, Bytes

OPERATIONS = ("put", "get", "mixed", "acquire")
"""acquire: only the lease, and its release."""
PEERS = ("redis", "memcpy", "direct")
"""Measured the same way for comparison: Redis with one key a block, a plain copy of memory, and direct reads of a file on the same disk."""
ROUTES = (*ALL_KINDS, *PEERS)
NODE_CAPACITY: Bytes = Bytes(512 * MIB)
"""Host tier of each store node that is started for a benchmark; and of Redis."""
NODE_CAPACITY_BEFORE_SSD: Bytes = Bytes(96 * MIB)
_WORKING_SET_BYTES = 128 * MIB
_SSD_WORKING_SET_BYTES = 384 * MIB
"""Four times the host tier of a node that is measured from its SSD, and got in turn: hardly one is in the host tier when its turn comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One combination, as a worker process gets it."""

    op: str
    size_bytes: int
    batch: int
    clients: int
    transport: str
    replicas: int
    seconds: float
    in_place: bool
    """Gets over shm use the bytes where they lie instead of copying them."""
    verify: bool
    """Gets over shm compare the checksum."""
    streams: int = 1
    """Connections over which a client reads a large batch at once."""
    ssd: bool = False
    """The nodes have a small host tier before an SSD, so that gets come from there."""

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS:
            raise ConfigError(f"{self.op!r} is no operation; there are {', '.join(OPERATIONS)}")
        if self.transport not in ROUTES:
            raise ConfigError(f"{self.transport!r} is no transport; there are {', '.join(ROUTES)}")
        if min(self.size_bytes, self.batch, self.clients, self.replicas) < 1 or self.seconds <= 0:
            raise ConfigError("sizes, batch, clients, replicas and seconds must be above 0")
        if self.batch * self.size_bytes > NODE_CAPACITY:
            raise ConfigError(
                f"a batch of {self.batch} blocks of {self.size_bytes} bytes is more than a node holds here ({NODE_CAPACITY // MIB} MiB)"
            )

    @property
    def sets(self) -> int:
        """Batches that a client gets in turn: so many that the processor's cache does not hold them, and the store does."""
        room = _SSD_WORKING_SET_BYTES if self.ssd else _WORKING_SET_BYTES
        return max(1, min(64 if not self.ssd else 4096, room // (self.clients * self.batch * self.size_bytes)))

    @property
    def stored_bytes(self) -> Bytes:
        return Bytes(self.sets * self.batch * self.size_bytes * self.clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """Of one client process."""

    moved_bytes: int
    wall_s: float
    cpu_s: float
    """User and system time of the process while it measured."""
    latencies_ms: tuple[float, ...]
    """Of each batch."""
    ssd_blocks: int = 0
    """Blocks that came from an SSD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    op: str
    size_bytes: int
    batch: int
    clients: int
    transport: str
    replicas: int
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    client_cpu_s_per_gb: float
    server_cpu_s_per_gb: float
    slowest_client_share: float
    """Throughput of the slowest client over the mean: 1 is fair."""
    client_shares: tuple[float, ...]
    """Of each client, slowest first."""
    ssd_share: float
    """Of the blocks that were got: those that came from an SSD."""

    def as_record(self) -> dict[str, object]:
        return asdict(self)


def row_of(measurement: Measurement, results: Sequence[WorkerResult], *, server_cpu_s: float) -> Row:
    moved = sum(result.moved_bytes for result in results)
    latencies = sorted(latency for result in results for latency in result.latencies_ms)
    rates = [result.moved_bytes / result.wall_s for result in results]
    return Row(
        op=measurement.op,
        size_bytes=measurement.size_bytes,
        batch=measurement.batch,
        clients=measurement.clients,
        transport=label_of(measurement),
        replicas=measurement.replicas,
        gb_per_s=round(sum(rates) / 1e9, 3),
        p50_ms=round(percentile(latencies, 0.5), 4),
        p99_ms=round(percentile(latencies, 0.99), 4),
        p999_ms=round(percentile(latencies, 0.999), 4),
        client_cpu_s_per_gb=round(sum(result.cpu_s for result in results) / (moved / 1e9), 4),
        server_cpu_s_per_gb=round(server_cpu_s / (moved / 1e9), 4),
        slowest_client_share=round(min(rates) / statistics.mean(rates), 3),
        client_shares=tuple(sorted(round(rate / statistics.mean(rates), 3) for rate in rates)),
        ssd_share=round(sum(result.ssd_blocks for result in results) * measurement.size_bytes / moved, 3),
    )


def label_of(measurement: Measurement) -> str:
    if measurement.transport != "shm" or measurement.op == "acquire":
        return measurement.transport
    if measurement.op == "put":
        return "shm" if measurement.in_place else "shm+copy"
    return "shm" + ("" if measurement.in_place else "+copy") + ("+verify" if measurement.verify else "")


def median_row(rounds: Sequence[Row]) -> Row:
    """Field by field, of rows of one combination."""
    first = rounds[0]
    medians = {
        key: round(statistics.median(float(getattr(row, key)) for row in rounds), 4)
        for key in (
            *("gb_per_s", "p50_ms", "p99_ms", "p999_ms"),
            *("client_cpu_s_per_gb", "server_cpu_s_per_gb", "slowest_client_share", "ssd_share"),
        )
    }
    shares = tuple(round(statistics.median(ranked), 3) for ranked in zip(*(row.client_shares for row in rounds), strict=True))
    return Row(
        op=first.op,
        size_bytes=first.size_bytes,
        batch=first.batch,
        clients=first.clients,
        transport=first.transport,
        replicas=first.replicas,
        client_shares=shares,
        **medians,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000 * len(ordered)) // 1000) - 1))]
