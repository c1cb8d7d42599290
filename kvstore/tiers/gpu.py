"""The GPU tier: one arena of bytes on a torch device. Imported by a node that is configured with one, and by nobody else."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvstore.errors import ConfigError
from kvstore.tiers.host import memory_of_this_machine
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.units import GIB, MIB, Bytes

STAGING_BYTES = 4 * MIB
"""Of host memory a thread copies through at a time: enough that the start of a copy costs little beside its bytes."""


class GpuArena:
    """`capacity` bytes on any torch device, taken from it whole at the start.

    Bytes go through host memory of the calling thread, which is pinned, and over a stream of that thread, where the device is CUDA: so
    that a copy neither waits for kernels of other streams nor is staged a second time by the driver.
    """

    def __init__(self, device: str, capacity: Bytes) -> None:
        """Raises ConfigError: no such device, or less memory on it than asked for."""
        try:
            self.device = torch.device(device)
            self._is_cuda = self.device.type == "cuda"
            limit = torch.cuda.mem_get_info(self.device)[1] if self._is_cuda else memory_of_this_machine()
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            raise ConfigError(f"gpu_device {device!r} cannot be used: {_first_line(error)}") from error
        if not 0 < capacity <= limit:
            raise ConfigError(
                f"gpu_capacity is {capacity} bytes ({capacity / GIB:.1f} GiB); {device} has {limit} bytes ({limit / GIB:.1f} GiB) of memory"
            )
        try:
            self._bytes = torch.empty(capacity, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise ConfigError(f"gpu_capacity: {capacity} bytes are not to be had on {device}: {_first_line(error)}") from error
        self.capacity = capacity
        self._of_thread = threading.local()
        try:
            self.read_into(0, 0, memoryview(bytearray(1)))  # some devices of torch ("meta") have no bytes to give back
        except (RuntimeError, TierFailure) as error:
            raise ConfigError(f"gpu_device {device!r} cannot be used: {_first_line(error)}") from error

    def write(self, place: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            with memoryview(part) as view:
                self._check(place, offset, len(view))
                for start in range(0, len(view), STAGING_BYTES):
                    piece = view[start : start + STAGING_BYTES]
                    self._copy_in(offset + start, piece)
                offset += len(view)

    def sync(self, place: int) -> None:
        """Memory promises nothing over a crash."""

    def read_into(self, place: int, offset: int, out: memoryview) -> None:
        self._check(place, offset, len(out))
        for start in range(0, len(out), STAGING_BYTES):
            self._copy_out(offset + start, out[start : start + STAGING_BYTES])

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _copy_in(self, offset: int, piece: memoryview) -> None:
        staging = self._staging()
        staging.view[: len(piece)] = piece
        staging.copy(source=staging.tensor[: len(piece)], target=self._bytes[offset : offset + len(piece)])

    def _copy_out(self, offset: int, piece: memoryview) -> None:
        staging = self._staging()
        staging.copy(source=self._bytes[offset : offset + len(piece)], target=staging.tensor[: len(piece)])
        piece[:] = staging.view[: len(piece)]

    def _staging(self) -> _Staging:
        staging: _Staging | None = getattr(self._of_thread, "staging", None)
        if staging is None:
            staging = self._of_thread.staging = _Staging(self.device if self._is_cuda else None)
        return staging

    def _check(self, place: int, offset: int, size: int) -> None:
        assert place == 0
        if not 0 <= offset <= offset + size <= self.capacity:
            raise TierFailure(FailureReason.IO_ERROR, f"[{offset}, {offset + size}) is outside the arena of {self.capacity} bytes")


class _Staging:
    """Host memory and, on CUDA, a stream of one thread."""

    def __init__(self, cuda: torch.device | None) -> None:
        self.tensor = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=cuda is not None)
        self.view = memoryview(self.tensor.numpy().data)
        self._stream = None if cuda is None else torch.cuda.Stream(device=cuda)  # type: ignore[no-untyped-call]

    def copy(self, *, source: torch.Tensor, target: torch.Tensor) -> None:
        """Returns when the bytes are there. Raises TierFailure."""
        try:
            if self._stream is None:
                target.copy_(source)
            else:
                with torch.cuda.stream(self._stream):
                    target.copy_(source, non_blocking=True)
                self._stream.synchronize()
        except RuntimeError as error:
            raise TierFailure(FailureReason.IO_ERROR, f"copy from or to the device: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
