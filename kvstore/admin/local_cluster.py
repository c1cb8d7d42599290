"""A whole cluster on loopback: Redis, store nodes, prefill and decode nodes and the gateway, each a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from kvstore.admin.local_process import LocalProcess, ProcessFailed, wait_until_ready
from kvstore.errors import ConfigError, Unavailable
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.units import Nanos, seconds

START_TIMEOUT = seconds(600)
"""Of all processes together. The first start on a machine also converts the model and compiles kernels: half a minute on two idle
cores, minutes on busy ones."""
STOP_TIMEOUT = seconds(20)
MAX_NODES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """What to start."""

    folder: Path
    """Configs, logs and SSD regions; made when missing."""
    model: str = "default"
    cache_dir: Path | None = None
    """Where a converted model is kept; None: the nodes' own default."""
    store_nodes: int = 3
    prefill_nodes: int = 1
    decode_nodes: int = 2
    both_nodes: int = 0
    """Nodes with both roles in one process."""
    gateway_port: int = 0
    replicas: int = 2
    rung: str = "int8"
    log_level: str = "info"
    compute: tuple[tuple[str, object], ...] = ()
    """Further keys of every prefill and decode node."""

    def __post_init__(self) -> None:
        for key, least in (("store_nodes", 0), ("prefill_nodes", 0), ("both_nodes", 0), ("decode_nodes", 0 if self.both_nodes else 1)):
            if not least <= getattr(self, key) <= MAX_NODES:
                raise ConfigError(f"{key.replace('_', ' ')} must be {least} to {MAX_NODES}: {getattr(self, key)}")


class LocalCluster:
    """Blocking; a context manager that leaves no process behind. Start it from the main thread (see LocalProcess)."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.processes: dict[str, LocalProcess] = {}
        self._redis = EmbeddedRedis()

    @property
    def redis_url(self) -> str:
        return self._redis.url

    @property
    def redis_pid(self) -> int:
        return self._redis.pid

    @property
    def gateway_url(self) -> str:
        return f"http://{self.processes['gateway'].addresses['http']}"

    def start(
        self,
        on_ready: Callable[[str], None] = lambda name: None,
        on_waiting: Callable[[list[str]], None] = lambda names: None,
    ) -> None:
        """Return when the gateway says that it is ready. Raises ProcessFailed or ConfigError; nothing runs then."""
        try:
            self.plan.folder.mkdir(parents=True, exist_ok=True)
            self._redis.start()
            on_ready("redis")
            self.processes = {process.name: process for process in self._make_processes()}
            for process in self.processes.values():
                process.start()
            wait_until_ready(
                list(self.processes.values()),
                timeout=START_TIMEOUT,
                on_ready=lambda process: on_ready(process.name),
                on_waiting=lambda waiting: on_waiting([process.name for process in waiting]),
            )
            self._wait_until_gateway_ready(timeout=seconds(30))
        except BaseException:
            self.stop()
            raise

    def restart(self, name: str) -> None:
        """Start a process anew with the same config, after a graceful stop if it still runs. Raises ProcessFailed."""
        self.start_anew(name)
        self.wait_until_back(name)

    def start_anew(self, name: str) -> None:
        """The same without waiting for it: `wait_until_back`."""
        process = self.processes[name]
        process.terminate()
        process.wait(STOP_TIMEOUT)
        process.start()

    def wait_until_back(self, name: str) -> None:
        """Until it serves and the gateway has met it. Raises ProcessFailed."""
        wait_until_ready([self.processes[name]], timeout=START_TIMEOUT)
        self._wait_until_gateway_ready(timeout=seconds(30))

    def decode_node_of_the_only_stream(self) -> str:
        """Asks the gateway, and blocks: to be called from inside a stream's callback, where a blow must fall at once. Raises Unavailable
        when there is not exactly one stream that has a node."""
        answer = httpx.get(f"{self.gateway_url}/larder/sessions", timeout=30, trust_env=False).json()
        nodes = [session["decode_node"] for session in answer["sessions"] if session["decode_node"]]
        if len(nodes) != 1:
            raise Unavailable(f"the gateway lists {len(nodes)} running streams where there is one")
        return str(nodes[0])

    def stop(self) -> None:
        """Gateway first, Redis last, so that each can still say goodbye to those it knows."""
        try:
            for roles in (("gateway",), ("decode", "prefill", "both"), ("store",)):
                group = [process for process in self.processes.values() if process.role in roles]
                for process in group:
                    process.terminate()
                for process in group:
                    process.wait(STOP_TIMEOUT)
        finally:
            for process in self.processes.values():
                process.kill()
            self._redis.stop()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _make_processes(self) -> Iterable[LocalProcess]:
        plan = self.plan
        common: dict[str, object] = {"redis_url": self.redis_url, "log_level": plan.log_level}
        model: dict[str, object] = {"model": plan.model}
        if plan.cache_dir is not None:
            model["cache_dir"] = str(plan.cache_dir)
        compute = {**common, **model, "rung": plan.rung, "replicas": plan.replicas, **dict(plan.compute)}
        for number in range(1, plan.store_nodes + 1):
            name = f"store-{number}"
            store = {**common, "node_id": name, "zone": f"zone-{number}", "ssd_path": str(plan.folder / f"{name}.ssd")}
            yield LocalProcess(name=name, role="store", module="kvstore.node", settings=store, folder=plan.folder)
        for role, count in (("prefill", plan.prefill_nodes), ("decode", plan.decode_nodes), ("both", plan.both_nodes)):
            for number in range(1, count + 1):
                name = f"{role}-{number}"
                settings = {**compute, "node_id": name, **({"roles": "both"} if role == "both" else {})}
                module = "prefill_node" if role == "prefill" else "decode_node"
                yield LocalProcess(name=name, role=role, module=module, settings=settings, folder=plan.folder)
        gateway = {**common, **model, "http_port": plan.gateway_port, "replicas": plan.replicas}
        yield LocalProcess(name="gateway", role="gateway", module="decode_node.gateway", settings=gateway, folder=plan.folder)

    def _wait_until_gateway_ready(self, *, timeout: Nanos) -> None:
        """The gateway serves before it has met the nodes; its /health says when it has."""
        deadline = time.monotonic_ns() + timeout
        whole = self.plan.store_nodes >= self.plan.replicas and self.plan.prefill_nodes + self.plan.both_nodes > 0
        wanted = ("ok",) if whole else ("ok", "degraded")
        with httpx.Client(base_url=self.gateway_url, timeout=5, trust_env=False) as client:
            while time.monotonic_ns() < deadline:
                for process in self.processes.values():
                    if process.exit_code is not None:
                        raise ProcessFailed(process.failure())
                try:
                    if client.get("/health").json().get("status") in wanted:
                        return
                except (httpx.HTTPError, ValueError):
                    pass
                time.sleep(0.05)
        raise ProcessFailed(self.processes["gateway"].failure())


def cache_dir_from_environment() -> Path | None:
    value = os.environ.get("LARDER_CACHE_DIR")
    return Path(value).expanduser() if value else None
