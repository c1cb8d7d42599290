"""The payload of one block: a header that says what the bytes are, then four sections. Pure: imports neither numpy nor numba.

    header   HEADER_BYTES, little-endian, fields below; its last 8 bytes are XXH3-64 over all the rest of the payload
    exact    the first `exact_tokens` tokens of every layer, K and V, head, as they are ([layers, 2, heads, exact, head_dim])
    side     scales and zeros (rung fp8: exponents): what the codes mean
    keys     codes of the keys of the other tokens ([layers, heads, tokens - exact, packed row])
    values   codes of the values, likewise

Sections are stored plain or packed by the entropy stage, each on its own; an absent one has length 0. Rungs without
quantization keep every token in `exact`. Rung klt has a version of its own, whose header also names the step and the calibration
tables; its sections `keys` and `values` are entropy-coded coefficients of any length, and `side` is empty.

A reader refuses what it does not know (UnsupportedFormat: a miss) and what cannot be (CorruptPayload: another copy), and
bounds every field before it allocates anything. The version moves with any change of layout or arithmetic; readers keep the
old ones.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvstore.codec.checksum import CHECKSUM_BYTES
from kvstore.errors import CorruptPayload, UnsupportedFormat
from kvstore.ids import LayoutFingerprint

MAGIC = b"LKVB"
VERSION = 1
KLT_VERSION = 2
"""Of the rung klt alone: all other payloads stay readable by who knows version 1 only."""

_PREFIX = struct.Struct("<4sHH")  # magic, version, header bytes: these three stay where they are in every version
_FIELDS = struct.Struct("<4sHHBBBBHHHHHHQffQQ4Q32s32s")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES
_KLT_FIELDS = struct.Struct("<IHH32s")  # step, reserved, reserved, digest of the calibration tables; between the fields and the checksum
_HEADER_BYTES = {VERSION: HEADER_BYTES, KLT_VERSION: HEADER_BYTES + _KLT_FIELDS.size}

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


BITS = {Rung.INT8: 8, Rung.INT6: 6, Rung.INT5: 5, Rung.INT4: 4}
"""Code width of the rungs with codes of one width."""

LOSSY = frozenset({*BITS, Rung.FP8, Rung.KLT})

MAX_STEP = 255
MAX_COEFFICIENT_BYTES = 8
"""No coefficient of rung klt takes more; a section has some bytes besides (`klt_bound`)."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

_RUNG_CODES = {Rung.RAW: 1, Rung.LOSSLESS: 2, Rung.INT8: 3, Rung.INT4: 4, Rung.KLT: 5, Rung.INT6: 6, Rung.INT5: 7, Rung.FP8: 8}
_RUNGS = {code: rung for rung, code in _RUNG_CODES.items()}
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
    step: int = 0
    """Rung klt: multiple of the tables' base step, the quality; 0 elsewhere."""
    calibration: bytes = b""
    """Rung klt: digest of the tables that decode it (klt_tables.py)."""
    checksum: int = 0
    """XXH3-64 over the payload without these 8 bytes of it; as read. A writer computes it."""

    @property
    def version(self) -> int:
        return KLT_VERSION if self.rung is Rung.KLT else VERSION

    @property
    def header_bytes(self) -> int:
        return _HEADER_BYTES[self.version]

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
            return (exact, 0, self.section_bytes[2], self.section_bytes[3])
        if self.rung is Rung.FP8:
            return (exact, 2 * planes, planes * lossy * self.head_dim, planes * lossy * self.head_dim)
        bits = BITS[self.rung]
        scales = planes * (math.ceil(lossy / self.group) * self.head_dim + lossy * math.ceil(self.head_dim / self.group))
        codes = planes * lossy * row_bytes(self.head_dim, bits)
        return (exact, scales if bits == 8 else 2 * scales, codes, codes)

    @property
    def unpacked_bytes(self) -> int:
        return sum(self.unpacked_section_bytes)

    @property
    def body_bytes(self) -> int:
        return sum(self.section_bytes)

    @property
    def payload_bytes(self) -> int:
        return self.header_bytes + self.body_bytes


def row_bytes(width: int, bits: int) -> int:
    """Of a packed row of codes (kernels.py)."""
    return width if bits == 8 else math.ceil(width / 2) + (bits - 4) * math.ceil(width / 8)


def write_header(header: BlockHeader, sections: tuple[bytes | memoryview, ...]) -> bytes:
    """The bytes of a header over these sections, checksum included; `header.section_bytes` must be their lengths."""
    assert header.section_bytes == tuple(len(section) for section in sections)
    fields = _FIELDS.pack(
        MAGIC,
        header.version,
        header.header_bytes,
        _RUNG_CODES[header.rung],
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
    )
    if header.rung is Rung.KLT:
        fields += _KLT_FIELDS.pack(header.step, 0, 0, header.calibration)
    digest = xxhash.xxh3_64(fields)
    for section in sections:
        digest.update(section)
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
    expected_bytes = _HEADER_BYTES.get(version)
    if expected_bytes is None:
        raise UnsupportedFormat(f"payload version {version} is not known here; known: {VERSION} and {KLT_VERSION}")
    if header_bytes != expected_bytes or len(view) < expected_bytes:
        raise CorruptPayload(
            f"a version {version} header has {expected_bytes} bytes; this one says {header_bytes} in a payload of {len(view)}"
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
    ) = _FIELDS.unpack_from(view)
    if rung_code not in _RUNGS:
        raise UnsupportedFormat(f"rung code {rung_code} is not known here; known: {_names(_RUNGS)}")
    if dtype_code not in _DTYPES:
        raise UnsupportedFormat(f"dtype code {dtype_code} is not known here; known: {_names(_DTYPES)}")
    if reserved or packed >= 1 << SECTIONS:
        raise UnsupportedFormat("the header uses flags that are not known here")
    rung = _RUNGS[rung_code]
    if (rung is Rung.KLT) != (version == KLT_VERSION):
        raise CorruptPayload(f"impossible header: rung {rung} in version {version}")
    step, calibration = 0, b""
    if rung is Rung.KLT:
        step, *reserved_too, calibration = _KLT_FIELDS.unpack_from(view, _FIELDS.size)
        if any(reserved_too):
            raise UnsupportedFormat("the header uses flags that are not known here")
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
        step=step,
        calibration=calibration,
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
    if header.rung in BITS:
        if not 0 < header.group <= MAX_COUNT:
            return f"group is {header.group}, allowed are 1 to {MAX_COUNT}"
        if header.exact_tokens > header.block_tokens:
            return f"{header.exact_tokens} of {header.block_tokens} tokens are exact"
    elif header.rung is Rung.KLT:
        if not 0 < header.step <= MAX_STEP:
            return f"step is {header.step}, allowed are 1 to {MAX_STEP}"
        if header.group or header.exact_tokens > header.block_tokens or max(header.section_bytes[2:]) > klt_bound(header):
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
