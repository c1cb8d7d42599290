"""Coverage-guided fuzzing of the decoder; not part of the tests. `pip install atheris`, then from the root of the project

    python tests/kvstore/codec/fuzz_decoder.py -max_total_time=600 [folder of inputs to keep]

An input is a payload whose checksum is set right first, so that what is behind it is reached. Whatever it says, the decoder refuses it
(CorruptPayload, UnsupportedFormat) with the target untouched, or decodes it; anything else is a crash.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

from kvstore.codec import fp8, klt_rotation  # noqa: F401  with their kernels, which numba must compile from plain code

with atheris.instrument_imports(include=["kvstore.codec.block_format", "kvstore.codec.block_codec", "kvstore.codec.klt"]):
    from kvstore.codec import block_codec, block_format, klt  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))

import test_fuzz
import xxhash

from kvstore.codec.checksum import CHECKSUM_BYTES
from kvstore.errors import CorruptPayload, UnsupportedFormat

DECODER = test_fuzz.CODECS[block_format.Rung.RAW]


def one(data: bytes) -> None:
    payload = bytearray(data)
    if len(payload) >= block_format.HEADER_BYTES:
        end = int.from_bytes(payload[6:8], "little")
        if CHECKSUM_BYTES <= end <= len(payload):
            digest = xxhash.xxh3_64(payload[: end - CHECKSUM_BYTES] + payload[end:]).intdigest()
            payload[end - CHECKSUM_BYTES : end] = digest.to_bytes(CHECKSUM_BYTES, "little")
    out = np.full((1, 2, 1, 16, 16), test_fuzz.UNTOUCHED, np.uint16)
    try:
        DECODER.decode_into(payload, out)
    except (CorruptPayload, UnsupportedFormat):
        assert (out == test_fuzz.UNTOUCHED).all()


def main() -> None:
    with tempfile.TemporaryDirectory() as seeds:
        for index, (payload, _) in enumerate(test_fuzz.SAMPLES):
            (Path(seeds) / str(index)).write_bytes(payload)
        atheris.Setup([*sys.argv, seeds], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
