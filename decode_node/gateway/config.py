"""Configuration of the gateway process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from decode_node.gateway.router import RoutingPolicy
from kvstore.errors import ConfigError
from kvstore.units import MIB, Bytes, Nanos, milliseconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    body: Bytes = Bytes(8 * MIB)
    """Largest request body; larger ones get 413."""
    sessions: int = 256
    """Answers in progress at once; more get 429."""
    default_max_tokens: int = 4096
    """Longest answer when the request names no max_tokens, as far as the context allows."""
    failures_in_a_row: int = 6
    """Decode nodes that may fail one session, without a token between, before the client is told; a stream that has begun tries on for
    timeouts.no_node."""
    affinity_entries: int = 65_536
    """Block hashes remembered to find the decode node that served a prefix."""

    def __post_init__(self) -> None:
        for name in ("body", "sessions", "default_max_tokens", "failures_in_a_row", "affinity_entries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name} must be at least 1: {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsConfig:
    head: Nanos = seconds(15)
    """A request's head arrives within this time from its first byte, the first one's from the start of the connection."""
    body: Nanos = seconds(30)
    """The request body arrives within this time."""
    send: Nanos = seconds(60)
    """A client that takes no bytes for this long is gone; its work is cancelled."""
    heartbeat: Nanos = milliseconds(900)
    """A decode stream silent for this long is dead: another node goes on. Nodes send something every 250 ms. Time in which the gateway
    itself did not run does not count."""
    connect: Nanos = seconds(2)
    """A decode stream's first sign of life comes within this time."""
    first_token: Nanos = seconds(300)
    """A decode node that lives but sends no first token for this long is left; it may have a queue of long prompts."""
    token: Nanos = seconds(60)
    """The same between two tokens of an answer."""
    prefill_stall: Nanos = seconds(10)
    """A prefill without progress for this long, beyond its predicted end, is given up."""
    no_node: Nanos = seconds(10)
    """A stream that has begun waits this long for a decode node to appear, or for failed ones to come back."""
    probe: Nanos = seconds(1)
    """The store's answer how much of the prompt it holds comes within this time, or counts as nothing."""
    poll: Nanos = seconds(1)
    """A node answers its load poll within this time, or the poll counts as missed."""
    poll_every: Nanos = milliseconds(500)
    """Period of those polls."""
    stop: Nanos = seconds(10)
    """Answers in progress when the gateway stops get this long to end."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"timeouts.{name} must be positive: {getattr(self, name)} ns")
        if self.heartbeat < milliseconds(500):
            raise ConfigError(f"timeouts.heartbeat must be at least 500ms, twice what nodes keep to: {self.heartbeat} ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    min_prefill_tokens: int = 128
    """A shorter uncached tail is computed by the decode node itself."""
    assumed_prefill_tokens_per_s: float = 500.0
    """Speed of a prefill node that has measured nothing yet."""
    affinity_slack: int = 2
    """Sequences the node that holds the prefix may have beyond the least loaded one and still be preferred."""

    def __post_init__(self) -> None:
        if self.min_prefill_tokens < 0 or self.affinity_slack < 0 or self.assumed_prefill_tokens_per_s <= 0:
            raise ConfigError(f"routing keys must not be negative, and the assumed speed positive: {self}")

    @property
    def policy(self) -> RoutingPolicy:
        return RoutingPolicy(
            min_prefill_tokens=self.min_prefill_tokens,
            assumed_prefill_tokens_per_s=self.assumed_prefill_tokens_per_s,
            affinity_slack=self.affinity_slack,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    node_id: str = "gateway-0"
    """Name in logs and in its READY line."""
    host: str = "127.0.0.1"
    """Address it listens on, and by which the others reach it."""
    http_port: int = 8000
    """Of the API; 0: a free one."""
    metrics_port: int = 0
    """Where Prometheus finds /metrics; 0: a free one."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis (6.2 or later, or Valkey) in which the members of the cluster meet."""
    log_level: str = "info"
    """debug, info, warning or error; to stderr."""
    model: str = "default"
    """Model whose tokenizer is used: "default", a Hugging Face folder or a .gguf file; the same as on the nodes."""
    cache_dir: Path = Path("~/.cache/larder").expanduser()
    """Where a converted model is kept."""
    served_model_name: str | None = None
    """Name in /v1/models and in requests; by default the model's own."""
    replicas: int = 2
    """Replicas the store keeps of a block; the gateway only asks them what they hold."""
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """API key -> namespace. Empty: no key is asked for, everyone is in the default namespace."""
    default_namespace: str = "default"
    """Namespace of everyone when there are no api_keys."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self) -> None:
        if not self.default_namespace or not all(self.api_keys.values()):
            raise ConfigError("a namespace must not be empty: see default_namespace and api_keys")
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1: {self.replicas}")
