"""Stepping payloads of any layout and model down, by what their headers say: for a store node, which knows neither."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.codec.block_codec import BlockCodec
from kvstore.codec.block_format import BlockHeader, Rung, read_header
from kvstore.codec.klt_tables import KltTables
from kvstore.codec.precision import DEFAULT_STEP
from kvstore.codec.rung_code import rung_of
from kvstore.core.layout import Layout
from kvstore.errors import CodecFailure
from kvstore.ids import RungCode

_MOST_CODECS = 16
"""Of different layouts, models and targets, kept ready."""


class PayloadSteps:
    """Belongs to one thread. The same payload and target give the same bytes on every machine."""

    def __init__(self, tables: KltTables | None = None) -> None:
        """`tables`: without them, or with others than the payload's, rung klt is not stepped down."""
        self._tables = tables
        self._codecs: OrderedDict[tuple[object, ...], BlockCodec] = OrderedDict()

    def step_down(self, payload: bytes | memoryview, target: RungCode) -> bytes:
        """The payload at that rung, smaller than it is now. Raises CodecFailure with a reason: no_step_down (from its rung to that one),
        no_tables, no_gain, not_here (a block that this node's codec does not take); CorruptPayload, UnsupportedFormat as `decode_into`.

        Cost: a decode of both and more (BlockCodec.step_down).
        """
        header = read_header(payload)
        rung, step = rung_of(target)
        if header.rung not in (Rung.INT8, Rung.INT6, Rung.INT5) if rung is not Rung.KLT else header.rung is not Rung.KLT:
            raise CodecFailure(f"there is no step down from {header.rung} to {rung}", reason="no_step_down")
        if rung is Rung.KLT and (self._tables is None or self._tables.digest != header.calibration):
            raise CodecFailure(f"this node has not got the tables {header.calibration.hex()[:12]}", reason="no_tables")
        stepped = self._codec(header, rung, step).step_down(payload)
        if len(stepped) >= len(payload):
            raise CodecFailure(f"{len(payload)} bytes would become {len(stepped)}", reason="no_gain")
        return stepped

    def _codec(self, header: BlockHeader, rung: Rung, step: int) -> BlockCodec:
        key = (header.layout_fingerprint, header.model_digest, header.shape, header.dtype, rung, step)
        codec = self._codecs.pop(key, None) or _codec_for(header, rung, step, self._tables)
        self._codecs[key] = codec
        if len(self._codecs) > _MOST_CODECS:
            self._codecs.popitem(last=False)
        return codec


def _codec_for(header: BlockHeader, rung: Rung, step: int, tables: KltTables | None) -> BlockCodec:
    """Its layout is that of one shard, as the header says; the position encoding is not needed, for klt has its own in the tables."""
    layout = Layout(
        layers=header.layers,
        kv_heads=header.kv_heads,
        head_dim=header.head_dim,
        dtype=header.dtype,  # type: ignore[arg-type]  # read_header took nothing else
        block_tokens=header.block_tokens,
    )
    return BlockCodec(
        layout,
        model_digest=header.model_digest,
        rung=rung,
        calibration=tables if rung is Rung.KLT else None,
        step=step or DEFAULT_STEP,
        fingerprint=header.layout_fingerprint,
    )
