from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.codec import BlockCodec, Rung, payload_checksum, read_header
from kvstore.codec.reference import widen
from kvstore.core.layout import KvDtype, Layout
from kvstore.errors import CodecFailure, ConfigError, CorruptPayload, UnsupportedFormat

Make = Callable[..., BlockCodec]
Block = Callable[..., np.ndarray]

RUNGS = list(Rung)
LOSSY = [Rung.INT8, Rung.FP8, Rung.INT6, Rung.INT5, Rung.INT4]
DTYPES: list[KvDtype] = ["bfloat16", "float16", "float32"]


def decoded(codec: BlockCodec, payload: bytes) -> np.ndarray:
    layout = codec.layout
    dtype = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}[layout.dtype]
    out = np.empty((layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim), dtype)
    codec.decode_into(payload, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", [Rung.RAW, Rung.LOSSLESS])
def test_exact_rungs_give_every_bit_back_even_nan_and_infinity(make_codec: Make, make_block: Block, rung: Rung, dtype: KvDtype) -> None:
    codec = make_codec(rung, dtype=dtype)
    block = make_block(codec)
    block.reshape(-1)[:3] = np.array([np.nan, np.inf, -np.inf]) if dtype != "bfloat16" else [0x7FC1, 0x7F80, 0xFF80]
    payload = codec.encode(block, start_position=64)
    assert decoded(codec, payload).tobytes() == block.tobytes()
    assert read_header(payload).max_abs_error == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rung", "relative"), [(Rung.INT8, 0.01), (Rung.FP8, 0.04), (Rung.INT6, 0.03), (Rung.INT5, 0.06), (Rung.INT4, 0.12)]
)
def test_lossy_rungs_stay_within_the_error_that_the_payload_states(
    make_codec: Make, make_block: Block, rung: Rung, relative: float, dtype: KvDtype
) -> None:
    codec = make_codec(rung, dtype=dtype)
    block = make_block(codec)
    payload = codec.encode(block, start_position=32)
    header = read_header(payload)
    original = widen(block, dtype)
    error = widen(decoded(codec, payload), dtype) - original
    assert np.abs(error).max() == np.float32(header.max_abs_error)
    assert np.sqrt(np.mean(np.square(error, dtype=np.float64))) == pytest.approx(header.rms_error, rel=1e-5)
    assert header.rms_error < relative * original.std()


@pytest.mark.parametrize("rung", RUNGS)
def test_the_header_says_what_was_encoded(make_codec: Make, make_block: Block, rung: Rung) -> None:
    codec = make_codec(rung)
    payload = codec.encode(make_block(codec), start_position=96)
    header = read_header(payload)
    assert (header.rung, header.dtype, header.shape, header.start_position) == (rung, "bfloat16", (3, 2, 2, 32, 64), 96)
    assert (header.model_digest, header.layout_fingerprint) == (bytes(range(32)), codec.layout.fingerprint)
    assert header.payload_bytes == len(payload) <= codec.max_payload_bytes


@pytest.mark.parametrize("rung", LOSSY)
def test_the_first_four_tokens_of_a_sequence_stay_exact_and_no_others(make_codec: Make, make_block: Block, rung: Rung) -> None:
    codec = make_codec(rung)
    block = make_block(codec)
    first = decoded(codec, codec.encode(block, start_position=0))
    assert (first[..., :4, :] == block[..., :4, :]).all()
    assert (first[..., 4:, :] != block[..., 4:, :]).any()
    later = decoded(codec, codec.encode(block, start_position=32))
    assert (later[..., :4, :] != block[..., :4, :]).any()


