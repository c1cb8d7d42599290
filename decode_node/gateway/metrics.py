"""What the gateway counts."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvstore import telemetry


class GatewayMetrics:
    """One set a registry, so that a test can have its own."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.ttft = Histogram(
            telemetry.TTFT_SECONDS,
            "From the arrival of a request to its first token",
            buckets=telemetry.LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.itl = Histogram(
            telemetry.ITL_SECONDS,
            "Between two tokens of an answer, failovers included",
            buckets=telemetry.LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.requests = Counter(
            telemetry.REQUESTS_TOTAL, "HTTP requests; status 499: the client went away", ("route", "status"), registry=registry
        )
        self.failovers = Counter(
            telemetry.FAILOVERS_TOTAL, "Attempts of decode nodes that failed, by reason", ("reason",), registry=registry
        )
        self.moves = Counter("larder_moves_total", "Answers that moved from a draining decode node to a prepared one", registry=registry)
        self.notice = Histogram(
            "larder_failover_notice_seconds",
            "From the last sign of life of a decode node until its loss was noticed, by reason",
            ("reason",),
            buckets=telemetry.LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.takeover = Histogram(
            "larder_takeover_seconds",
            "From the end of one decode node's stream, failed or moved from, to the next token",
            buckets=telemetry.LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.sessions = Gauge("larder_gateway_sessions", "Answers in progress", registry=registry)
        self.prompt_tokens = Counter("larder_prompt_tokens_total", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter("larder_cached_prompt_tokens_total", "Tokens of prompts that needed no prefill", registry=registry)
        self.answer_tokens = Counter("larder_answer_tokens_total", "Tokens of answers", registry=registry)
