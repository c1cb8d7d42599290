from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung
from kvstore.codec.klt_fit import Moments, fit_bases
from kvstore.codec.klt_tables import KltTables, load_tables, save_tables
from kvstore.codec.reference import narrow
from kvstore.core.layout import KvDtype, Layout

MODEL = bytes(range(32))

MakeCodec = Callable[..., BlockCodec]
MakeBlock = Callable[..., np.ndarray]
MakeTables = Callable[..., KltTables]


@pytest.fixture(scope="session")
def make_tables(tmp_path_factory: pytest.TempPathFactory) -> MakeTables:
    """Tables fitted to KV in which neighbouring channels and layers go together; through a file, so that they have a digest."""
    made: dict[tuple[Layout, bytes, int], KltTables] = {}

    def make(layout: Layout, *, model_digest: bytes = MODEL, group_layers: int = 2) -> KltTables:
        key = (layout, model_digest, group_layers)
        if key not in made:
            rng = np.random.default_rng(layout.layers * 1000 + layout.head_dim)
            moments = Moments(
                layers=layout.layers,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                group_layers=group_layers,
                inverse_frequencies=1000.0 ** (-np.arange(layout.head_dim // 2) / (layout.head_dim // 2)),
            )
            shape = (layout.layers, 2, layout.kv_heads, 512, layout.head_dim)
            common = rng.normal(0, 1, (1, 2, 1, 512, layout.head_dim))
            moments.add((common + rng.normal(0, 1, shape)).cumsum(-1).astype(np.float32) / 8, start_position=0)
            planes = layout.layers * layout.kv_heads
            root = rng.normal(0, 0.2, (planes, layout.head_dim, layout.head_dim))
            tables = fit_bases(
                moments,
                key_metric=np.exp(rng.normal(0, 1, planes * layout.head_dim)),
                value_metric=np.eye(layout.head_dim) + root @ root.transpose(0, 2, 1),
                base_step=0.05,
                keep_above=0.0,
                model_digest=model_digest,
            )
            path = tmp_path_factory.mktemp("tables") / "tables.klt"
            save_tables(tables, path)
            made[key] = load_tables(path)
        return made[key]

    return make


@pytest.fixture(scope="session")
def make_codec(make_tables: MakeTables) -> MakeCodec:
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
        step: int = 4,
    ) -> BlockCodec:
        layout = Layout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=tokens)
        tables = make_tables(layout, model_digest=model_digest) if rung is Rung.KLT else None
        return BlockCodec(layout, model_digest=model_digest, rung=rung, entropy=entropy, calibration=tables, step=step)

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