@pytest.mark.parametrize("start_position", [0, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rung", RUNGS)
def test_a_canonical_block_is_what_its_payload_decodes_to(
    make_codec: Make, make_block: Block, rung: Rung, dtype: KvDtype, start_position: int
) -> None:
    codec = make_codec(rung, dtype=dtype)
    for seed in range(3):
        block = make_block(codec, seed=seed)
        plain = codec.encode(block, start_position=start_position)
        payload = codec.encode_canonical(block, start_position=start_position)
        assert payload == plain
        assert decoded(codec, payload).tobytes() == block.tobytes()
        again = codec.encode_canonical(block, start_position=start_position)
        assert decoded(codec, again).tobytes() == block.tobytes()


@pytest.mark.parametrize("rung", LOSSY)
def test_encoding_leaves_the_block_alone(make_codec: Make, make_block: Block, rung: Rung) -> None:
    codec = make_codec(rung)
    block = make_block(codec)
    before = block.copy()
    codec.encode(block, start_position=0)
    assert (block == before).all()


@pytest.mark.parametrize("rung", LOSSY)
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (3, 64), (4, 64), (5, 7), (32, 1), (32, 80), (100, 65), (256, 128)])
def test_odd_shapes_round_trip(make_codec: Make, make_block: Block, rung: Rung, tokens: int, head_dim: int) -> None:
    codec = make_codec(rung, tokens=tokens, head_dim=head_dim)
    block = make_block(codec)
    for start_position in (0, tokens):
        payload = codec.encode(block, start_position=start_position)
        error = widen(decoded(codec, payload), "bfloat16") - widen(block, "bfloat16")
        assert np.abs(error).max() == np.float32(read_header(payload).max_abs_error)
        assert len(payload) <= codec.max_payload_bytes


@pytest.mark.parametrize("rung", LOSSY)
def test_a_block_of_zeros_and_one_of_equal_numbers_come_back_close(make_codec: Make, rung: Rung) -> None:
    codec = make_codec(rung, dtype="float32")
    for number in (0.0, 1e-38, 3.0, -16384.0):
        block = np.full((3, 2, 2, 32, 64), number, np.float32)
        assert np.abs(decoded(codec, codec.encode(block, start_position=32)) - block).max() <= max(abs(number) / 200, 1e-6)


@pytest.mark.parametrize("rung", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_wherever_they_stand_and_the_block_is_unchanged(
    make_codec: Make, make_block: Block, rung: Rung, dtype: KvDtype, number: float
) -> None:
    codec = make_codec(rung, dtype=dtype)
    for place in (0, 12345, -1):
        block = make_block(codec)
        block.reshape(-1)[place] = np.float32(number).view(np.uint32) >> 16 if dtype == "bfloat16" else number
        before = block.tobytes()
        with pytest.raises(CodecFailure, match="NaN or Inf") as failure:
            codec.encode_canonical(block, start_position=0)
        assert failure.value.reason == "not_finite"
        assert block.tobytes() == before


def test_numbers_beyond_the_scale_codes_are_refused(make_codec: Make, make_block: Block) -> None:
    codec = make_codec(Rung.INT8, dtype="float32")
    block = make_block(codec)
    block.reshape(-1)[7] = 16385
    with pytest.raises(CodecFailure, match="magnitudes up to") as failure:
        codec.encode(block, start_position=0)
    assert failure.value.reason == "out_of_range"


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (np.zeros((3, 2, 2, 31, 64), np.uint16), "wrong_shape"),
        (np.zeros((3, 2, 2, 0, 64), np.uint16), "wrong_shape"),
        (np.zeros(0, np.uint16), "wrong_shape"),
        (np.zeros((3, 2, 2, 32, 64), np.float32), "wrong_dtype"),
        (np.zeros((3, 2, 2, 32, 64), ">u2"), "wrong_dtype"),
        (np.zeros((3, 2, 2, 32, 64), object), "wrong_dtype"),
        (None, "wrong_shape"),
    ],
)
def test_what_is_no_block_of_the_layout_is_refused(make_codec: Make, block: np.ndarray, reason: str) -> None:
    codec = make_codec()
    for encode in (codec.encode, codec.encode_canonical):
        with pytest.raises(CodecFailure) as failure:
            encode(block, start_position=0)
        assert failure.value.reason == reason


