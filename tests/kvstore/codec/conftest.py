from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung
from kvstore.codec.reference import narrow
from kvstore.core.layout import KvDtype, Layout

MODEL = bytes(range(32))

MakeCodec = Callable[..., BlockCodec]
MakeBlock = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def make_codec() -> MakeCodec:
    def make(
        rung: Rung = Rung.INT8,
        *,
        dtype: KvDtype = "bfloat16",
        layers: int = 3,
        kv_heads: int = 2,
        tokens: int = 32,
        head_dim: int = 64,
        entropy: bool = True,
        model_digest: bytes = MODEL,
    ) -> BlockCodec:
        layout = Layout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=tokens)
        return BlockCodec(layout, model_digest=model_digest, rung=rung, entropy=entropy)

    return make


@pytest.fixture(scope="session")
def make_block() -> MakeBlock:
    """A block that looks like KV: keys with a mean and a spread of their own in each channel, values about zero."""

    def make(codec: BlockCodec, *, seed: int = 0) -> np.ndarray:
        layout = codec.layout
        rng = np.random.default_rng(seed)
        shape = (layout.layers, layout.kv_heads, layout.block_tokens, layout.head_dim)
        channel = (layout.layers, layout.kv_heads, 1, layout.head_dim)
        keys = rng.normal(0, 3, channel) + rng.normal(0, 1, shape) * rng.lognormal(0, 0.7, channel)
        values = rng.normal(0, 1, shape) * rng.lognormal(-1, 0.5, (layout.layers, layout.kv_heads, layout.block_tokens, 1))
        return narrow(np.stack([keys, values], axis=1).astype(np.float32), layout.dtype)

    return make
