"""What a decode node counts beside what every compute node does. The gateway measures the same times as a client sees them."""

from __future__ import annotations

from prometheus_client import Histogram

from kvstore.telemetry import LATENCY_BUCKETS_S

first_token_seconds = Histogram("larder_decode_first_token_seconds", "From the Generate call to its first token", buckets=LATENCY_BUCKETS_S)
