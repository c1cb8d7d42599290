"""KltTables: what the klt rung knows about a model from calibration, as one content-addressed file.

    magic "LKLT", version u16, u16 0, header bytes u32
    header   JSON: kind of KV, grouping, and the arrays in order with dtype and shape
    arrays   little-endian, C order, one after the other
    digest   SHA-256 over all of the above: the address of the tables, which every payload of the rung carries

Everything that arithmetic needs is in the file as integers or float32, so that each machine computes with the same numbers.
A version is refused that is not known here; a file that is not what was written is refused as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.codec.klt_kernels import CLASSES, ESCAPE, MAX_MEAN, SYMBOLS, TOTAL, WEIGHTS
from kvstore.core.layout import Layout
from kvstore.errors import ConfigError

MAGIC = b"LKLT"
VERSION = 2
MAX_BYTES = 1 << 30
BASIS_LIMIT = 2047
"""Largest magnitude of a basis entry: 12 bits with the sign."""

_PREFIX = struct.Struct("<4sHHI")
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KltTables:
    """Tables for blocks of `layers` x `kv_heads` x `head_dim`, in groups of `group_layers` layers; kind 0 is K, kind 1 is V.

    A part is one kind of one group: its vectors have group_layers * kv_heads * head_dim dimensions, layer by layer, head by head.
    """

    model_digest: bytes
    layers: int
    kv_heads: int
    head_dim: int
    group_layers: int
    inverse_frequencies: np.ndarray
    """float64 [head_dim / 2]: radians a token of each pair (i, i + head_dim / 2) of a key."""
    means: np.ndarray
    """float32 [2, dimensions]: of un-rotated keys, and of values."""
    scales: np.ndarray
    """float32 [2, dimensions]: what a basis entry of 1 is worth, for a coefficient of 1 at step 1."""
    key_metric: np.ndarray
    """float32 [dimensions]: dual coordinates of a centred key are its elements times these."""
    value_metric: np.ndarray
    """float32 [layers * kv_heads, head_dim, head_dim]: likewise for values, v @ metric of its head."""
    bases: tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]
    """For each kind and group int16 [components, dimensions of a part], strongest component first, within BASIS_LIMIT."""
    magnitudes: np.ndarray
    """float32 [components of all parts]: mean |coefficient| at step 1; K before V, group by group."""
    weights: np.ndarray
    """int64 [2, WEIGHTS], for each kind: what `klt_kernels` expects a magnitude from."""
    frequencies: np.ndarray
    """int64 [2, CLASSES, SYMBOLS]: each row sums to TOTAL; symbols of 0 are written as the escape, which has some."""
    shifts: np.ndarray
    """int64 [2, CLASSES]: low bits stored raw."""
    digest: bytes = b""
    """SHA-256 of the file; empty until written."""

    @property
    def groups(self) -> int:
        return math.ceil(self.layers / self.group_layers)

    @property
    def dimensions(self) -> int:
        return self.layers * self.kv_heads * self.head_dim

    def fits(self, layout: Layout, model_digest: bytes) -> bool:
        """Whether blocks of this layout and model are what these tables were made for."""
        shape = (layout.layers, layout.kv_heads, layout.head_dim, layout.tensor_parallel)
        return shape == (self.layers, self.kv_heads, self.head_dim, 1) and model_digest == self.model_digest


def save_tables(tables: KltTables, path: Path) -> bytes:
    """Write the file, whole or not at all; returns its digest."""
    body = _to_bytes(tables)
    digest = hashlib.sha256(body).digest()
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body + digest)
        Path(scratch).chmod(0o644)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return digest


def load_tables(path: Path) -> KltTables:
    """Raises ConfigError, in one line, for a file that is missing, of another version, cut short or changed."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"calibration: {path} has more than {MAX_BYTES} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"calibration: cannot read {path}: {error.strerror}") from None
    return tables_from_bytes(raw, name=str(path))


