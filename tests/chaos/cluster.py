"""Real store processes on their hosts, and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from chaos.hosts import Host, Hosts
from chaos.ledger import KEY_SPACE, REPLICAS, Ledger

from kvstore.core.placement import place
from kvstore.core.view import MemberState, View
from kvstore.errors import LarderError
from kvstore.ids import BlockHash, BlockRef, Epoch, NodeId
from kvstore.process import PARENT_VARIABLE
from kvstore.registry import EmbeddedRedis, RedisRegistry, RegistryConfig
from kvstore.rpc.admin_stub import AdminStub, NodeReport
from kvstore.rpc.channel import open_channel
from kvstore.units import milliseconds, seconds

_CALL_TIMEOUT = seconds(3)
_READY_S = 90.0
_LIVING = (MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING)


class StoreProcess:
    """One store on its host."""

    def __init__(self, number: int, host: Host, folder: Path) -> None:
        self.node_id = NodeId(f"s{number}")
        self.host = host
        self.log = folder / f"{self.node_id}.log"
        flags: dict[str, object] = {
            "node_id": self.node_id,
            "redis_url": host.redis_url,
            "host": host.bind,
            "port": host.port,
            "data_port": host.data_port,
            "advertise_host": host.address,
            "zone": self.node_id,
            "ucx": "false",
            "shm": "off" if number % 2 else "read_write",  # peers of one machine would never use their links otherwise
            "host_capacity": "48MiB",
            "ssd_path": host.ssd,
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
        self._argv = host.command([sys.executable, "-m", "kvstore.node", *(f"--{key}={value}" for key, value in flags.items())])
        self._process: subprocess.Popen[str] | None = None
        self._channel = open_channel(host.admin_address)
        self.admin = AdminStub(self._channel)
        self.wanted = False
        """Whether it should be a member now: not drained away."""
        self.starts = 0
        """Each but the first has lost what was in memory alone."""

    @property
    def up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.up and self._process is not None else None

    async def close(self) -> None:
        self.kill()
        await self.host.close()
        await self._channel.close()

    def _start(self) -> None:
        """In the main thread: the child ends with the thread that started it."""
        self.starts += 1
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

    async def status(self) -> NodeReport | None:
        with contextlib.suppress(LarderError):
            return await self.admin.status(timeout=_CALL_TIMEOUT)
        return None


class Cluster:
    """`most` stores of which `first` run at the start. A context manager around `open` and `close`; belongs to the main thread."""

    def __init__(self, hosts: Hosts, folder: Path, *, first: int, most: int) -> None:
        self.redis = EmbeddedRedis(options=hosts.redis_options)
        self._hosts, self._folder, self._first, self._most = hosts, folder, first, most
        self.stores: dict[NodeId, StoreProcess] = {}
        self.whole = View(Epoch(-1))
        """The last view in which nothing was missing."""

    async def open(self) -> None:
        self.redis.start()
        for number in range(1, self._most + 1):
            host = self._hosts.make(number, redis_port=self.redis.port)
            store = StoreProcess(number, host, self._folder)
            self.stores[store.node_id] = store
            await host.open()
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
        """Empty when every store that should be is ACTIVE, and no newcomer any more, and each promised block lies at both of its owners:
        then `whole` is that view. Else what is not so."""
        view = self.registry.view
        states = {member.node_id: member.state for member in view.stores if member.state in _LIVING}
        expected = {store.node_id: MemberState.ACTIVE for store in self.wanted()}
        if states != expected:
            return f"members are {', '.join(f'{name} {state.value}' for name, state in sorted(states.items()))}"
        if newcomers := [member.node_id for member in view.stores if member.node_id in expected and member.takeover < 1]:
            return f"{', '.join(newcomers)} still takes over"
        refs = ledger.promised()
        held: dict[NodeId, set[BlockHash]] = {}
        for node_id in expected:
            held[node_id] = await self._held(self.stores[node_id], refs)
        lacking = sum(ref.hash not in held[owner] for ref in refs for owner in place(ref.stripe, view, replicas=REPLICAS))
        if lacking and self.registry.view.epoch == view.epoch:
            return f"{lacking} copies are not at their owners"
        if self.registry.view.epoch != view.epoch:
            return "the view changes"
        self.whole = view
        return ""

    async def _held(self, store: StoreProcess, refs: list[BlockRef]) -> set[BlockHash]:
        try:
            reports = await store.admin.locate(KEY_SPACE, refs, timeout=_CALL_TIMEOUT)
        except LarderError:
            return set()
        return {ref.hash for ref, report in zip(refs, reports, strict=True) if report.tiers}

    async def fate(self, ref: BlockRef, holders: Iterable[NodeId]) -> str:
        """What has become of a block at each store that should hold it."""
        fates = []
        for node_id in sorted(holders):
            admin = self.stores[node_id].admin
            try:
                (here,) = await admin.locate(KEY_SPACE, [ref], timeout=_CALL_TIMEOUT)
                (gone,) = (await admin.recall(KEY_SPACE, [ref], timeout=_CALL_TIMEOUT)).departures
            except LarderError:
                fates.append(f"{node_id} does not answer")
                continue
            went = "does not remember it" if gone is None else f"gave it up {gone.ago_ms} ms ago ({gone.reason})"
            fates.append(f"{node_id} {'has it' if here.tiers else went}")
        return ", ".join(fates)

    async def until_whole(self, ledger: Ledger, *, within_s: float) -> str:
        """Empty as soon as nothing is missing; what still is after that time. Stores that were declared dead, found that out and ended are
        started again."""
        missing = "nobody has looked"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while missing := await self.missing(ledger):
                    for store in self.wanted():
                        if not store.up:
                            await store.bring_up()
                    await asyncio.sleep(0.1)
        return missing
