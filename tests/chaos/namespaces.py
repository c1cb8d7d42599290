"""Hosts that the kernel keeps apart: a network namespace a store, two real links each (to the others, to Redis), a small tmpfs for its SSD.

Needs root, and ip, tc, nsenter and mount as every Debian has them; no packet filter. One way of a link is silenced by the queue discipline
that drops all (`blackhole`), both ways are cut by taking it down. Delays are netem's where the kernel has it, else the link becomes narrow.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_TOOLS = ("ip", "tc", "nsenter", "mount", "umount")
_NAME = "larder-chaos"
_PORT, _DATA_PORT = 7401, 7402
_CHECKED_PORT = 9
_MEDIUM_BYTES = 26 << 20
"""A little more than a store's SSD tier may take: it never gets all of it while somebody else's file is there too."""
_FILLER = "of-somebody-else"
_NARROW_PIECE_BITS = 8 * 32 * 1024
"""Without netem: this much takes as long as the delay that was asked for."""


def _run(*argv: str) -> None:
    """Raises RuntimeError with what it said."""
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


def _try(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


def obstacle() -> str | None:
    """Why there can be none here; None: tried, and a packet came back."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on PATH"
    sweep()
    try:
        with Networks() as networks:
            wire = networks.plug(0)
            try:
                _run("tc", "qdisc", "replace", "dev", wire.outer, "root", "blackhole")
                wire.clear_up()
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection((wire.address, _CHECKED_PORT), timeout=2).close()
            finally:
                wire.unplug()
    except (RuntimeError, OSError) as error:
        return str(error)
    return None


def sweep() -> None:
    """What runs left that were killed before they could take it away."""
    for line in Path("/proc/mounts").read_text().splitlines():
        source, place, *_ = line.split()
        if (match := re.fullmatch(rf"{_NAME}-(\d+)", source)) and not _lives(match[1]):
            _try("umount", "--lazy", place)
    for name in Path("/sys/class/net").iterdir():
        if (match := re.fullmatch(r"lc(\d+)[a-z]\d+", name.name)) and not _lives(match[1]):
            _try("ip", "link", "delete", name.name)
    known = Path("/run/netns")
    for path in known.iterdir() if known.is_dir() else ():
        if (match := re.fullmatch(rf"{_NAME}-(\d+)-\d+", path.name)) and not _lives(match[1]):
            _try("ip", "netns", "delete", path.name)


