"""The host tier: one arena of anonymous shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import GIB, Bytes

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class HostArena:
    """`capacity` bytes behind one file descriptor, which another process can map when it is handed over.

    A memfd and not a named file in /dev/shm: the kernel drops it with the last process that holds it, so that a
    `kill -9` leaves nothing behind. Pages are taken from the system on first touch.
    """

    def __init__(self, capacity: Bytes) -> None:
        """Raises ConfigError when the machine, or the control group, has less memory than asked for."""
        limit = memory_of_this_machine()
        if not 0 < capacity <= limit:
            raise ConfigError(
                f"host_capacity is {capacity} bytes ({capacity / GIB:.1f} GiB); "
                f"this machine has {limit} bytes ({limit / GIB:.1f} GiB) of memory"
            )
        self.capacity = capacity
        self.fd = os.memfd_create("larder-host-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, capacity)
        self._map = mmap.mmap(self.fd, capacity)
        self._bytes = memoryview(self._map)

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes themselves, writable. Only for as long as the core says that the extent is the caller's."""
        if not 0 <= offset <= offset + size <= self.capacity:
            raise TierFailure(FailureReason.IO_ERROR, f"[{offset}, {offset + size}) is outside the arena of {self.capacity} bytes")
        return self._bytes[offset : offset + size]

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
