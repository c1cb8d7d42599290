"""BlockCodec: KV blocks to payloads and back, for one layout and one model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from kvstore.codec import bit_planes, fp8, kernels, step_kernels
from kvstore.codec.block_format import (
    BITS,
    DIGEST_BYTES,
    LOSSY,
    MAX_COUNT,
    MAX_PAYLOAD_BYTES,
    MAX_POSITION,
    BlockHeader,
    Rung,
    klt_bound,
    read_header,
    verify,
    write_header,
)
from kvstore.codec.klt import KltTransform
from kvstore.codec.klt_tables import KltTables
from kvstore.codec.precision import DEFAULT_STEP, FIRST_EXACT_TOKENS, GROUP, Precision
from kvstore.codec.reference import narrow, widen
from kvstore.codec.sections import Sections, places, read_sections, write_sections
from kvstore.core.layout import Layout
from kvstore.errors import CodecFailure, ConfigError, CorruptPayload, UnsupportedFormat
from kvstore.ids import LayoutFingerprint

MAX_MAGNITUDE = 16384.0
"""Larger elements are refused by the lossy rungs: the scale codes and float16 end there."""

_FLOAT32_UP = 1 + 2.0**-22
"""A bound times this is still one after a header has rounded it to float32."""

_KINDS = {"bfloat16": kernels.BFLOAT16, "float16": kernels.FLOAT16, "float32": kernels.FLOAT32}
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_NO_HALF = np.empty(0, np.uint16)
_NO_SINGLE = np.empty(0, np.float32)


class BlockCodec:
    """Encodes blocks at one rung, decodes payloads of every rung, for one layout and one model. Safe to share between threads.

    A block is an array [layers, 2, heads, block_tokens, head_dim], index 1 being K (after RoPE) and V, heads those of one
    tensor-parallel shard. bfloat16 travels as uint16 (or int16) bit patterns, float16 and float32 as what they are.

    The lossy rungs store code c as narrow((c + zero) * scale), scales one byte (eight an octave), one for each channel of keys
    over up to `group` tokens, one for each token of values over up to `group` channels. The same block gives the same payload in
    every process, and a payload decodes to the same bits everywhere.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        model_digest: bytes,
        rung: Rung,
        entropy: bool = True,
        calibration: KltTables | None = None,
        step: int = DEFAULT_STEP,
        group: int = GROUP,
        exact_tokens: int = FIRST_EXACT_TOKENS,
        layer_rungs: Mapping[int, Rung] = MappingProxyType({}),
        fingerprint: LayoutFingerprint | None = None,
    ) -> None:
        """`entropy=False` keeps sections plain, where a rung leaves the choice. `calibration` is what writing and reading rung klt takes,
        `step` its quality: a multiple of the tables' base step, 1 to MAX_STEP. `group`, `exact_tokens` (first ones of a sequence) and
        `layer_rungs` (other widths for single layers, rungs of BITS only) are what this codec writes; it reads any. `fingerprint`: what
        payloads call the layout, when `layout` says no more of it than their headers do (step_down.py).

        Raises ConfigError for a layout or digest that no payload can describe, for rung klt without calibration, for a calibration of
        another model or layout, and for choices that the rung does not have.
        """
        heads = layout.kv_heads // layout.tensor_parallel
        if len(model_digest) != DIGEST_BYTES:
            raise ConfigError(f"a model digest has {DIGEST_BYTES} bytes, not {len(model_digest)}")
        if max(layout.layers, heads, layout.block_tokens, layout.head_dim) > MAX_COUNT or layout.block_bytes > MAX_PAYLOAD_BYTES // 2:
            raise ConfigError(f"the codec takes counts up to {MAX_COUNT} and blocks up to {MAX_PAYLOAD_BYTES // 2} bytes: {layout}")
        if calibration is not None and not calibration.fits(layout, model_digest):
            raise ConfigError("calibration: these tables were made for another model or layout")
        if rung is Rung.KLT and calibration is None:
            raise ConfigError("rung klt needs calibration tables: make them with `kvctl calibrate`")
        precision = Precision(rung=rung, group=group, exact_tokens=exact_tokens, layer_rungs=layer_rungs, step=step)
        self.layout = layout
        self.rung = rung
        self._klt = KltTransform(calibration) if calibration is not None else None
        self._step = step
        self._model_digest = model_digest
        self._fingerprint = layout.fingerprint if fingerprint is None else fingerprint
        self._heads = heads
        self._group = group
        self._exact_tokens = min(exact_tokens, layout.block_tokens)
        self._widths = precision.widths(layout.layers)
        packable = () if not entropy or rung is Rung.RAW else (0,) if rung is Rung.KLT else (0, 3) if rung in BITS else range(4)
        self._packable = frozenset(packable)
        self._shape = (layout.layers, 2, heads, layout.block_tokens, layout.head_dim)
        self._dtype = _NUMPY_DTYPES[layout.dtype]
        self._kind = _KINDS[layout.dtype]
        headers = [self._header(start_position=position) for position in (0, layout.block_tokens)]
        self.max_payload_bytes = max(
            header.header_bytes + header.unpacked_bytes + (2 * klt_bound(header) if rung is Rung.KLT else 0) for header in headers
        )
        """No payload of this codec is larger: what to reserve before encoding."""

    def empty_block(self) -> np.ndarray:
        """A block of zeros of the shape and dtype that this codec takes."""
        return np.zeros(self._shape, self._dtype)

    def encode(self, block: np.ndarray, *, start_position: int) -> bytes:
        """The payload of a block, which is left as it is. One that is not C-contiguous, aligned and writable is copied first.

        Raises CodecFailure, with a reason, for: wrong_shape, wrong_dtype, wrong_position (negative, beyond 2**40, or no
        multiple of block_tokens); and at lossy rungs not_finite (NaN or Inf) and out_of_range (beyond MAX_MAGNITUDE).

        Cost: LOG.md; about 0.4 ms for 737 KB of bfloat16 on one core, without the GIL.
        """
        room = np.empty(self.max_payload_bytes, np.uint8)
        return room[: self.encode_into(block, room.data, start_position=start_position)].tobytes()

    def encode_into(self, block: np.ndarray, out: bytearray | memoryview, *, start_position: int, canonical: bool = False) -> int:
        """As `encode`, or with `canonical` as `encode_canonical`, into the caller's memory: the payload's length. What is behind it
        may be overwritten. Also raises CodecFailure (no_room) unless `out` is writable and has max_payload_bytes."""
        block = self._checked_in_place(block) if canonical else self._checked(block)
        view = memoryview(out).cast("B")
        if view.readonly or len(view) < self.max_payload_bytes:
            raise CodecFailure(f"a payload needs {self.max_payload_bytes} writable bytes, not {len(view)}", reason="no_room")
        room = np.frombuffer(view, np.uint8)
        return self._encode(block if block.flags.carray else block.copy(), start_position, room, canonical=canonical)

    def encode_canonical(self, block: np.ndarray, *, start_position: int) -> bytes:
        """As `encode`, and replaces the block by decode(payload) in the same pass. On an error the block is unchanged.

        Encoding a canonical block again may give another payload; what attends to a block must use the payload's numbers.
        Also refuses what cannot be replaced in place (not_in_place): not C-contiguous, not aligned, read-only.
        """
        room = np.empty(self.max_payload_bytes, np.uint8)
        return room[: self.encode_into(block, room.data, start_position=start_position, canonical=True)].tobytes()

    def decode_into(self, payload: bytes | bytearray | memoryview, out: np.ndarray, *, start_position: int | None = None) -> BlockHeader:
        """Writes the block into `out` and returns the header. On any error `out` is unchanged.

        Raises CorruptPayload for bytes that are not what was encoded (checksum over header and body), or not at
        `start_position`; UnsupportedFormat for a version, rung, layout or model other than this codec's; CodecFailure for an
        `out` of the wrong shape or dtype, or that cannot be written in place.

        Cost: about 0.25 ms for 737 KB of bfloat16 on one core, without the GIL.
        """
        out = self._checked_in_place(out)
        header, (exact, keys, values, side) = self.opened(payload, start_position=start_position)
        tokens = header.exact_tokens
        recoded = None
        if tokens < header.block_tokens and header.rung is Rung.KLT:
            recoded = self._klt_block(header, keys, values)
        if tokens:
            out[..., :tokens, :] = exact.view(out.dtype).reshape(*self._shape[:3], tokens, self._shape[4])
        if recoded is not None:
            out[..., tokens:, :] = recoded.view(out.dtype)
        elif tokens < header.block_tokens:
            half, single = self._views(out)
            if header.rung is Rung.FP8:
                fp8.decode(half, single, self._kind, self._tile_shape, tokens, side.view(np.int8).reshape(2, -1), keys, values)
                return header
            widths = np.array(header.widths, np.uint8)
            kernels.dequantize(half, single, self._kind, self._tile_shape, tokens, header.group, widths, side, keys, values)
        return header

    def opened(self, payload: bytes | bytearray | memoryview, *, start_position: int | None = None) -> tuple[BlockHeader, Sections]:
        """The header and the unpacked sections of a payload that fits this layout and model. Raises as `decode_into`."""
        view = memoryview(payload).cast("B")
        header = read_header(view)
        verify(view, header)
        self._check_identity(header, start_position)
        return header, read_sections(view, header)

    def assembled(self, sections: Sections, *, start_position: int, largest: float, squares: float) -> bytes:
        """The payload of sections that were made elsewhere (on a device) as `header_of` says; `largest` error and sum of squared ones."""
        header = self.header_of(start_position)
        room = np.empty(header.header_bytes + header.unpacked_bytes, np.uint8)
        return room[: self._written(room, header, sections, largest, squares)].tobytes()

    def header_of(self, start_position: int) -> BlockHeader:
        """What a payload of the block there would say before anything is measured. Raises CodecFailure (wrong_position)."""
        if not 0 <= start_position <= MAX_POSITION or start_position % self.layout.block_tokens:
            raise CodecFailure(
                f"a block starts at a multiple of {self.layout.block_tokens} up to 2^40, not at {start_position}", reason="wrong_position"
            )
        return self._header(start_position=start_position)

    def step_down(self, payload: bytes | bytearray | memoryview) -> bytes:
        """A payload of a finer rung re-coded to this codec's, in the coded domain: int8 or int6 to int5 or int4, klt to a multiple of its
        step. Its groups and exact tokens stay as they are.

        The header states an error that is not exceeded: the one measured before and the one measured now, added. Raises
        CorruptPayload and UnsupportedFormat as `decode_into`, and CodecFailure (no_step_down) for any other pair of rungs.

        A scale that would not fit its code is refused as out_of_range: of magnitudes at the very end of MAX_MAGNITUDE.

        Cost: LOG.md; without the GIL for the rungs of BITS.
        """
        view = memoryview(payload).cast("B")
        fine = self.empty_block()
        header = self.decode_into(view, fine)
        exact, keys, values, side = read_sections(view, header)
        tokens = header.block_tokens - header.exact_tokens
        if header.rung in BITS and self.rung in BITS and header.rung is not self.rung and self._takes_planes_of(header):
            sections = step_kernels.stepped_down(header, keys, values, side, widths=self._widths) if tokens else (b"", b"", b"")
        elif (header.rung, self.rung) == (Rung.KLT, Rung.KLT) and self._step % header.step == 0:
            klt = self._klt_of(header)
            sections = (b"", b"", b"")
            if tokens:
                parts = klt.read((keys.data, values.data), tokens=tokens, step=header.step)
                sections = (*klt.write(klt.stepped_down(parts, step=header.step, factor=self._step // header.step), step=self._step), b"")
        else:
            what = (
                f"{header.rung} at step {header.step} to {self.rung} at step {self._step}"
                if header.step
                else f"{header.rung} to {self.rung}"
            )
            raise CodecFailure(f"there is no step down from {what}", reason="no_step_down")
        stored = (exact.tobytes(), *sections)
        lengths = (len(stored[0]), len(stored[1]), len(stored[2]), len(stored[3]))
        body = b"".join(stored)
        stepped = replace(
            header, rung=self.rung, widths=self._widths, step=self._step if header.step else 0, packed=0, section_bytes=lengths
        )
        coarse = self.empty_block()
        self.decode_into(write_header(stepped, body) + body, coarse)
        largest, squares = step_kernels.moved(*self._views(fine), *self._views(coarse), self._kind)
        stepped = replace(
            stepped,
            max_abs_error=(header.max_abs_error + largest) * _FLOAT32_UP,
            rms_error=(header.rms_error + math.sqrt(squares / fine.size)) * _FLOAT32_UP,
        )
        return write_header(stepped, body) + body

    def _takes_planes_of(self, header: BlockHeader) -> bool:
        return all(
            new <= min(old, bit_planes.MOST_BITS)
            for before, after in zip(header.widths, self._widths, strict=True)
            for old, new in zip(before, after, strict=True)
        )

    @property
    def _tile_shape(self) -> tuple[int, int, int, int]:
        return (self._shape[0], self._shape[2], self._shape[3], self._shape[4])

    def _header(
        self,
        *,
        start_position: int,
        max_abs_error: float = 0.0,
        rms_error: float = 0.0,
        packed: int = 0,
        section_bytes: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> BlockHeader:
        lossy = self.rung in LOSSY
        first = self._exact_tokens if start_position == 0 else 0
        return BlockHeader(
            rung=self.rung,
            dtype=self.layout.dtype,
            layers=self.layout.layers,
            kv_heads=self._heads,
            block_tokens=self.layout.block_tokens,
            head_dim=self.layout.head_dim,
            group=self._group if self.rung in BITS else 0,
            exact_tokens=first if lossy else self.layout.block_tokens,
            start_position=start_position,
            max_abs_error=max_abs_error,
            rms_error=rms_error,
            packed=packed,
            section_bytes=section_bytes,
            model_digest=self._model_digest,
            layout_fingerprint=self._fingerprint,
            widths=self._widths,
            step=self._step if self.rung is Rung.KLT else 0,
            calibration=self._klt.tables.digest if self._klt is not None and self.rung is Rung.KLT else b"",
        )

    def _klt_block(self, header: BlockHeader, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The tokens after the exact ones, in the dtype as it travels."""
        klt = self._klt_of(header)
        parts = klt.read((keys.data, values.data), tokens=header.block_tokens - header.exact_tokens, step=header.step)
        return narrow(klt.block(parts, start_position=header.start_position + header.exact_tokens, step=header.step), header.dtype)

    def _klt_of(self, header: BlockHeader) -> KltTransform:
        if self._klt is None or self._klt.tables.digest != header.calibration:
            there = "none" if self._klt is None else self._klt.tables.digest.hex()[:12]
            raise UnsupportedFormat(f"the payload needs calibration {header.calibration.hex()[:12]}, this reader has {there}")
        return self._klt

    def _encode_klt(self, block: np.ndarray, header: BlockHeader, *, canonical: bool) -> tuple[list[np.ndarray], float, float]:
        """(sections after the exact one, largest error, sum of squared errors) of the tokens after the exact ones."""
        assert self._klt is not None
        tokens = header.exact_tokens
        wide = widen(block[..., tokens:, :], header.dtype)
        where = {"start_position": header.start_position + tokens, "step": header.step}
        coefficients = self._klt.coefficients(wide, **where)
        sections = [np.frombuffer(data, np.uint8) for data in (*self._klt.write(coefficients, step=header.step), b"")]
        decoded = narrow(self._klt.block(self._klt.parts(coefficients), **where), header.dtype)
        error = widen(decoded, header.dtype) - wide
        if not np.isfinite(error).all():
            raise CodecFailure(f"rung {self.rung}: the block would not be finite when decoded", reason="out_of_range")
        if canonical:
            block[..., tokens:, :] = decoded.view(block.dtype)
        return sections, float(np.abs(error).max()), float(np.square(error, dtype=np.float64).sum())

    def _encode(self, block: np.ndarray, start_position: int, room: np.ndarray, *, canonical: bool) -> int:
        header = self.header_of(start_position)
        tokens = header.exact_tokens
        exact = block.reshape(-1) if tokens == header.block_tokens else np.ascontiguousarray(block[..., :tokens, :]).reshape(-1)
        sections = [exact.view(np.uint8), *places(room, header)[1:]]
        largest = squares = 0.0
        if tokens < header.block_tokens:
            half, single = self._views(block)
            self._check_range(half, single)
            if self.rung in BITS:
                widths = np.array(header.widths, np.uint8)
                _, keys, values, side = sections
                largest, squares = kernels.quantize(
                    half, single, self._kind, self._tile_shape, tokens, header.group, widths, canonical, side, keys, values
                )
            elif self.rung is Rung.FP8:
                _, keys, values, side = sections
                exponents = side.view(np.int8).reshape(2, -1)
                largest, squares = fp8.encode(half, single, self._kind, self._tile_shape, tokens, canonical, exponents, keys, values)
            else:
                sections[1:], largest, squares = self._encode_klt(block, header, canonical=canonical)
        return self._written(room, header, sections, largest, squares)

    def _written(self, room: np.ndarray, header: BlockHeader, sections: Sections, largest: float, squares: float) -> int:
        """Puts sections (perhaps there already: `places`) and their header into `room`; the payload's length."""
        packed, lengths = write_sections(room, header, sections, packable=self._packable)
        header = replace(
            header,
            max_abs_error=float(largest),
            rms_error=math.sqrt(squares / self.layout.block_elements),
            packed=packed,
            section_bytes=lengths,
        )
        end = header.header_bytes + sum(lengths)
        written = write_header(header, room[header.header_bytes : end].data)
        room[: len(written)] = np.frombuffer(written, np.uint8)
        return end

    def _views(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = block.reshape(-1)
        return (_NO_HALF, flat) if self._kind == kernels.FLOAT32 else (flat.view(np.uint16), _NO_SINGLE)

    def _check_range(self, half: np.ndarray, single: np.ndarray) -> None:
        if self._kind == kernels.FLOAT32:
            largest = np.uint32(kernels.largest_bits_of_single(single.view(np.uint32))).view(np.float32)
        else:
            bits = int(kernels.largest_bits_of_half(half))
            largest = np.uint16(bits).view(np.float16) if self._kind == kernels.FLOAT16 else np.uint32(bits << 16).view(np.float32)
        if not np.isfinite(largest):
            raise CodecFailure(f"rung {self.rung} takes finite numbers, the block holds NaN or Inf", reason="not_finite")
        if largest > MAX_MAGNITUDE:
            raise CodecFailure(f"rung {self.rung} takes magnitudes up to {MAX_MAGNITUDE}, the block holds {largest}", reason="out_of_range")

    def _checked(self, block: np.ndarray) -> np.ndarray:
        block = np.asarray(block)
        if block.shape != self._shape:
            raise CodecFailure(f"a block of this layout has the shape {self._shape}, not {block.shape}", reason="wrong_shape")
        if block.dtype != self._dtype and not (self.layout.dtype == "bfloat16" and block.dtype == np.int16):
            raise CodecFailure(f"a block of {self.layout.dtype} travels as numpy {self._dtype}, not {block.dtype}", reason="wrong_dtype")
        return block

    def _checked_in_place(self, block: np.ndarray) -> np.ndarray:
        block = self._checked(block)
        if not block.flags.carray:
            raise CodecFailure("a block written in place must be C-contiguous, aligned and writable", reason="not_in_place")
        return block

    def _check_identity(self, header: BlockHeader, start_position: int | None) -> None:
        if header.layout_fingerprint != self._fingerprint or header.shape != self._shape or header.dtype != self.layout.dtype:
            raise UnsupportedFormat(
                f"the payload holds {header.shape} {header.dtype} of layout {header.layout_fingerprint.hex()[:12]}, "
                f"this reader {self._shape} {self.layout.dtype} of {self._fingerprint.hex()[:12]}"
            )
        if header.model_digest != self._model_digest:
            raise UnsupportedFormat(f"the payload is of model {header.model_digest.hex()[:12]}, not {self._model_digest.hex()[:12]}")
        if start_position is not None and header.start_position != start_position:
            raise CorruptPayload(f"the payload starts at token {header.start_position}, not at {start_position}")
