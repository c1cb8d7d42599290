"""What a store node shows to Prometheus. Names are those of kvstore/telemetry.py."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvstore.core.events.gets import ReadOutcome, ReadStatus
from kvstore.core.events.notes import Note, NoteKind
from kvstore.core.events.puts import CommitStatus, ReserveStatus
from kvstore.core.extent import Tier
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.telemetry import (
    EVICTIONS_TOTAL,
    LATENCY_BUCKETS_S,
    PUT_OUTCOMES_TOTAL,
    PUT_SECONDS,
    READ_OUTCOMES_TOTAL,
    READ_SECONDS,
    TIER_BYTES,
)
from kvstore.units import Nanos, to_seconds


class NodeMetrics:
    """One per node, in the registry given: the process's own, or a fresh one in a test that runs several nodes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._tier_bytes = Gauge(TIER_BYTES, "Bytes used, by tier.", ["tier"], registry=registry)
        self._put_seconds = Histogram(PUT_SECONDS, "From a commit to its answer.", buckets=LATENCY_BUCKETS_S, registry=registry)
        self._read_seconds = Histogram(
            READ_SECONDS, "One read call, from its request to its last chunk.", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self._put_outcomes = Counter(PUT_OUTCOMES_TOTAL, "Blocks put, by outcome.", ["outcome", "reason"], registry=registry)
        self._read_outcomes = Counter(READ_OUTCOMES_TOTAL, "Blocks read, by outcome.", ["outcome", "reason"], registry=registry)
        self._read_whole = self._read_outcomes.labels("ok", "")
        self._evictions = Counter(EVICTIONS_TOTAL, "Copies evicted, by tier and reason.", ["tier", "reason"], registry=registry)
        self._notes = Counter(
            "larder_store_notes_total", "What happened to copies, by kind and reason.", ["kind", "reason"], registry=registry
        )

        # Their children are looked up once: with their labels each time they are a ninth of the CPU of a put.
        self._noted: dict[tuple[NoteKind, str, Tier | None], list[Counter]] = {}
        self._refused: dict[ReserveStatus, Counter] = {
            status: self._put_outcomes.labels("exists" if status is ReserveStatus.EXISTS else "refused", status.name.lower())
            for status in ReserveStatus
            if status is not ReserveStatus.GRANTED
        }
        self._committed = {
            status: self._put_outcomes.labels("stored", "")
            if status.is_stored
            else self._put_outcomes.labels("failed", status.name.lower())
            for status in CommitStatus
        }

        self.data_refused = Counter(
            "larder_data_refused_total",
            "Connections of the data plane closed for what came on them.",
            ["door", "reason"],
            registry=registry,
        )
        self.data_bytes = Counter(
            "larder_data_bytes_total", "Payload bytes moved, by door and direction.", ["door", "direction"], registry=registry
        )
        self.data_connections = Gauge("larder_data_connections", "Open connections of the data plane.", ["door"], registry=registry)

    def show_tier(self, tier: Tier, used: Callable[[], int]) -> None:
        """`used` is called at each scrape, in the scraper's thread."""
        self._tier_bytes.labels(tier.name.lower()).set_function(used)

    def show_staging(self, used: Callable[[], int]) -> None:
        """Of a node without a host tier; called likewise."""
        help_text = "Bytes of puts on their way to a tier, on a node without a host tier."
        Gauge("larder_store_staging_bytes", help_text, registry=self._registry).set_function(used)

    def show_read_buffer(self, taken: Callable[[], int]) -> None:
        """Called likewise."""
        help_text = "Bytes of payloads between the SSD or the device and their readers; at read_buffer_capacity others wait."
        Gauge("larder_store_read_buffer_bytes", help_text, registry=self._registry).set_function(taken)

    def put_refused(self, status: ReserveStatus) -> None:
        self._refused[status].inc()

    def committed(self, statuses: Sequence[CommitStatus], *, took: Nanos) -> None:
        self._put_seconds.observe(to_seconds(took))
        for status, count in Counts(statuses).items():
            self._committed[status].inc(count)

    def read(self, read: OpenRead, *, took: Nanos) -> None:
        self._read_seconds.observe(to_seconds(took))
        whole = 0
        for item, outcome in zip(read.items, read.outcomes, strict=True):
            if item.status is not ReadStatus.OK:
                self._read_outcomes.labels("failed", item.status.name.lower()).inc()
            elif outcome is ReadOutcome.OK:
                whole += 1
            else:
                self._read_outcomes.labels("failed", outcome.value).inc()
        if whole:
            self._read_whole.inc(whole)

    def note(self, notes: Iterable[Note]) -> None:
        for key, count in Counts([note[:3] for note in notes]).items():
            counters = self._noted.get(key)
            if counters is None:
                kind, reason, tier = key
                counters = self._noted[key] = [self._notes.labels(kind.value, reason)]
                if kind is NoteKind.EVICTED and tier is not None:
                    counters.append(self._evictions.labels(tier.name.lower(), reason))
            for counter in counters:
                counter.inc(count)
