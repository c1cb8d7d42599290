"""What a client counts."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from kvstore import telemetry

put_seconds = Histogram(telemetry.PUT_SECONDS, "Time of a put until it was acknowledged", buckets=telemetry.LATENCY_BUCKETS_S)
read_seconds = Histogram(telemetry.READ_SECONDS, "Time of a read until its last block", buckets=telemetry.LATENCY_BUCKETS_S)
put_outcomes = Counter(
    telemetry.PUT_OUTCOMES_TOTAL,
    "Blocks put, by outcome; the reason is that of a replica that does not hold the block",
    ["outcome", "reason"],
)
read_outcomes = Counter(telemetry.READ_OUTCOMES_TOTAL, "Blocks read, by outcome (hit, miss) and reason", ["outcome", "reason"])
read_hits = read_outcomes.labels("hit", "ok")
replica_failovers = Counter(
    "larder_replica_failovers_total", "Blocks asked of a further replica because one could not give them", ["reason"]
)
second_requests = Counter("larder_second_requests_total", "Requests to a further replica because one was late", ["asked"])
circuits_opened = Counter("larder_circuits_opened_total", "Times a node was given up for a while", ["node_id"])
