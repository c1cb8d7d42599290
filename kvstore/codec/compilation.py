"""Compiling the kernels before the first block needs them."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.codec import kernels
from kvstore.codec.block_codec import BlockCodec
from kvstore.codec.block_format import DIGEST_BYTES, Rung
from kvstore.core.layout import Layout

_COMPILED_FORMS = 14
"""Of kernels.py four, of rung klt six, of fp8 two, of step_kernels.py two."""

_MAX_WAIT_SECONDS = 60.0


def warm_up(*codecs: BlockCodec, step_down: bool = False) -> None:
    """Compiles the kernels, and what `codecs` use besides, or loads them from numba's cache: before the first block must be fast. With
    `step_down` also those of a step down from one of the rungs of BITS.

    Cost: about 10 s of one core the first time on a machine (15 s more for rung klt), 0.3 s later on; nothing when it ran before in
    this process. When several processes start at once, one compiles and the others wait for it, 60 s at most, instead of
    compiling the same beside it.
    """
    with compiling_alone(kernels.__file__):
        for left in reversed(range(_COMPILED_FORMS + 1)):
            try:
                _run_every_kernel(codecs, step_down=step_down)
                return
            except OSError:  # a full disk: the kernel is compiled by then, only its copy in the cache is missing
                if not left:
                    raise


def _run_every_kernel(codecs: Sequence[BlockCodec], *, step_down: bool) -> None:
    for layout, block in (
        (Layout(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=8), np.zeros((1, 2, 1, 8, 8), np.uint16)),
        (Layout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=8), np.zeros((1, 2, 1, 8, 8), np.float32)),
    ):
        codec = BlockCodec(layout, model_digest=bytes(DIGEST_BYTES), rung=Rung.INT8)
        payload = codec.encode(block, start_position=0)
        codec.decode_into(payload, block)
        if step_down:
            BlockCodec(layout, model_digest=bytes(DIGEST_BYTES), rung=Rung.INT4).step_down(payload)
    for codec in codecs:
        block = codec.empty_block()
        codec.decode_into(codec.encode(block, start_position=0), block)


@contextmanager
def compiling_alone(source_file: str) -> Iterator[None]:
    """Of the processes that come here with the same kernels, one goes on and fills numba's cache; the others wait for it, 60 s at most.

    A lock on the kernels' source, which needs no right to write and leaves no file; where there is none, as if it were held.
    """
    with open(source_file, "rb") as source:
        give_up = time.monotonic() + _MAX_WAIT_SECONDS
        while time.monotonic() < give_up:
            try:
                fcntl.flock(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