def tables_from_bytes(raw: bytes, *, name: str) -> KltTables:
    """The tables in the bytes of a file called `name`. Raises ConfigError as `load_tables`."""
    if len(raw) < _PREFIX.size + _DIGEST_BYTES or raw[:4] != MAGIC:
        raise ConfigError(f"calibration: {name} is no calibration file")
    _, version, _, header_bytes = _PREFIX.unpack_from(raw)
    if version != VERSION:
        raise ConfigError(f"calibration: {name} has version {version}; known: {VERSION}")
    digest = hashlib.sha256(raw[:-_DIGEST_BYTES]).digest()
    if digest != raw[-_DIGEST_BYTES:]:
        raise ConfigError(f"calibration: {name} is not what was written: its digest does not fit")
    header = json.loads(raw[_PREFIX.size : _PREFIX.size + header_bytes])
    arrays = []
    at = _PREFIX.size + header_bytes
    for kind, shape in header["arrays"]:
        dtype = np.dtype(kind)
        count = math.prod(shape)
        arrays.append(np.frombuffer(raw, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    groups = math.ceil(header["layers"] / header["group_layers"])
    named = arrays[: len(_NAMES)]
    bases = arrays[len(_NAMES) :]
    tables = KltTables(
        model_digest=bytes.fromhex(header["model_digest"]),
        layers=header["layers"],
        kv_heads=header["kv_heads"],
        head_dim=header["head_dim"],
        group_layers=header["group_layers"],
        bases=(tuple(bases[:groups]), tuple(bases[groups:])),
        digest=digest,
        **dict(zip(_NAMES, named, strict=True)),
    )
    problem = _problem(tables)
    if problem:
        raise ConfigError(f"calibration: {name} cannot be used: {problem}")
    return tables


_NAMES = ("inverse_frequencies", "means", "scales", "key_metric", "value_metric", "magnitudes", "weights", "frequencies", "shifts")
_KINDS = {"inverse_frequencies": "<f8", "weights": "<i8", "frequencies": "<i8", "shifts": "<i8"}


def _to_bytes(tables: KltTables) -> bytes:
    arrays: list[np.ndarray] = [np.ascontiguousarray(getattr(tables, name), _KINDS.get(name, "<f4")) for name in _NAMES]
    arrays += [np.ascontiguousarray(basis, "<i2") for bases in tables.bases for basis in bases]
    header: dict[str, Any] = {
        "model_digest": tables.model_digest.hex(),
        "layers": tables.layers,
        "kv_heads": tables.kv_heads,
        "head_dim": tables.head_dim,
        "group_layers": tables.group_layers,
        "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
    }
    text = json.dumps(header, sort_keys=True).encode()
    return b"".join([_PREFIX.pack(MAGIC, VERSION, 0, len(text)), text, *(array.tobytes() for array in arrays)])


def _problem(tables: KltTables) -> str | None:
    """Why the arithmetic could go wrong with these tables, in words; None when it cannot."""
    size = tables.dimensions
    rows = sum(len(basis) for bases in tables.bases for basis in bases)
    shapes = {
        "inverse_frequencies": (tables.head_dim // 2,),
        "means": (2, size),
        "scales": (2, size),
        "key_metric": (size,),
        "value_metric": (tables.layers * tables.kv_heads, tables.head_dim, tables.head_dim),
        "magnitudes": (rows,),
        "weights": (2, WEIGHTS),
        "frequencies": (2, CLASSES, SYMBOLS),
        "shifts": (2, CLASSES),
    }
    for name, shape in shapes.items():
        array = getattr(tables, name)
        if array.shape != shape or not np.isfinite(array).all():
            return f"{name} must be finite numbers of the shape {shape}"
    for bases in tables.bases:
        for group, basis in enumerate(bases):
            layers = min(tables.group_layers, tables.layers - group * tables.group_layers)
            width = layers * tables.kv_heads * tables.head_dim
            if basis.ndim != 2 or basis.shape[1] != width or not 0 < len(basis) <= width:
                return f"a basis of group {group} must have {width} columns and as many rows at most"
            if np.abs(basis.astype(np.int32)).max() > BASIS_LIMIT:
                return f"basis entries must stay within {BASIS_LIMIT}"
    if (tables.frequencies < 0).any() or (tables.frequencies[..., ESCAPE] < 1).any() or (tables.frequencies.sum(-1) != TOTAL).any():
        return f"frequencies must not be negative, 1 or more of the escape, and sum to {TOTAL}"
    if (tables.shifts < 0).any() or (tables.shifts > 15).any():
        return "shifts must be 0 to 15"
    if (tables.weights < 0).any() or (tables.weights > 1 << 12).any():
        return "weights must be 0 to 4096"
    if (tables.magnitudes < 0).any() or (tables.magnitudes > MAX_MEAN).any():
        return f"magnitudes must be 0 to {MAX_MEAN}"
    ends = np.cumsum([len(basis) for bases in tables.bases for basis in bases])
    if any((np.diff(part) > 0).any() for part in np.split(tables.magnitudes, ends[:-1])):
        return "the magnitudes of a part must not grow"
    return None
