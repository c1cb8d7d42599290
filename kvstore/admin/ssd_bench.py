"""How much of the disk the SSD tier reaches: its own writes and reads beside dd with direct I/O, on the same file system, in turns."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.tiers.ssd import SsdRegions
from kvstore.units import MIB, Bytes

_REGION_BYTES = 64 * MIB
_SPAN_BYTES = 4 * MIB
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdSpeed:
    """GB/s, each the best of three."""

    write: float
    read: float
    dd_write: float
    dd_read: float

    @property
    def write_share(self) -> float:
        return self.write / self.dd_write

    @property
    def read_share(self) -> float:
        return self.read / self.dd_read


def ssd_speed(folder: Path, *, size: int, on_progress: Callable[[int], None] = lambda done: None) -> SsdSpeed:
    """`size` bytes (a multiple of 64 MiB) written in spans of 4 MiB with a sync per region, and read back; dd with blocks of 4 MiB. Leaves
    nothing behind."""
    regions = size // _REGION_BYTES
    payload = [memoryview(bytes([number]) * MIB) for number in range(_SPAN_BYTES // MIB)]
    out = memoryview(bytearray(_SPAN_BYTES))
    spans = [(place, offset) for place in range(regions) for offset in range(0, _REGION_BYTES, _SPAN_BYTES)]
    with tempfile.TemporaryDirectory(dir=folder, prefix="larder-bench-") as name:
        tier = SsdRegions(Path(name) / "tier", capacity=Bytes(size), region_bytes=Bytes(_REGION_BYTES))
        plain = Path(name) / "dd"

        def write() -> None:
            for place, offset in spans:
                tier.write(place, offset, payload)
                if offset + _SPAN_BYTES == _REGION_BYTES:
                    tier.sync(place)

        def read() -> None:
            for place, offset in spans:
                tier.read_into(place, offset, out)

        count = f"count={size // _SPAN_BYTES}"
        common = ["dd", f"bs={_SPAN_BYTES}", count]
        jobs: dict[str, Callable[[], None]] = {
            "dd_write": lambda: _dd([*common, "if=/dev/zero", f"of={plain}", "oflag=direct", "conv=fdatasync,notrunc"]),
            "write": write,
            "dd_read": lambda: _dd([*common, f"if={plain}", "of=/dev/null", "iflag=direct"]),
            "read": read,
        }
        best = dict.fromkeys(jobs, 0.0)
        try:
            # The first round makes the files: the tier takes its space at once, dd as it goes.
            for round_number in range(_ROUNDS + 1):
                for what, job in jobs.items():
                    started = time.perf_counter()
                    job()
                    if round_number:
                        best[what] = max(best[what], size / (time.perf_counter() - started) / 1e9)
                    on_progress(1)
        finally:
            tier.close()
    return SsdSpeed(**best)


STEPS = 4 * (_ROUNDS + 1)
"""How often `on_progress` is called."""


def _dd(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ConfigError(f"dd failed, so there is nothing to compare with: {done.stderr.strip().splitlines()[-1]}")
