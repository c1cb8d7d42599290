"""The payload of one block: a header that says what the bytes are, then four sections. Pure: imports neither numpy nor numba.

    header   little-endian, fields below; rungs int8 to int4 add two bytes a layer, the bits of a code of its keys and of its values; the
             last 8 bytes are XXH3-64 over all the rest of the payload
    exact    the first `exact_tokens` tokens of every layer, K and V, head, as they are ([layers, 2, heads, exact, head_dim])
    keys     codes of the keys of the other tokens, plane by plane ([layers, heads, packed plane: reference.pack_plane])
    values   codes of the values, likewise
    side     what the codes mean. Scales of all keys ([layers, heads, token groups, head_dim], a byte each) and of all values ([layers,
             heads, tokens, channel groups]); then zeros of the keys, and of those layers' values whose codes are not symmetric, in
             the same order. Rung fp8: exponents

Sections are stored plain or packed by the entropy stage, each on its own; an absent one has length 0. Rungs without
quantization keep every token in `exact`. In rung klt the header names the step and the calibration tables, the sections `keys` and
`values` are entropy-coded coefficients of any length, and `side` is empty.

A reader refuses what it does not know (UnsupportedFormat: a miss) and what cannot be (CorruptPayload: another copy), and
bounds every field before it allocates anything. The version moves with any change of layout or arithmetic.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvstore.codec.checksum import CHECKSUM_BYTES
from kvstore.errors import CorruptPayload, UnsupportedFormat
from kvstore.ids import LayoutFingerprint

MAGIC = b"LKVB"
VERSION = 3

_PREFIX = struct.Struct("<4sHH")  # magic, version, header bytes: these three stay where they are in every version
_FIELDS = struct.Struct("<4sHHBBBBHHHHHHQffQQ4Q32s32sI32s")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES
"""Without the table of bits."""

SECTIONS = 4
MAX_COUNT = 1 << 12
MAX_PAYLOAD_BYTES = 1 << 30
MAX_POSITION = 1 << 40
DIGEST_BYTES = 32


class Rung(StrEnum):
    """One step of the quality ladder, from the most bits to the fewest."""

    RAW = "raw"
    LOSSLESS = "lossless"
    INT8 = "int8"
    FP8 = "fp8"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    KLT = "klt"


BITS = {Rung.INT8: (8, 7), Rung.INT6: (6, 6), Rung.INT5: (5, 5), Rung.INT4: (4, 4)}
"""Bits of a code of keys and of values. Of an error's cost keys have nine tenths (LOG.md), so int8 is eight bits of them alone."""

NARROWEST, WIDEST = 4, 8
"""Bits that a code can have."""

WHOLE_VECTOR = 8
"""Groups are multiples of it, for the kernels' sake."""

LOSSY = frozenset({*BITS, Rung.FP8, Rung.KLT})

MAX_STEP = 255
MAX_COEFFICIENT_BYTES = 8
"""No coefficient of rung klt takes more; a section has some bytes besides (`klt_bound`)."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

RUNG_CODES = {Rung.RAW: 1, Rung.LOSSLESS: 2, Rung.INT8: 3, Rung.INT4: 4, Rung.KLT: 5, Rung.INT6: 6, Rung.INT5: 7, Rung.FP8: 8}
RUNGS = {code: rung for rung, code in RUNG_CODES.items()}
_DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """What a payload says about itself."""

    rung: Rung
    dtype: str
    layers: int
    kv_heads: int
    """Heads in this block: of one shard, when the model is split."""
    block_tokens: int
    head_dim: int
    group: int
    """Elements that share a scale, at most; 0 where nothing is quantized."""
    exact_tokens: int
    start_position: int
    """Of the block's first token in its sequence."""
    max_abs_error: float
    """Largest |decoded - original|, measured when it was encoded."""
    rms_error: float
    """Root mean square of the same over all elements of the block."""
    packed: int
    """Bit i is set when section i went through the entropy stage (zstandard, one frame)."""
    section_bytes: tuple[int, int, int, int]
    """As stored."""
    model_digest: bytes
    layout_fingerprint: LayoutFingerprint
    widths: tuple[tuple[int, int], ...] = ()
    """Rungs of BITS: for each layer the bits of a code of its keys and of its values; empty elsewhere."""
    step: int = 0
    """Rung klt: multiple of the tables' base step, the quality; 0 elsewhere."""
    calibration: bytes = b""
    """Rung klt: digest of the tables that decode it (klt_tables.py)."""
    checksum: int = 0
    """XXH3-64 over the payload without these 8 bytes of it; as read. A writer computes it."""

    @property
    def header_bytes(self) -> int:
        return HEADER_BYTES + 2 * len(self.widths)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layers, K and V, heads, tokens, head dim]."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def unpacked_section_bytes(self) -> tuple[int, int, int, int]:
        """Length of each section before the entropy stage; follows from the other fields."""
        planes = self.layers * self.kv_heads
        lossy = self.block_tokens - self.exact_tokens
        exact = planes * 2 * self.exact_tokens * self.head_dim * DTYPE_BYTES[self.dtype]
        if not lossy:
            return (exact, 0, 0, 0)
        if self.rung is Rung.KLT:
            return (exact, self.section_bytes[1], self.section_bytes[2], 0)
        if self.rung is Rung.FP8:
            return (exact, planes * lossy * self.head_dim, planes * lossy * self.head_dim, 2 * planes)
        key_scales = self.kv_heads * math.ceil(lossy / self.group) * self.head_dim
        value_scales = self.kv_heads * lossy * math.ceil(self.head_dim / self.group)
        side = keys = values = 0
        for (key_bits, value_bits), layers in Counter(self.widths).items():
            side += layers * (2 * key_scales + (1 if symmetric_values(value_bits) else 2) * value_scales)
            keys += layers * self.kv_heads * plane_bytes(lossy * self.head_dim, key_bits)
            values += layers * self.kv_heads * plane_bytes(lossy * self.head_dim, value_bits)
        return (exact, keys, values, side)

    @property
    def unpacked_bytes(self) -> int:
        return sum(self.unpacked_section_bytes)

    @property
    def body_bytes(self) -> int:
        return sum(self.section_bytes)

    @property
    def payload_bytes(self) -> int:
        return self.header_bytes + self.body_bytes