def _lives(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


class Wire:
    """A pair of virtual devices: `outer` at the bridge, `inner` in the namespace."""

    def __init__(self, *, bridge: str, outer: str, inner: str, namespace: str, address: str, netem: bool) -> None:
        self.outer, self.address = outer, address
        self._inner, self._namespace, self._netem = inner, namespace, netem
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
        _run("ip", "link", "set", outer, "master", bridge, "up")
        _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", inner)
        _run("ip", "-n", namespace, "link", "set", inner, "up")

    def cut(self) -> None:
        _run("ip", "link", "set", self.outer, "down")

    def silence(self, *, inward: bool, outward: bool) -> None:
        if inward:
            self._queue_outer("blackhole")
        if outward:
            self._queue_inner("blackhole")

    def delay(self, delay_s: float) -> None:
        """Each way."""
        if self._netem:
            how = ["netem", "delay", f"{round(delay_s * 1e6)}us"]
        else:
            how = ["tbf", "rate", f"{round(_NARROW_PIECE_BITS / delay_s)}bit", "burst", "8kb", "limit", "512kb"]
        self._queue_outer(*how)
        self._queue_inner(*how)

    def clear_up(self) -> None:
        _try("tc", "qdisc", "delete", "dev", self.outer, "root")
        _try("tc", "-n", self._namespace, "qdisc", "delete", "dev", self._inner, "root")
        _run("ip", "link", "set", self.outer, "up")

    def unplug(self) -> None:
        _try("ip", "link", "delete", self.outer)

    def _queue_outer(self, *how: str) -> None:
        _run("tc", "qdisc", "replace", "dev", self.outer, "root", *how)

    def _queue_inner(self, *how: str) -> None:
        _run("tc", "-n", self._namespace, "qdisc", "replace", "dev", self._inner, "root", *how)


class NamespaceHost:
    def __init__(self, namespace: str, *, data: Wire, control: Wire, redis_url: str, ssd: Path) -> None:
        self.address = self.bind = data.address
        self.port, self.data_port = _PORT, _DATA_PORT
        self.admin_address = f"{self.address}:{self.port}"
        self.redis_url, self.ssd = redis_url, ssd
        self._namespace, self._data, self._control = namespace, data, control

    def command(self, argv: Sequence[str]) -> list[str]:
        """nsenter becomes the store: one process, one pid."""
        return ["nsenter", f"--net=/run/netns/{self._namespace}", "--", *argv]

    async def open(self) -> None:
        """It stands since it was made."""

    async def close(self) -> None:
        """The networks take it away, with all others."""

    def cut(self) -> None:
        self._data.cut()

    def silence(self, *, inward: bool, outward: bool) -> None:
        self._data.silence(inward=inward, outward=outward)

    def delay(self, delay_s: float) -> None:
        self._data.delay(delay_s)

    def part_from_redis(self) -> None:
        self._control.silence(inward=True, outward=True)

    def clear_up(self) -> None:
        self._data.clear_up()
        self._control.clear_up()

    def fill_disk(self, pid: int | None) -> None:
        """To the last byte but a few: the kernel says ENOSPC. What the store has allocated it keeps."""
        free = os.statvfs(self.ssd)
        with (self.ssd / _FILLER).open("ab") as filler, contextlib.suppress(OSError):
            os.posix_fallocate(filler.fileno(), filler.tell(), max(4096, free.f_bavail * free.f_frsize - 4096))

    def empty_disk(self, pid: int | None) -> None:
        (self.ssd / _FILLER).unlink(missing_ok=True)


class Networks:
    """Two bridges: 198.18.n.0/24 between the stores and their clients, 198.19.n.0/24 to Redis (addresses kept for tests of networks). A
    context manager that takes everything away again: namespaces, links, mounts."""

    def __init__(self) -> None:
        pid = os.getpid()
        self._tag, self._source = f"lc{pid}", f"{_NAME}-{pid}"
        self._namespaces: list[str] = []
        self._mounts: list[Path] = []
        self._wires: list[Wire] = []
        self._bridges: list[str] = []

    def __enter__(self) -> Self:
        try:
            number = self._free_number()
            self._data_net, self._control_net = f"198.18.{number}", f"198.19.{number}"
            self.subnet, self.redis_address = f"{self._data_net}.0/24", f"{self._control_net}.1"
            for letter, net in (("b", self._data_net), ("r", self._control_net)):
                bridge = f"{self._tag}{letter}0"
                _run("ip", "link", "add", bridge, "type", "bridge")
                self._bridges.append(bridge)
                _run("ip", "address", "add", f"{net}.1/24", "dev", bridge)
                _run("ip", "link", "set", bridge, "up")
            bridge = self._bridges[0]
            self._netem = _try("tc", "qdisc", "replace", "dev", bridge, "root", "netem", "delay", "1us")
            _try("tc", "qdisc", "delete", "dev", bridge, "root")
        except BaseException:
            self._take_away()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._take_away()

    @property
    def slowness(self) -> str:
        return "delays by netem" if self._netem else "no netem in this kernel, so a delay is a narrow link"

    def plug(self, number: int) -> Wire:
        """A namespace, and its link to the others."""
        namespace = f"{self._source}-{number}"
        _run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        return self._wire(number, namespace, 0)

    def host(self, number: int, *, redis_port: int, folder: Path) -> NamespaceHost:
        data = self.plug(number)
        namespace = self._namespaces[-1]
        ssd = folder / f"ssd-{number}"
        ssd.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={_MEDIUM_BYTES}", self._source, str(ssd))
        self._mounts.append(ssd)
        redis_url = f"redis://{self.redis_address}:{redis_port}/0"
        return NamespaceHost(namespace, data=data, control=self._wire(number, namespace, 1), redis_url=redis_url, ssd=ssd)

    def _wire(self, number: int, namespace: str, network: int) -> Wire:
        wire = Wire(
            bridge=self._bridges[network],
            outer=f"{self._tag}{'dc'[network]}{number}",
            inner=f"eth{network}",
            namespace=namespace,
            address=f"{(self._data_net, self._control_net)[network]}.{10 + number}",
            netem=self._netem,
        )
        self._wires.append(wire)
        return wire

    def _free_number(self) -> int:
        taken = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True).stdout
        first = os.getpid() % 256
        for number in (*range(first, 256), *range(first)):
            if f"198.18.{number}." not in taken and f"198.19.{number}." not in taken:
                return number
        raise RuntimeError("no free network in 198.18.0.0/15")

    def _take_away(self) -> None:
        for place in self._mounts:
            _try("umount", "--lazy", str(place))
        for wire in self._wires:
            wire.unplug()
        for namespace in self._namespaces:
            _try("ip", "netns", "delete", namespace)
        for bridge in self._bridges:
            _try("ip", "link", "delete", bridge)
