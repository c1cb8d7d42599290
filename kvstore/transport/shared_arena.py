"""A node's host arena, mapped into this process."""

from __future__ import annotations

import mmap
import os

from kvstore.units import Bytes


class SharedArena:
    """Read-only, and writable beside it where the node allows writes in place. Views outlive the node: what they show was there when it
    ended, and its memory goes with the last view."""

    def __init__(self, fds: list[int], capacity: Bytes) -> None:
        """`fds`: one to read, and one to write if the node gave it; they are this object's, and closed here."""
        self.capacity = capacity
        try:
            self._bytes = memoryview(mmap.mmap(fds[0], capacity, mmap.MAP_SHARED, mmap.PROT_READ))
            self._writable = memoryview(mmap.mmap(fds[1], capacity, mmap.MAP_SHARED)) if len(fds) > 1 else None
        finally:
            for fd in fds:
                os.close(fd)

    @property
    def writable(self) -> bool:
        return self._writable is not None

    def view(self, offset: int, size: int) -> memoryview | None:
        if not 0 <= offset <= offset + size <= self.capacity:
            return None
        return self._bytes[offset : offset + size]

    def room(self, offset: int, size: int) -> memoryview | None:
        if self._writable is None or not 0 <= offset <= offset + size <= self.capacity:
            return None
        return self._writable[offset : offset + size]

    def put(self, offset: int, payload: bytes | memoryview) -> bool:
        """One copy, into an extent that the caller has reserved and whose time is not over. False: no such span."""
        room = self.room(offset, len(payload))
        if room is not None:
            room[:] = payload
        return room is not None


def machine_identity() -> str:
    """Equal for two processes that can reach each other's abstract sockets: the same boot of one kernel, the same network namespace.

    Empty where the system does not say: then nobody is on the same machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
