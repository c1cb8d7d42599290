"""The host tier: one arena of anonymous shared memory."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import GIB, Bytes

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 2
_F_SEAL_GROW = 4
_F_SEAL_FUTURE_WRITE = 16
"""From linux/fcntl.h; Python names not all of them. FUTURE_WRITE came with Linux 5.1."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class HostArena:
    """`capacity` bytes behind one file descriptor, which another process can map when it is handed over.

    A memfd and not a named file in /dev/shm: the kernel drops it with the last process that holds it, so that a
    `kill -9` leaves nothing behind. Pages are taken from the system on first touch.
    """

    def __init__(self, capacity: Bytes, *, sealed: bool = False, key: str = "host_capacity") -> None:
        """`sealed`: nobody but this object can ever write to it, whoever holds a descriptor: the kernel refuses. `key`: of the
        configuration, for the error.

        Raises ConfigError when the machine, or the control group, has less memory than asked for."""
        limit = memory_of_this_machine()
        if not 0 < capacity <= limit:
            raise ConfigError(
                f"{key} is {capacity} bytes ({capacity / GIB:.1f} GiB); this machine has {limit} bytes ({limit / GIB:.1f} GiB) of memory"
            )
        self.capacity = capacity
        self.fd = os.memfd_create("larder-host-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity)
        # A reader's mapping must not lose its pages: the size never changes.
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | (_F_SEAL_FUTURE_WRITE if sealed else 0))
        self.sealed = sealed
        self._bytes = memoryview(self._map)

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes themselves, writable. Only for as long as the core says that the extent is the caller's."""
        if not 0 <= offset <= offset + size <= self.capacity:
            raise TierFailure(FailureReason.IO_ERROR, f"[{offset}, {offset + size}) is outside the arena of {self.capacity} bytes")
        return self._bytes[offset : offset + size]

    def share(self) -> list[int]:
        """Descriptors for another process: one to read, and one to write unless the arena is sealed. The caller closes them."""
        fds = [os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)]
        if not self.sealed:
            fds.append(os.dup(self.fd))
        return fds

    def write(self, place: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        assert place == 0
        for part in parts:
            self.view(offset, len(part))[:] = part
            offset += len(part)

    def sync(self, place: int) -> None:
        """Memory promises nothing over a crash."""

    def read_into(self, place: int, offset: int, out: memoryview) -> None:
        assert place == 0
        out[:] = self.view(offset, len(out))

    def close(self) -> None:
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a view of a last reader is still out; the memory goes with it
        os.close(self.fd)


def memory_of_this_machine() -> Bytes:
    """Bytes this process could use at most: physical memory, or the control group's limit when that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return Bytes(physical)
    return Bytes(physical if limit == "max" else min(physical, int(limit)))
