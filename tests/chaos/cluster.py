"""Real store processes, a real Redis, and links in front of every port that one of them reaches another by."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from chaos.ledger import KEY_SPACE, Ledger
from chaos.link import Link, Weather

from kvstore.core.placement import place
from kvstore.core.view import MemberState
from kvstore.errors import LarderError
from kvstore.ids import BlockHash, BlockRef, NodeId
from kvstore.process import PARENT_VARIABLE
from kvstore.registry import EmbeddedRedis, RedisRegistry, RegistryConfig
from kvstore.rpc.admin_stub import AdminStub, NodeReport
from kvstore.rpc.channel import open_channel
from kvstore.units import milliseconds, seconds

REPLICAS = 2
LOOPBACK = "127.0.0.1"
_CALL_TIMEOUT = seconds(3)
_READY_S = 90.0
_LIVING = (MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING)


def _free_port(*hosts: str) -> int:
    """Free at each host, and below the ports that the system gives to outgoing connections: it stays free while its node is down."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(12_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for host in hosts:
                probes.enter_context(socket.socket()).bind((host, port))
            return port


class StoreProcess:
    """One store: reached by others at 127.0.1.<number>, through its links, at the ports that it has at 127.0.0.1 itself."""

    def __init__(self, number: int, redis_port: int, folder: Path) -> None:
        self.node_id = NodeId(f"s{number}")
        self.weather = Weather()
        self.to_redis = Weather()
        front = f"127.0.1.{number}"
        self.port, data_port, redis_door = (_free_port(LOOPBACK, front) for _ in range(3))
        self._links = [Link((front, port), (LOOPBACK, port), self.weather) for port in (self.port, data_port)]
        self._redis_link = Link((front, redis_door), (LOOPBACK, redis_port), self.to_redis)
        self.ssd = folder / f"ssd-{number}"
        self.log = folder / f"{self.node_id}.log"
        flags: dict[str, object] = {
            "node_id": self.node_id,
            "redis_url": f"redis://{front}:{redis_door}/0",
            "port": self.port,
            "data_port": data_port,
            "advertise_host": front,
            "zone": self.node_id,
            "ucx": "false",
            "shm": "off" if number % 2 else "read_write",  # peers of one machine would never use their links otherwise
            "host_capacity": "48MiB",
            "ssd_path": self.ssd,
            "ssd_capacity": "24MiB",
            "region_bytes": "1MiB",
            "demote_above": 0.0,
            "reservation_ttl": "5s",
            "drain_deadline": "1s",
            "log_level": "warning",
            "registry.lease_ttl": "1500ms",
            "registry.dead_after": "1500ms",
            "registry.poll_every": "100ms",
            "repair.delay": "200ms",
            "repair.anti_entropy_every": "3s",
            "repair.takeover_steps": 2,
            "repair.takeover_step_limit": "5s",
        }
        self._argv = [sys.executable, "-m", "kvstore.node", *(f"--{key}={value}" for key, value in flags.items())]
        self._process: subprocess.Popen[str] | None = None
        self._channel = open_channel(f"{LOOPBACK}:{self.port}")
        self.admin = AdminStub(self._channel)
        self.wanted = False
        """Whether it should be a member now: not drained away."""

    @property
    def up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    async def open(self) -> None:
        for link in (*self._links, self._redis_link):
            await link.start()

    async def close(self) -> None:
        self.kill()
        for link in (*self._links, self._redis_link):
            await link.stop()
        await self._channel.close()

    def _start(self) -> None:
        """In the main thread: the child ends with the thread that started it."""
        environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)

    async def bring_up(self) -> None:
        """Returns when it serves. One that finds no Redis ends, and is started again."""
        self.wanted = True
        async with asyncio.timeout(_READY_S):
            while True:
                self.kill()
                self._start()
                assert self._process is not None
                assert self._process.stdout is not None
                if (await asyncio.to_thread(self._process.stdout.readline)).startswith("READY "):
                    return
                await asyncio.sleep(0.3)

    def send(self, number: signal.Signals) -> None:
        if self.up:
            assert self._process is not None
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    async def let_go(self, within_s: float) -> int | None:
        """SIGTERM; the exit code, None when it had to be killed."""
        self.wanted = False
        self.send(signal.SIGTERM)
        assert self._process is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._process.wait, within_s)
        self.kill()
        return code

    def fill_disk(self) -> None:
        """Every write to a file fails from now on, as on a disk that is full for this process: the kernel's file size limit."""
        self._limit_files(0)

    def empty_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, most: int) -> None:
        if self.up:
            assert self._process is not None
            _, hard = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (hard if most == resource.RLIM_INFINITY else most, hard))

    def cut(self) -> None:
        self.weather.refuses = True
        for link in self._links:
            link.cut()

    async def status(self) -> NodeReport | None:
        with contextlib.suppress(LarderError):
            return await self.admin.status(timeout=_CALL_TIMEOUT)
        return None


class Cluster:
    """`most` stores of which `first` run at the start. A context manager around `open` and `close`; belongs to the main thread."""

    def __init__(self, folder: Path, *, first: int, most: int) -> None:
        self.redis = EmbeddedRedis()
        self._folder, self._first, self._most = folder, first, most
        self.stores: dict[NodeId, StoreProcess] = {}

    async def open(self) -> None:
        self.redis.start()
        for number in range(1, self._most + 1):
            store = StoreProcess(number, self.redis.port, self._folder)
            self.stores[store.node_id] = store
            await store.open()
        await asyncio.gather(*(store.bring_up() for store in list(self.stores.values())[: self._first]))
        self.registry = RedisRegistry(self.redis.url, config=RegistryConfig(poll_every=milliseconds(50)))
        await self.registry.start()

    async def close(self) -> None:
        await asyncio.gather(*(store.close() for store in self.stores.values()))
        if hasattr(self, "registry"):
            await self.registry.close()
        self.redis.stop()

    def wanted(self) -> list[StoreProcess]:
        return [store for store in self.stores.values() if store.wanted]

    async def missing(self, ledger: Ledger) -> str:
        """Empty when every store that should be is ACTIVE and each promised block lies at both of its owners; else what is not so."""
        view = self.registry.view
        states = {member.node_id: member.state for member in view.stores if member.state in _LIVING}
        expected = {store.node_id: MemberState.ACTIVE for store in self.wanted()}
        if states != expected:
            return f"members are {', '.join(f'{name} {state.value}' for name, state in sorted(states.items()))}"
        refs = ledger.promised()
        held: dict[NodeId, set[BlockHash]] = {}
        for node_id in expected:
            held[node_id] = await self._held(self.stores[node_id], refs)
        lacking = sum(ref.hash not in held[owner] for ref in refs for owner in place(ref.stripe, view, replicas=REPLICAS))
        if lacking and self.registry.view.epoch == view.epoch:
            return f"{lacking} copies are not at their owners"
        return "" if self.registry.view.epoch == view.epoch else "the view changes"

    async def _held(self, store: StoreProcess, refs: list[BlockRef]) -> set[BlockHash]:
        try:
            reports = await store.admin.locate(KEY_SPACE, refs, timeout=_CALL_TIMEOUT)
        except LarderError:
            return set()
        return {ref.hash for ref, report in zip(refs, reports, strict=True) if report.tiers}

    async def until_whole(self, ledger: Ledger, *, within_s: float) -> str:
        """Empty as soon as nothing is missing; what still is after that time."""
        missing = "nobody has looked"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while missing := await self.missing(ledger):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        return missing