@pytest.mark.parametrize("start_position", [-32, 1, 33, 2**40 + 32, 2**64])
def test_a_position_that_no_block_starts_at_is_refused(make_codec: Make, make_block: Block, start_position: int) -> None:
    codec = make_codec()
    with pytest.raises(CodecFailure, match="multiple of 32") as failure:
        codec.encode(make_block(codec), start_position=start_position)
    assert failure.value.reason == "wrong_position"


@pytest.mark.parametrize("rung", RUNGS)
def test_other_memory_of_the_same_numbers_gives_the_same_payload(make_codec: Make, make_block: Block, rung: Rung) -> None:
    codec = make_codec(rung)
    block = make_block(codec)
    payload = codec.encode(block, start_position=0)
    transposed = np.asfortranarray(block)
    read_only = block.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + block.tobytes(), np.uint16, offset=1).reshape(block.shape)
    for same in (transposed, read_only, unaligned, block.view(np.int16), np.repeat(block, 2, axis=0)[::2]):
        assert codec.encode(same, start_position=0) == payload


def test_writing_in_place_needs_contiguous_writable_memory(make_codec: Make, make_block: Block) -> None:
    codec = make_codec()
    block = make_block(codec)
    payload = codec.encode(block, start_position=0)
    read_only = block.copy()
    read_only.flags.writeable = False
    for out in (np.asfortranarray(block), read_only):
        for call in (lambda out=out: codec.encode_canonical(out, start_position=0), lambda out=out: codec.decode_into(payload, out)):
            with pytest.raises(CodecFailure) as failure:
                call()
            assert failure.value.reason == "not_in_place"


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("rung", RUNGS)
def test_a_payload_is_written_into_the_caller_s_memory_where_there_is_room(
    make_codec: Make, make_block: Block, rung: Rung, entropy: bool
) -> None:
    codec = make_codec(rung, entropy=entropy)
    block = make_block(codec)
    for start_position in (0, 32):
        arena = bytearray(b"\xa5" * (codec.max_payload_bytes + 7))
        size = codec.encode_into(block, memoryview(arena)[3:-4], start_position=start_position)
        assert arena[3 : 3 + size] == codec.encode(block, start_position=start_position)
        assert arena[:3] + arena[-4:] == b"\xa5" * 7
    for memory in (bytearray(codec.max_payload_bytes - 1), memoryview(bytes(codec.max_payload_bytes))):
        with pytest.raises(CodecFailure) as failure:
            codec.encode_into(block, memory, start_position=0)
        assert failure.value.reason == "no_room"


def test_choices_that_a_rung_does_not_have_are_a_configuration_error() -> None:
    layout = Layout(layers=2, kv_heads=1, head_dim=16, dtype="bfloat16")
    for choice in ({"group": 60}, {"group": 0}, {"exact_tokens": -1}, {"layer_rungs": {2: Rung.INT8}}, {"layer_rungs": {0: Rung.RAW}}):
        with pytest.raises(ConfigError):
            BlockCodec(layout, model_digest=bytes(32), rung=Rung.INT4, **choice)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        BlockCodec(layout, model_digest=bytes(32), rung=Rung.FP8, layer_rungs={0: Rung.INT8})


def test_a_layer_with_a_finer_rung_has_its_error(make_block: Block) -> None:
    layout = Layout(layers=3, kv_heads=2, head_dim=64, dtype="bfloat16")
    codec = BlockCodec(layout, model_digest=bytes(32), rung=Rung.INT4, layer_rungs={1: Rung.INT8})
    block = make_block(codec)
    error = np.abs(widen(decoded(codec, codec.encode(block, start_position=32)), "bfloat16") - widen(block, "bfloat16"))
    assert error[1].mean() * 5 < min(error[0].mean(), error[2].mean())


def test_payloads_are_read_from_any_buffer_at_any_offset(make_codec: Make, make_block: Block) -> None:
    for rung in RUNGS:
        codec = make_codec(rung)
        payload = codec.encode(make_block(codec), start_position=0)
        wanted = decoded(codec, payload).tobytes()
        arena = bytearray(3) + payload + bytes(5)
        out = np.empty((3, 2, 2, 32, 64), np.int16)
        for view in (memoryview(arena)[3:-5], memoryview(arena).toreadonly()[3:-5], bytearray(payload)):
            codec.decode_into(view, out)  # type: ignore[arg-type]
            assert out.tobytes() == wanted