def plane_bytes(count: int, bits: int) -> int:
    """Of a plane of packed codes: a whole number of codes for each byte of a part (reference.pack_plane)."""
    parts = {4: 2, 5: 8, 6: 4, 7: 8, 8: 1}[bits]
    return math.ceil(count / parts) * (parts * bits // 8)


def symmetric_values(bits: int) -> bool:
    """Whether codes of values have no zero of their own."""
    return bits >= 7


def write_header(header: BlockHeader, body: bytes | memoryview) -> bytes:
    """The bytes of a header over these sections, one after the other, checksum included; `header.section_bytes` must be their lengths."""
    assert header.body_bytes == len(body)
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.header_bytes,
        RUNG_CODES[header.rung],
        _DTYPE_CODES[header.dtype],
        header.packed,
        0,
        header.layers,
        header.kv_heads,
        header.block_tokens,
        header.head_dim,
        header.group,
        header.exact_tokens,
        header.start_position,
        header.max_abs_error,
        header.rms_error,
        header.body_bytes,
        header.unpacked_bytes,
        *header.section_bytes,
        header.model_digest,
        header.layout_fingerprint,
        header.step,
        header.calibration,  # zeros where there is none
    )
    fields += bytes(bits for pair in header.widths for bits in pair)
    digest = xxhash.xxh3_64(fields)
    digest.update(body)
    return fields + int(digest.intdigest()).to_bytes(CHECKSUM_BYTES, "little")


def read_header(payload: bytes | bytearray | memoryview) -> BlockHeader:
    """The header of a whole payload. The checksum is read, not verified: see `verify`.

    Raises UnsupportedFormat for a version, rung or dtype that is not known here, CorruptPayload for anything a writer of this
    version cannot have written: wrong magic, cut short, a count or length out of its bounds, lengths that do not add up.
    """
    view = memoryview(payload).cast("B")
    if len(view) < _PREFIX.size:
        raise CorruptPayload(f"a payload has at least {HEADER_BYTES} bytes, this one has {len(view)}")
    magic, version, header_bytes = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise CorruptPayload(f"a payload starts with {MAGIC!r}, this one with {magic!r}")
    if version != VERSION:
        raise UnsupportedFormat(f"payload version {version} is not known here; known: {VERSION}")
    if not HEADER_BYTES <= header_bytes <= min(len(view), HEADER_BYTES + 2 * MAX_COUNT):
        raise CorruptPayload(
            f"a version {version} header has {HEADER_BYTES} bytes or more; this one says {header_bytes} in a payload of {len(view)}"
        )
    (
        _magic,
        _version,
        _header_bytes,
        rung_code,
        dtype_code,
        packed,
        reserved,
        layers,
        kv_heads,
        block_tokens,
        head_dim,
        group,
        exact_tokens,
        start_position,
        max_abs_error,
        rms_error,
        body_bytes,
        unpacked_bytes,
        *section_bytes,
        model_digest,
        fingerprint,
        step,
        calibration,
    ) = _FIELDS.unpack_from(view)
    if rung_code not in RUNGS:
        raise UnsupportedFormat(f"rung code {rung_code} is not known here; known: {_names(RUNGS)}")
    if dtype_code not in _DTYPES:
        raise UnsupportedFormat(f"dtype code {dtype_code} is not known here; known: {_names(_DTYPES)}")
    if reserved or packed >= 1 << SECTIONS:
        raise UnsupportedFormat("the header uses flags that are not known here")
    rung = RUNGS[rung_code]
    if header_bytes != HEADER_BYTES + (2 * layers if rung in BITS else 0):
        raise CorruptPayload(f"a header of rung {rung} and {layers} layers cannot have {header_bytes} bytes")
    table = bytes(view[_FIELDS.size : header_bytes - CHECKSUM_BYTES])
    if table and not NARROWEST <= min(table) <= max(table) <= WIDEST:
        raise UnsupportedFormat(f"codes have {NARROWEST} to {WIDEST} bits here")
    header = BlockHeader(
        rung=rung,
        dtype=_DTYPES[dtype_code],
        layers=layers,
        kv_heads=kv_heads,
        block_tokens=block_tokens,
        head_dim=head_dim,
        group=group,
        exact_tokens=exact_tokens,
        start_position=start_position,
        max_abs_error=max_abs_error,
        rms_error=rms_error,
        packed=packed,
        section_bytes=(section_bytes[0], section_bytes[1], section_bytes[2], section_bytes[3]),
        model_digest=model_digest,
        layout_fingerprint=LayoutFingerprint(fingerprint),
        widths=tuple(zip(table[::2], table[1::2], strict=True)),
        step=step,
        calibration=calibration if rung is Rung.KLT or any(calibration) else b"",
        checksum=int.from_bytes(view[header_bytes - CHECKSUM_BYTES : header_bytes], "little"),
    )
    impossible = _impossibility(header)
    if impossible:
        raise CorruptPayload(f"impossible header: {impossible}")
    if body_bytes != header.body_bytes or unpacked_bytes != header.unpacked_bytes:
        raise CorruptPayload("impossible header: the section lengths do not add up")
    if header.payload_bytes != len(view):
        raise CorruptPayload(f"the header announces {header.payload_bytes} bytes, the payload has {len(view)}")
    return header


