"""One file with positioned reads and writes, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.core.extent import ALIGNMENT, round_up
from kvstore.tiers.tier import FailureReason, TierFailure


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
        """Puts the parts one after another, and zeros up to a whole sector, at the sector `offset`. Raises TierFailure."""
        assert offset % ALIGNMENT == 0
        length = sum(len(part) for part in parts)
        size = round_up(length)
        try:
            buffer = self._aligned_buffer(size)
            filled = 0
            for part in parts:
                buffer[filled : filled + len(part)] = part
                filled += len(part)
            buffer[length:size] = bytes(size - length)
            done = 0
            while done < size:
                written = os.pwritev(self._fd, [buffer[done:size]], offset + done)
                if written == 0 or written % ALIGNMENT:
                    raise TierFailure(FailureReason.SHORT_WRITE, f"{self.path}: {done + written} of {size} bytes at {offset}")
                done += written
        except OSError as error:
            raise _failure(error, self.path) from error

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` from the sector `offset`. Raises TierFailure, also when the file ends early."""
        assert offset % ALIGNMENT == 0
        size = round_up(len(out))
        try:
            buffer = self._aligned_buffer(size)
            done = 0
            while done < len(out):
                got = os.preadv(self._fd, [buffer[done:size]], offset + done)
                if got == 0 or (got % ALIGNMENT and done + got < len(out)):
                    raise TierFailure(FailureReason.SHORT_READ, f"{self.path}: {done + got} of {len(out)} bytes at {offset}")
                done += got
        except OSError as error:
            raise _failure(error, self.path) from error
        out[:] = buffer[: len(out)]

    def sync(self) -> None:
        """Costs about 3 ms on the development machine, whatever was written: so once for many writes. Raises TierFailure."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _failure(error, self.path) from error

    def close(self) -> None:
        os.close(self._fd)

    def _aligned_buffer(self, size: int) -> memoryview:
        """This thread's staging memory: page-aligned as mmap gives it, grown to the largest request so far."""
        buffer: memoryview | None = getattr(self._staging, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = memoryview(mmap.mmap(-1, max(size, ALIGNMENT)))
            self._staging.buffer = buffer
        return buffer


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
