"""The entropy stage: zstandard, level 1, on the sections of a payload where it pays, and on no others.

It pays when it takes at least MIN_GAIN (9 %) off a section and the section is at least MIN_SHARE (5 %) of the body. The 8 KiB
in the middle of a section stand for it: where they do not reach the gain, the rest is not tried. Numbers for 32-token blocks of
SmolLM2-135M (LOG.md): zstandard unpacks codes at 0.8 GB/s, which is 210 us for the values of an int8 block that the kernels
decode in 200 us; so packing the codes would double the price of a hit for 4 % of the bytes.

    codes  keys 0 to 3 %, values 7 to 9 %: rungs int8 to int4 leave them plain without a try
    side   34 to 41 %, of 4 % of the body at int8, which stays plain, and of 8.6 % at int4: 2.9 % off the payload for 30 us
    exact  30 % off bfloat16 in byte planes, for 430 us: the rung `lossless`, and the first tokens of a sequence

Packed bytes depend on the version of libzstd; what they unpack to does not.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from kvstore.errors import CorruptPayload

LEVEL = 1
MIN_GAIN = 0.09
MIN_SHARE = 0.05
_SAMPLE_BYTES = 1 << 13


class _Contexts(threading.local):
    """zstandard's working memory, one set a thread: it is not safe to share and costs 10 us to make."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(section: np.ndarray, *, body_bytes: int) -> bytes | None:
    """One zstandard frame of a section (uint8, 1-D, C-contiguous), or None where that does not pay. Deterministic."""
    size = section.nbytes
    if size < MIN_SHARE * body_bytes or not size:
        return None
    compressor = _contexts.compressor
    if size > 2 * _SAMPLE_BYTES:
        start = (size - _SAMPLE_BYTES) // 2
        sample = compressor.compress(section[start : start + _SAMPLE_BYTES].data)
        if len(sample) > (1 - MIN_GAIN) * _SAMPLE_BYTES:
            return None
    packed = compressor.compress(section.data)
    return packed if len(packed) <= (1 - MIN_GAIN) * size else None


def unpack(packed: memoryview, *, size: int) -> bytes:
    """The `size` bytes of a frame. Raises CorruptPayload unless it is one whole frame of exactly that size; never allocates more."""
    try:
        announced = zstandard.frame_content_size(packed)
        if announced != size:
            raise CorruptPayload(f"a packed section announces {announced} bytes, the header {size}")
        return _contexts.decompressor.decompress(packed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPayload(f"a packed section does not unpack: {error}") from error


def to_planes(elements: np.ndarray) -> np.ndarray:
    """uint8, 1-D: byte k of every element, for k from the most significant down. Sign and exponent compress, mantissa does not."""
    width = elements.dtype.itemsize
    return np.ascontiguousarray(elements.reshape(-1).view(np.uint8).reshape(-1, width).T[::-1]).reshape(-1)


def from_planes(planes: np.ndarray, *, width: int) -> np.ndarray:
    """Inverse of `to_planes`: the elements' bytes, uint8, 1-D."""
    return np.ascontiguousarray(planes.reshape(width, -1)[::-1].T).reshape(-1)
