"""The device path gives the bytes, and the bits, of the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.codec import BlockCodec, Rung
from kvstore.codec.reference import narrow
from kvstore.codec.torch_codec import TorchCodec
from kvstore.core.layout import KvDtype, Layout
from kvstore.errors import CodecFailure, ConfigError, CorruptPayload, UnsupportedFormat

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def tensor_of(block: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(block.view(np.int16) if dtype == "bfloat16" else block).view(TORCH[dtype]).clone()


@settings(max_examples=60)
@given(
    rung=st.sampled_from([Rung.INT8, Rung.INT6, Rung.INT5, Rung.INT4]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    tokens=st.sampled_from([1, 4, 5, 32, 65]),
    head_dim=st.sampled_from([1, 7, 64, 80]),
    group=st.sampled_from([64, 24]),
    finer=st.booleans(),
    first=st.booleans(),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 5000.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_payloads_and_decoded_blocks_are_those_of_the_kernels(
    rung: Rung, dtype: KvDtype, tokens: int, head_dim: int, group: int, finer: bool, first: bool, magnitude: float, seed: int
) -> None:
    layout = Layout(layers=3, kv_heads=2, head_dim=head_dim, dtype=dtype, block_tokens=tokens)
    codec = BlockCodec(layout, model_digest=bytes(32), rung=rung, group=group, layer_rungs={1: Rung.INT8} if finer else {})
    rng = np.random.default_rng(seed)
    shape = (3, 2, 2, tokens, head_dim)
    x = rng.normal(0, 1, shape) * magnitude + rng.normal(0, 3, (*shape[:3], 1, head_dim)) * magnitude
    block = narrow(np.clip(x, -16384, 16384).astype(np.float32), dtype)
    position = 0 if first else tokens
    on_device = tensor_of(block, dtype)
    payload = codec.encode_canonical(block, start_position=position)
    assert TorchCodec(codec).encode(on_device, start_position=position, canonical=True) == payload
    assert torch.equal(on_device.view(torch.uint8), tensor_of(block, dtype).view(torch.uint8))
    out = torch.empty_like(on_device)
    TorchCodec(codec).decode_into(payload, out, start_position=position)
    assert torch.equal(out.view(torch.uint8), on_device.view(torch.uint8))


def test_what_the_device_path_does_not_take_is_refused_by_reason() -> None:
    layout = Layout(layers=2, kv_heads=1, head_dim=16, dtype="float32")
    codec = BlockCodec(layout, model_digest=bytes(32), rung=Rung.INT8)
    device = TorchCodec(codec)
    block = torch.zeros(2, 2, 1, 32, 16)
    for change, reason in ((float("nan"), "not_finite"), (float("inf"), "not_finite"), (2e4, "out_of_range")):
        block[1, 1, 0, 9, 3] = change
        with pytest.raises(CodecFailure) as failure:
            device.encode(block, start_position=0)
        assert failure.value.reason == reason
    for wrong in (block[:1], block.half()):
        with pytest.raises(CodecFailure):
            device.encode(wrong, start_position=0)
    with pytest.raises(ConfigError):
        TorchCodec(BlockCodec(layout, model_digest=bytes(32), rung=Rung.RAW))
    raw = BlockCodec(layout, model_digest=bytes(32), rung=Rung.RAW).encode(np.zeros((2, 2, 1, 32, 16), np.float32), start_position=0)
    with pytest.raises(UnsupportedFormat):
        device.decode_into(raw, block)
    with pytest.raises(CorruptPayload):
        device.decode_into(raw[:-1], block)