def verify(payload: bytes | bytearray | memoryview, header: BlockHeader) -> None:
    """Raises CorruptPayload unless the checksum in the header fits header and body. Cost: one pass of XXH3 over the payload."""
    view = memoryview(payload).cast("B")
    digest = xxhash.xxh3_64(view[: header.header_bytes - CHECKSUM_BYTES])
    digest.update(view[header.header_bytes :])
    if digest.intdigest() != header.checksum:
        raise CorruptPayload("checksum mismatch: these bytes are not what was encoded")


def _impossibility(header: BlockHeader) -> str | None:
    """Why no writer of this version can have written the header, in words; None when one can."""
    counts = {"layers": header.layers, "kv_heads": header.kv_heads, "block_tokens": header.block_tokens, "head_dim": header.head_dim}
    for name, count in counts.items():
        if not 0 < count <= MAX_COUNT:
            return f"{name} is {count}, allowed are 1 to {MAX_COUNT}"
    if (header.step or header.calibration) and header.rung is not Rung.KLT:
        return f"rung {header.rung} has neither step nor calibration"
    if header.rung in BITS:
        if not 0 < header.group <= MAX_COUNT or header.group % WHOLE_VECTOR:
            return f"group is {header.group}, allowed are multiples of {WHOLE_VECTOR} up to {MAX_COUNT}"
        if header.exact_tokens > header.block_tokens:
            return f"{header.exact_tokens} of {header.block_tokens} tokens are exact"
    elif header.rung is Rung.KLT:
        if not 0 < header.step <= MAX_STEP:
            return f"step is {header.step}, allowed are 1 to {MAX_STEP}"
        if header.group or header.exact_tokens > header.block_tokens or max(header.section_bytes[1:3]) > klt_bound(header):
            return f"rung {header.rung} with {header.exact_tokens} exact tokens and {header.section_bytes} bytes"
    elif header.rung is Rung.FP8:
        if header.group or header.exact_tokens > header.block_tokens:
            return f"rung {header.rung} with groups of {header.group} and {header.exact_tokens} exact tokens"
    elif header.group or header.exact_tokens != header.block_tokens:
        return f"rung {header.rung} keeps every token exact"
    if header.unpacked_bytes > MAX_PAYLOAD_BYTES:
        return f"the block would have {header.unpacked_bytes} bytes, allowed are {MAX_PAYLOAD_BYTES}"
    if header.start_position > MAX_POSITION or header.start_position % header.block_tokens:
        return f"start position {header.start_position} is no multiple of {header.block_tokens} up to 2^40"
    for error in (header.max_abs_error, header.rms_error):
        if not (math.isfinite(error) and error >= 0):
            return f"the measured error is {error}"
    for index, (stored, unpacked) in enumerate(zip(header.section_bytes, header.unpacked_section_bytes, strict=True)):
        is_packed = header.packed >> index & 1
        if (stored >= unpacked) if is_packed else (stored != unpacked):
            return f"section {index} has {stored} bytes for {unpacked}, {'packed' if is_packed else 'plain'}"
    return None


def klt_bound(header: BlockHeader) -> int:
    """More bytes than a section of rung klt can have in a block of these counts."""
    lossy = header.block_tokens - header.exact_tokens
    return MAX_COEFFICIENT_BYTES * lossy * header.layers * header.kv_heads * header.head_dim + 2 * header.layers + 128 if lossy else 0


def _names(table: dict[int, Rung] | dict[int, str]) -> str:
    return ", ".join(f"{code} ({name})" for code, name in sorted(table.items()))
