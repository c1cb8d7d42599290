"""What a prefill or a decode node counts about its engine and its blocks. Put and read outcomes are counted by the store client."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from kvstore import telemetry

queue_length = Gauge(telemetry.QUEUE_LENGTH, "Requests that wait; role publish: sealed blocks that wait for their put", ["role"])
running_sequences = Gauge("larder_running_sequences", "Requests in the running batch", ["role"])
pool_blocks = Gauge("larder_pool_blocks", "Blocks of the engine's pool", ["role", "state"])
hit_tokens = Counter(telemetry.HIT_TOKENS_TOTAL, "Prompt tokens by where their KV came from", ["tier"])
codec_failures = Counter(telemetry.CODEC_FAILURES_TOTAL, "Blocks that could not be encoded or decoded", ["reason"])
unpublished_blocks = Counter("larder_unpublished_blocks", "Sealed blocks that did not reach the store", ["reason"])
prefix_load_seconds = Histogram(
    "larder_prefix_load_seconds",
    "Lease, fetch and decode of one prefix",
    ["outcome"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
