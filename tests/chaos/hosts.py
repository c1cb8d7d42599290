"""Where a store runs and what can befall it there: the choice between namespaces of their own and loopback, and the latter."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from chaos.link import Link, Weather
from chaos.namespaces import Networks, obstacle

LOOPBACK = "127.0.0.1"


class Host(Protocol):
    """One store's. What struck it lasts until `clear_up`."""

    address: str
    """By which the others reach it."""
    bind: str
    """Where it listens."""
    admin_address: str
    """host:port by which the hand looks at it."""
    port: int
    data_port: int
    redis_url: str
    ssd: Path

    def command(self, argv: Sequence[str]) -> list[str]: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def cut(self) -> None:
        """Nothing passes between it and the others; its Redis it reaches."""

    def silence(self, *, inward: bool, outward: bool) -> None:
        """What is sent vanishes without a word."""

    def delay(self, delay_s: float) -> None: ...

    def part_from_redis(self) -> None: ...

    def clear_up(self) -> None: ...

    def fill_disk(self, pid: int | None) -> None:
        """Of its process, if there is one."""

    def empty_disk(self, pid: int | None) -> None: ...


class LoopbackHost:
    """127.0.1.<number>: links of ours stand in front of the ports that its store has at 127.0.0.1. Its disk is full when the kernel's limit
    on the size of files says so (EFBIG, not ENOSPC)."""

    def __init__(self, number: int, *, redis_port: int, folder: Path) -> None:
        self.address, self.bind = f"127.0.1.{number}", LOOPBACK
        self.port, self.data_port, redis_door = (_free_port(LOOPBACK, self.address) for _ in range(3))
        self.admin_address = f"{LOOPBACK}:{self.port}"
        self.redis_url = f"redis://{self.address}:{redis_door}/0"
        self.ssd = folder / f"ssd-{number}"
        self._weather, self._to_redis = Weather(), Weather()
        self._links = [Link((self.address, port), (LOOPBACK, port), self._weather) for port in (self.port, self.data_port)]
        self._redis_link = Link((self.address, redis_door), (LOOPBACK, redis_port), self._to_redis)

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    async def open(self) -> None:
        for link in (*self._links, self._redis_link):
            await link.start()

    async def close(self) -> None:
        for link in (*self._links, self._redis_link):
            await link.stop()

    def cut(self) -> None:
        self._weather.refuses = True
        for link in self._links:
            link.cut()

    def silence(self, *, inward: bool, outward: bool) -> None:
        self._weather.hold(inward=inward, outward=outward)

    def delay(self, delay_s: float) -> None:
        self._weather.delay_s = delay_s

    def part_from_redis(self) -> None:
        self._to_redis.hold(inward=True, outward=True)

    def clear_up(self) -> None:
        self._weather.clear_up()
        self._to_redis.clear_up()

    def fill_disk(self, pid: int | None) -> None:
        self._limit_files(pid, 0)

    def empty_disk(self, pid: int | None) -> None:
        self._limit_files(pid, None)

    def _limit_files(self, pid: int | None, most: int | None) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if most is None else most, hard))


class Hosts:
    """All of one run: `networks` is None on loopback."""

    def __init__(self, networks: Networks | None, folder: Path) -> None:
        self._networks, self._folder = networks, folder

    @property
    def redis_options(self) -> tuple[str, ...]:
        """Further flags of the Redis that all of them reach."""
        if self._networks is None:
            return ()
        return ("--bind", LOOPBACK, self._networks.redis_address, "--protected-mode", "no")

    def make(self, number: int, *, redis_port: int) -> Host:
        if self._networks is None:
            return LoopbackHost(number, redis_port=redis_port, folder=self._folder)
        return self._networks.host(number, redis_port=redis_port, folder=self._folder)


@contextmanager
def open_hosts(kind: str, folder: Path) -> Iterator[tuple[Hosts, str]]:
    """`kind`: netns, loopback, or auto: namespaces where that works. Yields them and a line about what they are; nothing is left of them
    afterwards, however the run ended. Raises SystemExit when netns is asked for and cannot be had."""
    with contextlib.ExitStack() as stack:
        why_not = "as asked" if kind == "loopback" else obstacle()
        if why_not is None:
            networks = stack.enter_context(Networks())
            yield Hosts(networks, folder), f"hosts: network namespaces on {networks.subnet}; {networks.slowness}; full disks are full tmpfs"
            return
        if kind == "netns":
            raise SystemExit(f"chaos: no network namespaces here: {why_not}")
        yield Hosts(None, folder), f"hosts: loopback ({why_not}); full disks by the limit on the size of files"


def _free_port(*hosts: str) -> int:
    """Free at each host, and below the ports that the system gives to outgoing connections: it stays free while its node is down."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(12_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for host in hosts:
                probes.enter_context(socket.socket()).bind((host, port))
            return port


def wipe(folder: Path) -> None:
    """What is in the folder, which may be a mount: the folder stays."""
    for path in folder.iterdir() if folder.is_dir() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
