"""What an operator can set on a prefill node, and what a prefill and a decode node have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvstore.client import Acknowledge, ClientConfig
from kvstore.codec import Rung
from kvstore.codec.block_format import MAX_STEP
from kvstore.codec.precision import DEFAULT_STEP, FIRST_EXACT_TOKENS, GROUP, Precision, parse_layer_rungs
from kvstore.errors import ConfigError
from kvstore.units import MIB, Bytes, Nanos, milliseconds, seconds


def _default_cache_dir() -> Path:
    return Path.home() / ".cache" / "larder"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """The keys of every node that runs an engine."""

    node_id: str = "compute"
    """Name of this member, stable over restarts. Unique in the cluster."""
    host: str = "127.0.0.1"
    """Address it listens on, and by which the others reach it."""
    port: int = 0
    """0: a free one."""
    metrics_port: int = 0
    """Where Prometheus finds /metrics; 0: a free one."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis (6.2 or later, or Valkey) in which the members of the cluster meet."""
    zone: str = "zone-a"
    """Where this node stands, for people to look at."""
    log_level: str = "info"
    """debug, info, warning or error; to stderr."""

    model: str = "default"
    """A Hugging Face folder, a .gguf file, or "default"."""
    cache_dir: Path = field(default_factory=_default_cache_dir)
    """Where a converted model is kept."""
    device: str = "cpu"
    """A torch device."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of weights and KV; part of the layout, so all nodes must agree."""
    threads: int = 0
    """Threads of the engine's matrix products; 0: one for each CPU this process may use."""
    pool_blocks: int = 512
    """Blocks of the paged pool: running sequences, and what stays for local hits."""
    block_tokens: int = 32
    """Tokens of one block; part of the layout, so all nodes must agree."""
    chunk_tokens: int = 512
    """Most tokens of one prompt in one step, and of all prompts together."""
    mixed_tokens: int = 64
    """Most prompt tokens in a step in which answers go on too: how long an answer may wait for a prompt."""
    first_come: bool = False
    """Compute each prompt whole as soon as it comes, while all answers wait. For comparison: `kvctl bench pd`."""
    seal: bool = True
    """Make each full block canonical and publish it. Without it what this node computes ends with it, and a stream may change its tokens
    when it changes its node. For comparison: `kvctl bench failover`."""
    max_batch: int = 32
    """Most sequences in one decode step."""

    rung: Rung = Rung.INT8
    """Quality of the payloads. With what follows, down to klt_step, it decides the numbers that sequences attend to: part of the
    layout, so all nodes must agree."""
    group: int = GROUP
    """Elements that share a scale at rungs int8 to int4; a multiple of 8."""
    exact_tokens: int = FIRST_EXACT_TOKENS
    """First tokens of a sequence that lossy rungs keep as they are."""
    layer_rungs: str = ""
    """Other rungs for single layers at int8 to int4, such as "0-1:int8, 14:int6"."""
    calibration: Path | None = None
    """File of `kvctl calibrate`, the same on all nodes: what writing and reading rung klt takes."""
    klt_step: int = DEFAULT_STEP
    """Quality of rung klt, 1 (most bits) to 255: 2, 3, 6 and 8 stand for high, middle, low and cold."""
    entropy: bool = True
    """Compress payloads where it pays."""
    replicas: int = 2
    """Store nodes that get a copy of each block."""
    acknowledge: Acknowledge = Acknowledge.QUORUM
    """How many replicas must have a block before it counts as published: one, quorum or all."""
    publish_queue: Bytes = Bytes(256 * MIB)
    """Payload bytes sealed and not yet put."""
    store: ClientConfig = field(default_factory=ClientConfig)

    load_threads: int = 2
    """Worker threads that decode fetched blocks into the pool."""
    load_max_wait: Nanos = seconds(5)
    """Longest that fetching a prefix may take before the rest is computed."""

    member_ttl: Nanos = seconds(6)
    """Of this node's lease in Redis; a third of it is the period of renewal."""
    drain_leave: Nanos = seconds(3)
    """How long a stopping node goes on with what it has, so that the gateway moves its streams to prepared nodes without a gap. Then they
    are let go."""
    drain_flush: Nanos = milliseconds(500)
    """How long a stopping node goes on publishing what its streams have sealed before it lets them go."""

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ConfigError("node_id must not be empty")
        for key in ("port", "metrics_port"):
            if not 0 <= getattr(self, key) <= 65535:
                raise ConfigError(f"{key} must be 0 to 65535: {getattr(self, key)}")
        for key in ("pool_blocks", "block_tokens", "chunk_tokens", "max_batch", "replicas", "load_threads"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1: {getattr(self, key)}")
        for key in ("publish_queue", "load_max_wait", "member_ttl"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key} must be above 0: {getattr(self, key)}")
        if not 1 <= self.klt_step <= MAX_STEP:
            raise ConfigError(f"klt_step must be 1 to {MAX_STEP}: {self.klt_step}")
        _ = self.precision  # checks the rest
        if self.rung is Rung.KLT and self.calibration is None:
            raise ConfigError("rung klt needs calibration = a file of `kvctl calibrate`")
        if self.threads < 0:
            raise ConfigError(f"threads must be 0 (one for each CPU) or more: {self.threads}")
        if self.chunk_tokens % self.block_tokens:
            raise ConfigError(f"chunk_tokens ({self.chunk_tokens}) must be a multiple of block_tokens ({self.block_tokens})")
        if self.mixed_tokens < self.block_tokens:
            raise ConfigError(f"mixed_tokens ({self.mixed_tokens}) must be at least block_tokens ({self.block_tokens})")
        if not 0 <= self.drain_leave <= seconds(30):
            raise ConfigError("drain_leave must be 0 to 30s: a supervisor gives a stopping process no more")
        if self.drain_flush > seconds(10):
            raise ConfigError("drain_flush must be at most 10s: a supervisor gives a stopping process no more")

    @property
    def precision(self) -> Precision:
        return Precision(
            rung=self.rung,
            group=self.group,
            exact_tokens=self.exact_tokens,
            layer_rungs=parse_layer_rungs(self.layer_rungs),
            step=self.klt_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(ComputeConfig):
    node_id: str = "prefill"
    """Name of this member, stable over restarts. Unique in the cluster."""
    publish_wait: Nanos = seconds(5)
    """How long the engine waits for room in a full publish queue before it leaves a block unpublished."""

    def __post_init__(self) -> None:
        ComputeConfig.__post_init__(self)
        if self.publish_wait < 0:
            raise ConfigError(f"publish_wait must not be negative: {self.publish_wait}")