def test_a_payload_of_every_rung_is_read_by_a_codec_of_any_other(make_codec: Make, make_block: Block) -> None:
    for written in RUNGS:
        codec = make_codec(written)
        payload = codec.encode(make_block(codec), start_position=0)
        for reading in RUNGS if written is not Rung.KLT else [Rung.KLT]:
            assert decoded(make_codec(reading), payload).tobytes() == decoded(codec, payload).tobytes()


def test_a_payload_of_another_layout_or_model_is_unsupported_and_nothing_is_written(make_codec: Make, make_block: Block) -> None:
    codec = make_codec()
    payload = codec.encode(make_block(codec), start_position=0)
    out = np.full((3, 2, 2, 32, 64), 7, np.uint16)
    rope = Layout(layers=3, kv_heads=2, head_dim=64, dtype="bfloat16", rope=(("theta", "1e6"),))
    for other in (make_codec(model_digest=b"o" * 32), BlockCodec(rope, model_digest=bytes(range(32)), rung=Rung.INT8)):
        with pytest.raises(UnsupportedFormat):
            other.decode_into(payload, out)
    assert (out == 7).all()


def test_a_payload_of_another_position_is_refused(make_codec: Make, make_block: Block) -> None:
    codec = make_codec()
    payload = codec.encode(make_block(codec), start_position=64)
    out = np.empty((3, 2, 2, 32, 64), np.uint16)
    assert codec.decode_into(payload, out, start_position=64).start_position == 64
    with pytest.raises(CorruptPayload, match="starts at token 64, not at 32"):
        codec.decode_into(payload, out, start_position=32)


def test_the_shard_of_a_split_model_has_its_share_of_the_heads() -> None:
    layout = Layout(layers=2, kv_heads=4, head_dim=16, dtype="bfloat16", tensor_parallel=2)
    codec = BlockCodec(layout, model_digest=bytes(32), rung=Rung.INT8)
    block = np.zeros((2, 2, 2, 32, 16), np.uint16)
    assert read_header(codec.encode(block, start_position=0)).kv_heads == 2


def test_a_layout_that_no_payload_can_describe_is_a_configuration_error() -> None:
    huge = Layout(layers=4096, kv_heads=4096, head_dim=4096, dtype="float32")
    for layout in (huge, Layout(layers=5000, kv_heads=1, head_dim=1, dtype="float32", block_tokens=1)):
        with pytest.raises(ConfigError, match="the codec takes"):
            BlockCodec(layout, model_digest=bytes(32), rung=Rung.RAW)
    with pytest.raises(ConfigError, match="32 bytes"):
        BlockCodec(Layout(layers=1, kv_heads=1, head_dim=8, dtype="float32"), model_digest=b"", rung=Rung.RAW)


@pytest.mark.parametrize("rung", LOSSY)
def test_one_codec_serves_many_threads_at_once(make_codec: Make, make_block: Block, rung: Rung) -> None:
    codec = make_codec(rung)
    blocks = [make_block(codec, seed=seed) for seed in range(8)]
    payloads = [codec.encode(block, start_position=0) for block in blocks]
    wanted = [decoded(codec, payload).tobytes() for payload in payloads]
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(10):
            for index, block in enumerate(blocks):
                if codec.encode(block, start_position=0) != payloads[index] or decoded(codec, payloads[index]).tobytes() != wanted[index]:
                    wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_checksum_of_a_payload_is_the_one_the_store_checks(make_codec: Make, make_block: Block) -> None:
    codec = make_codec()
    payload = codec.encode(make_block(codec), start_position=0)
    assert payload_checksum(payload) == payload_checksum(bytearray(payload)) != payload_checksum(payload[:-1])
