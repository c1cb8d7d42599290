"""The one checksum of payloads: XXH3-64. Imports neither numpy nor numba, so that a store node starts without them.

It finds torn writes, bit rot and swapped buffers; it is no defence against someone who writes payloads on purpose.
"""

from __future__ import annotations

import xxhash

CHECKSUM_BYTES = 8


def payload_checksum(payload: bytes | bytearray | memoryview) -> int:
    """XXH3-64 (seed 0) of the whole payload, in [0, 2**64): what reserve, commit and acquire carry.

    `payload` must be C-contiguous. The same bytes give the same number in every process and on every machine.

    Cost: 4 to 10 GB/s on one core; the GIL is released.
    """
    return int(xxhash.xxh3_64_intdigest(payload))
