"""Metric names and the metrics door. Each part declares its own metrics beside its code, under these names, in the one registry
of its process (`prometheus_client.REGISTRY`). The dashboard in deploy/ draws these names and no others.
"""

from __future__ import annotations

import prometheus_client

from kvstore.errors import ConfigError
from kvstore.process import cannot_listen

TTFT_SECONDS = "larder_ttft_seconds"
ITL_SECONDS = "larder_itl_seconds"
QUEUE_LENGTH = "larder_queue_length"
"""Label `role`: prefill, decode, publish."""
BATCH_SIZE = "larder_batch_size"
HIT_TOKENS_TOTAL = "larder_hit_tokens_total"
"""Label `tier`: pool, host, ssd, recompute."""
TIER_BYTES = "larder_tier_bytes"
"""Label `tier`: host, ssd."""
PUT_SECONDS = "larder_put_seconds"
READ_SECONDS = "larder_read_seconds"
PUT_OUTCOMES_TOTAL = "larder_put_outcomes_total"
"""Labels `outcome`, `reason`."""
READ_OUTCOMES_TOTAL = "larder_read_outcomes_total"
"""Labels `outcome`, `reason`."""
FAILOVERS_TOTAL = "larder_failovers_total"
"""Label `reason`."""
CODEC_FAILURES_TOTAL = "larder_codec_failures_total"
"""Label `reason`."""
EVICTIONS_TOTAL = "larder_evictions_total"
"""Labels `tier`, `reason`."""
REQUESTS_TOTAL = "larder_requests_total"
"""Labels `route`, `status`."""

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def start_metrics_server(host: str, port: int) -> int:
    """Serve /metrics from a daemon thread; return the port (port 0 picks a free one). Raises ConfigError if it is taken."""
    try:
        server, _ = prometheus_client.start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(cannot_listen(host, port, error, key="metrics_port")) from None
    return int(server.server_port)
