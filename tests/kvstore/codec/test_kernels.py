from __future__ import annotations

import fcntl
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba.core import caching

from kvstore.codec import BlockCodec, Rung, compilation, kernels, machine_code, warm_up
from kvstore.codec.block_format import BITS, plane_bytes, read_header
from kvstore.codec.reference import canonical, measured_error, narrow, pack_plane, sections, unpack_plane
from kvstore.core.layout import KvDtype, Layout


def odd_block(rng: np.random.Generator, layout: Layout, *, magnitude: float) -> np.ndarray:
    """Ordinary numbers, and in places zeros, tiny and equal ones, extremes of the range, and ties of the rounding."""
    shape = (layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
    x = (rng.normal(0, 1, shape) * magnitude * rng.choice([0.01, 1, 1], shape)).astype(np.float32)
    x[rng.random(shape) < 0.1] = 0.0
    x[rng.random(shape) < 0.05] = -0.0
    x[..., : shape[3] // 2, 0] = np.float32(magnitude)
    x[:, :, :, -1, :] = np.rint(x[:, :, :, -1, :] / magnitude * 8) * np.float32(magnitude / 16)
    return narrow(np.clip(x, -16384, 16384), layout.dtype)


@settings(max_examples=120)
@given(
    rung=st.sampled_from([Rung.INT8, Rung.INT6, Rung.INT5, Rung.INT4]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    tokens=st.sampled_from([1, 2, 4, 5, 7, 16, 32, 64, 65, 130]),
    head_dim=st.sampled_from([1, 2, 3, 8, 63, 64, 65, 80, 129]),
    first=st.booleans(),
    group=st.sampled_from([64, 8, 24]),
    exact_tokens=st.sampled_from([4, 0, 1, 7]),
    finer=st.booleans(),
    magnitude=st.sampled_from([1e-30, 1e-6, 1e-3, 1.0, 100.0, 5000.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    rung=Rung.INT4,
    dtype="float16",
    layers=1,
    kv_heads=1,
    tokens=32,
    head_dim=64,
    first=False,
    group=64,
    exact_tokens=4,
    finer=False,
    magnitude=3e-5,
    seed=1,
)
def test_kernels_equal_the_numpy_reference_bit_for_bit(
    rung: Rung,
    dtype: KvDtype,
    layers: int,
    kv_heads: int,
    tokens: int,
    head_dim: int,
    first: bool,
    group: int,
    exact_tokens: int,
    finer: bool,
    magnitude: float,
    seed: int,
) -> None:
    layout = Layout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=tokens)
    codec = BlockCodec(
        layout,
        model_digest=bytes(32),
        rung=rung,
        entropy=False,
        group=group,
        exact_tokens=exact_tokens,
        layer_rungs={layers - 1: Rung.INT8} if finer else {},
    )
    block = odd_block(np.random.default_rng(seed), layout, magnitude=magnitude)
    exact = min(exact_tokens, tokens) if first else 0
    payload = codec.encode(block, start_position=0 if first else tokens)

    raw = block[..., :exact, :].tobytes()
    stored = read_header(payload)
    body = payload[stored.header_bytes :]
    assert (stored.group, stored.exact_tokens) == (group, exact)
    assert stored.widths[-1] == ((8, 7) if finer else BITS[rung])
    if exact < tokens:
        side, keys, values = sections(block, dtype=dtype, exact=exact, group=group, widths=stored.widths)
        assert body == raw + keys + values + side
        wanted = canonical(block, dtype=dtype, exact=exact, group=group, widths=stored.widths)
    else:
        assert body == raw
        wanted = block

    decoded = np.empty_like(block)
    header = codec.decode_into(payload, decoded)
    assert decoded.tobytes() == wanted.tobytes()
    if exact < tokens:
        largest, rms = measured_error(block, wanted, dtype=dtype, exact=exact)
        assert (header.max_abs_error, header.rms_error) == (np.float32(largest), np.float32(rms))

    in_place = block.copy()
    assert codec.encode_canonical(in_place, start_position=0 if first else tokens) == payload
    assert in_place.tobytes() == wanted.tobytes()


def test_every_float16_is_widened_and_narrowed_as_numpy_does() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    block = np.zeros((1, 2, 1, 1024, 64), np.float16)
    block.reshape(-1)[: 1 << 16] = np.where(np.isfinite(codes) & (np.abs(codes) <= 16384), codes, 0)
    layout = Layout(layers=1, kv_heads=1, head_dim=64, dtype="float16", block_tokens=1024)
    codec = BlockCodec(layout, model_digest=bytes(32), rung=Rung.INT8)
    decoded = np.empty_like(block)
    codec.decode_into(codec.encode(block, start_position=1024), decoded)
    assert decoded.tobytes() == canonical(block, dtype="float16", exact=0, group=64, widths=[(8, 7)]).tobytes()


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_a_packed_plane_gives_its_codes_back_and_takes_their_bits(bits: int, count: int) -> None:
    codes = np.random.default_rng(count).integers(0, 1 << bits, count, dtype=np.uint8)
    packed = pack_plane(codes, bits)
    assert packed.size == plane_bytes(count, bits) <= -(-count // 8) * bits
    assert (unpack_plane(packed, bits, count=count) == codes).all()


def test_without_a_place_for_the_cache_a_kernel_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def double(x):  # type: ignore[no-untyped-def]
        return x * 2

    assert machine_code.compiled(double)(21) == 42


def test_a_full_disk_does_not_stop_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []

    def fails_once(kernel: kernels.Kernel) -> kernels.Kernel:
        """As numba does: the first call compiles, raises because the cache file cannot be written, and the next one works."""
        seen = set()

        def call(*arguments: object) -> object:
            key = arguments[0].dtype  # type: ignore[attr-defined]
            if key not in seen:
                seen.add(key)
                failures.append(kernel)
                raise OSError(28, "No space left on device")
            return kernel(*arguments)

        return call

    for name in ("largest_bits_of_half", "largest_bits_of_single", "quantize", "dequantize"):
        monkeypatch.setattr(kernels, name, fails_once(getattr(kernels, name)))
    warm_up()
    assert len(failures) == 4


def test_warming_up_twice_costs_nothing_the_second_time() -> None:
    warm_up()
    for kernel in (kernels.quantize, kernels.dequantize, kernels.largest_bits_of_half, kernels.largest_bits_of_single):
        assert len(kernel.signatures) == 1
    warm_up()
    for kernel in (kernels.quantize, kernels.dequantize, kernels.largest_bits_of_half, kernels.largest_bits_of_single):
        assert len(kernel.signatures) == 1


def test_a_process_that_warms_up_waits_for_another_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(kernels.__file__, "rb") as source:
        fcntl.flock(source, fcntl.LOCK_EX)
        waiter = threading.Thread(target=warm_up)
        waiter.start()
        waiter.join(timeout=0.2)
        assert waiter.is_alive()
        fcntl.flock(source, fcntl.LOCK_UN)
        waiter.join(timeout=60)
        assert not waiter.is_alive()

        fcntl.flock(source, fcntl.LOCK_EX)
        monkeypatch.setattr(compilation, "_MAX_WAIT_SECONDS", 0.1)
        warm_up()  # the other one is stuck: go on without it
