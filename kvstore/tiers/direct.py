"""One file with positioned reads and writes, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.core.extent import ALIGNMENT, round_up
from kvstore.tiers.tier import FailureReason, TierFailure

_MOST_PARTS = 1024
"""Of one call, by the kernel."""


class DirectFile:
    """Threads may read and write spans that do not overlap at the same time. Page-cache I/O is the fallback: tmpfs of older kernels
    and some network file systems refuse O_DIRECT.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file. Raises TierFailure."""
        self.path = path
        try:
            self._fd, self.direct = _open(path)
        except OSError as error:
            raise _failure(error, path) from error
        self._staging = threading.local()

    def preallocate(self, size: int) -> None:
        """Takes all its space now, so that a later write cannot meet a full disk. Raises TierFailure (NO_SPACE when there is less)."""
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise _failure(error, self.path) from error

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Puts the parts one after another, and zeros up to a whole sector, at the sector `offset`. Raises TierFailure.

        A part that lies page-aligned in memory and begins a sector goes to the disk from where it is; what else there is, is copied once.
        """
        assert offset % ALIGNMENT == 0
        try:
            left = self._sectors_of(parts)
            done = 0
            while left:
                written = os.pwritev(self._fd, left[:_MOST_PARTS], offset + done)
                if written == 0 or written % ALIGNMENT:
                    raise TierFailure(FailureReason.SHORT_WRITE, f"{self.path}: {written} bytes at {offset + done}")
                done += written
                left = _behind(left, written)
        except OSError as error:
            raise _failure(error, self.path) from error

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` from the sector `offset`. Raises TierFailure, also when the file ends early.

        Into `aligned_memory` the disk writes itself, but for the last part of a sector; other memory costs a copy.
        """
        assert offset % ALIGNMENT == 0
        straight = len(out) // ALIGNMENT * ALIGNMENT if _address_of(out) % ALIGNMENT == 0 else 0
        staging = self._aligned_buffer(round_up(len(out) - straight))
        left = [part for part in (out[:straight], staging[: round_up(len(out) - straight)]) if len(part)]
        try:
            done = 0
            while done < len(out):
                got = os.preadv(self._fd, left, offset + done)
                if got == 0 or (got % ALIGNMENT and done + got < len(out)):
                    raise TierFailure(FailureReason.SHORT_READ, f"{self.path}: {done + got} of {len(out)} bytes at {offset}")
                done += got
                left = _behind(left, got)
        except OSError as error:
            raise _failure(error, self.path) from error
        out[straight:] = staging[: len(out) - straight]

    def sync(self) -> None:
        """Costs about 3 ms on the development machine, whatever was written: so once for many writes. Raises TierFailure."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _failure(error, self.path) from error

    def close(self) -> None:
        os.close(self._fd)

    def _sectors_of(self, parts: Sequence[bytes | memoryview]) -> list[memoryview]:
        """The parts as whole sectors of aligned memory: in place where they are that, staged where not."""
        staging = self._aligned_buffer(sum(round_up(len(part)) for part in parts))
        sectors: list[memoryview] = []
        used = filled = 0  # of the staging: up to its last whole sector that is in `sectors`, up to its last byte
        for part in parts:
            view = memoryview(part)
            straight = len(view) // ALIGNMENT * ALIGNMENT if filled % ALIGNMENT == 0 and _address_of(view) % ALIGNMENT == 0 else 0
            if straight:
                sectors += [piece for piece in (staging[used:filled], view[:straight]) if len(piece)]
                used = filled
            rest = len(view) - straight
            staging[filled : filled + rest] = view[straight:]
            filled += rest
        end = round_up(filled) if filled else 0
        staging[filled:end] = bytes(end - filled)
        return [*sectors, staging[used:end]] if end > used else sectors

    def _aligned_buffer(self, size: int) -> memoryview:
        """This thread's staging memory: page-aligned as mmap gives it, grown to the largest request so far."""
        buffer: memoryview | None = getattr(self._staging, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = memoryview(mmap.mmap(-1, max(size, ALIGNMENT)))
            self._staging.buffer = buffer
        return buffer


def aligned_memory(size: int) -> memoryview:
    """Not zeroed, page-aligned: `DirectFile.read_into` fills it without a copy. Cost: that of malloc, which keeps what was freed."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].data


def _address_of(memory: bytes | memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if len(memory) else 0


def _behind(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the parts after their first `count` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o600), False


def _failure(error: OSError, path: Path) -> TierFailure:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return TierFailure(FailureReason.NO_SPACE if full else FailureReason.IO_ERROR, f"{path}: {error.strerror}")
