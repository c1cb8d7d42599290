"""Triton's kernels, in its interpreter, give the bytes of the machine code. Skipped where Triton is not installed (the extra `cuda`)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are defined
pytest.importorskip("triton")

from kvstore.codec import BlockCodec, Rung
from kvstore.codec.reference import narrow
from kvstore.codec.torch_codec import TorchCodec
from kvstore.core.layout import KvDtype, Layout

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

CASES: list[tuple[Rung, KvDtype, int, int, int, int]] = [
    (Rung.INT8, "bfloat16", 32, 64, 64, 32),
    (Rung.INT4, "bfloat16", 32, 64, 64, 0),
    (Rung.INT4, "float16", 9, 7, 8, 9),
    (Rung.INT6, "float32", 5, 80, 24, 5),
    (Rung.INT5, "bfloat16", 65, 16, 24, 65),
    (Rung.INT8, "float32", 1, 1, 8, 1),
]


@pytest.mark.parametrize(("rung", "dtype", "tokens", "head_dim", "group", "position"), CASES)
def test_a_strided_pool_block_is_encoded_and_decoded_as_the_machine_code_does(
    rung: Rung, dtype: KvDtype, tokens: int, head_dim: int, group: int, position: int
) -> None:
    layout = Layout(layers=2, kv_heads=2, head_dim=head_dim, dtype=dtype, block_tokens=tokens)
    codec = BlockCodec(layout, model_digest=bytes(32), rung=rung, group=group, layer_rungs={1: Rung.INT8})
    rng = np.random.default_rng(tokens)
    x = rng.normal(0, 1, (2, 2, 2, tokens, head_dim)) + rng.normal(0, 3, (2, 2, 2, 1, head_dim))
    block = narrow(x.astype(np.float32), dtype)
    pool = torch.zeros(2, 2, 4, 2, tokens, head_dim, dtype=TORCH[dtype])  # the third dimension: blocks
    own, other = pool[:, :, 1], pool[:, :, 3]
    own.copy_(torch.from_numpy(block.view(np.int16) if dtype == "bfloat16" else block.copy()).view(TORCH[dtype]))
    device = TorchCodec(codec, triton=True)
    payload = codec.encode_canonical(block, start_position=position)
    assert device.encode(own, start_position=position, canonical=True) == payload
    device.decode_into(payload, other, start_position=position)
    wanted = torch.from_numpy(block.view(np.int16) if dtype == "bfloat16" else block).view(TORCH[dtype])
    for got in (own, other):
        assert torch.equal(got.contiguous().view(torch.uint8), wanted.view(torch.uint8))
    assert not pool[:, :, [0, 2]].any()
