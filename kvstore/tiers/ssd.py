"""The SSD tier: one folder with one preallocated file a region.

What the bytes in a region mean is the manifest's business (kvstore/core/manifest.py); this file only puts and gets them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from kvstore.core.extent import ALIGNMENT
from kvstore.core.manifest import FORMAT_VERSION
from kvstore.errors import ConfigError
from kvstore.tiers.direct import DirectFile
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import GIB, Bytes

logger = logging.getLogger(__name__)

_REGION_FILE = re.compile(r"region-(\d{6})")
_SHAPE_FILE = "SHAPE"
_LOCK_FILE = "LOCK"


class SsdRegions:
    """Regions 0 .. count - 1 of `region_bytes` each.

    A region's file is made, with all its space, at the first write to it: so a start costs nothing, and a medium that is full (the
    files of others count too) refuses a region and not a record in the middle of one.
    """

    def __init__(self, folder: Path, *, capacity: Bytes, region_bytes: Bytes, discard_other_formats: bool = False) -> None:
        """Raises ConfigError: folder not writable or used by another node, capacity above the medium's, or, unless it is to be discarded,
        a folder of another format or with other region sizes."""
        if region_bytes % ALIGNMENT:
            raise ConfigError(f"region_bytes must be a multiple of {ALIGNMENT}: {region_bytes}")
        self.folder = folder
        self.region_bytes = region_bytes
        self.count = capacity // region_bytes
        self.capacity = Bytes(self.count * region_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(folder)
        except OSError as error:
            raise ConfigError(f"ssd_path {folder} cannot be used: {error.strerror}") from error
        try:
            _check_capacity(folder, capacity)
            self._check_shape(discard=discard_other_formats)
            self._drop_surplus_files()
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._files: dict[int, DirectFile] = {}
        self._preallocated: set[int] = set()
        self._files_lock = threading.Lock()

    def existing(self) -> tuple[int, ...]:
        """Numbers of the regions that have a file, in order."""
        return tuple(sorted(number for number, _ in self._region_files()))

    def write(self, place: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        end = offset + sum(len(part) for part in parts)
        assert 0 <= offset <= end <= self.region_bytes, f"[{offset}, {end}) is outside a region of {self.region_bytes} bytes"
        self._file(place, writing=True).write(offset, parts)

    def sync(self, place: int) -> None:
        self._file(place).sync()

    def read_into(self, place: int, offset: int, out: memoryview) -> None:
        if not 0 <= offset <= offset + len(out) <= self.region_bytes:
            raise TierFailure(FailureReason.SHORT_READ, f"[{offset}, {offset + len(out)}) is outside a region of {self.region_bytes} bytes")
        self._file(place).read_into(offset, out)

    def close(self) -> None:
        with self._files_lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
        os.close(self._lock_fd)

    def _file(self, number: int, *, writing: bool = False) -> DirectFile:
        assert 0 <= number < self.count, f"region {number} of {self.count}"
        with self._files_lock:
            file = self._files.get(number)
            if file is None:
                path = self.folder / f"region-{number:06d}"
                if not writing and not path.exists():
                    raise TierFailure(FailureReason.IO_ERROR, f"{path} is gone")
                file = self._files[number] = DirectFile(path)
            if writing and number not in self._preallocated:
                self._preallocate(number, file)
            return file

    def _preallocate(self, number: int, file: DirectFile) -> None:
        try:
            file.preallocate(self.region_bytes)
        except TierFailure:
            # Whatever part of it the full medium gave goes back to it, and the next write tries again.
            file.close()
            del self._files[number]
            file.path.unlink(missing_ok=True)
            raise
        self._preallocated.add(number)

    def _region_files(self) -> list[tuple[int, Path]]:
        return [(int(match[1]), path) for path in self.folder.iterdir() if (match := _REGION_FILE.fullmatch(path.name))]

    def _check_shape(self, *, discard: bool) -> None:
        """What another format put there would be read as garbage: refused, or emptied, before anything is read."""
        path = self.folder / _SHAPE_FILE
        shape = f"larder ssd folder, format {FORMAT_VERSION}, region_bytes {self.region_bytes}\n"
        try:
            found: str | None = path.read_text()
        except FileNotFoundError:
            found = None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if found == shape:
            return
        if found is not None:
            if not discard:
                raise ConfigError(
                    f"{self.folder} is a {found.strip()!r}, this node wants {shape.strip()!r}; "
                    "set region_bytes so, or take another ssd_path, or give up what is there with ssd_discard_other_formats=true"
                )
            logger.warning("%s is a %r: everything in it is discarded, as configured", self.folder, found.strip())
            for _, region in self._region_files():
                region.unlink()
        new = path.with_suffix(".new")
        try:
            new.write_text(shape)
            new.replace(path)
        except OSError as error:
            raise ConfigError(f"ssd_path {self.folder} cannot be used: {error.strerror}") from error

    def _drop_surplus_files(self) -> None:
        for number, path in self._region_files():
            if number >= self.count:
                logger.warning("%s is beyond ssd_capacity now: removed", path)
                path.unlink()


def _lock(folder: Path) -> int:
    """The kernel gives the lock back when the process ends, however it ends."""
    fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"ssd_path {folder} is in use by another store node; give each node a folder of its own") from None
    return fd


def _check_capacity(folder: Path, capacity: Bytes) -> None:
    medium = os.statvfs(folder)
    size = medium.f_blocks * medium.f_frsize
    if capacity > size:
        raise ConfigError(
            f"ssd_capacity is {capacity} bytes ({capacity / GIB:.2f} GiB); the medium of {folder} has {size} bytes ({size / GIB:.2f} GiB)"
        )
