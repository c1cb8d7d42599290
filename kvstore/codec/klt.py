"""The klt rung: blocks to quantized coefficients of a calibrated transform and back, the same integers on every machine.

Keys are un-rotated by their positions, then K and V of a group of layers are one vector each. Errors count by a metric (keys: by the
queries that read them, values: by their output projection). In it the basis is orthonormal, so one step for all coefficients is
reverse water-filling: the entropy coder spends bits where the variance is, and no bit allocation is needed.

How a matrix product gives the same bits everywhere: its factors are integers, and every sum of products is exact (klt_products.py); then
neither the order of the sums nor the number of threads can matter. Decoding multiplies coefficients by 12-bit basis
entries, encoding 26-bit dual coordinates by the same basis. What surrounds the products is elementwise float32 in a stated order
(klt_reference.py).

    u = rint(dual(x - mean) * 2**DUAL_BITS)        dual: klt_rotation.py
    y = u @ basis.T                                  the coefficients at step 1, times 2**DUAL_BITS
    q = sign(y) * floor(|y| / (step * 2**DUAL_BITS) + ROUNDING)
    x = (q @ basis) * (scale * step) + mean
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvstore.codec import klt_kernels, klt_rotation
from kvstore.codec.klt_products import Factor, WideFactor, factor, product, wide_factor, wide_product
from kvstore.codec.klt_tables import KltTables
from kvstore.errors import CodecFailure, CorruptPayload

ROUNDING = 0.40
"""Below one half: a deadzone. With it the mean of what becomes q lies close to q, so decoding needs no offset. A writer's choice."""

WEAKEST = 0.40
"""Components whose mean magnitude is below this many steps are not coded: the bits they cost buy more elsewhere (LOG.md), and what is
not coded need not be multiplied. A writer's choice."""

_USED = np.dtype("<u2")


Parts = tuple[list[np.ndarray], list[np.ndarray]]
"""Of K and of V: for each part int16 [used components, tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class _Section:
    """What one kind (K or V) of a block needs, made from the tables once."""

    parts: np.ndarray
    """int64 [groups + 1]: first row of each part."""
    magnitudes: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    frequencies: np.ndarray
    shifts: np.ndarray
    entries: np.ndarray
    bases: tuple[Factor, ...]
    """[components, width] of each group."""
    columns: tuple[int, ...]
    """First dimension of each group, and the end."""

    def live(self, part: int, step: int) -> int:
        """How many components of a part are worth coding at `step`: strongest first, so the others are the last."""
        magnitudes = self.magnitudes[self.parts[part] : self.parts[part + 1]]
        return int(np.searchsorted(-magnitudes, -WEAKEST * step, side="right"))

    def means(self, step: int) -> np.ndarray:
        """float32 [rows]: the mean magnitude at `step`."""
        return np.maximum(self.magnitudes / np.float32(step), np.float32(klt_kernels.LEAST_MEAN))


class KltTransform:
    """Coefficients and bytes of the blocks that `tables` were made for. Safe to share between threads."""

    def __init__(self, tables: KltTables) -> None:
        self.tables = tables
        self._sections = (_section(tables, 0), _section(tables, 1))
        self._duals: tuple[tuple[WideFactor, ...], ...] | None = None
        self._lock = threading.Lock()

    def coefficients(self, block: np.ndarray, *, start_position: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """int16 [components, tokens] of K and of V, of a finite float32 block [layers, 2, heads, tokens, head_dim].

        Raises CodecFailure (out_of_range) for numbers so large that a coefficient would not fit.
        """
        duals = klt_rotation.duals(block, self.tables, start_position=start_position)
        if np.abs(duals).max() > klt_rotation.MAX_DUAL:
            raise CodecFailure("rung klt takes numbers like those it was calibrated with; these are too large", reason="out_of_range")
        kinds = []
        for kind, (section, bases) in enumerate(zip(self._sections, self._dual_bases(), strict=True)):
            rows = []
            for group, basis in enumerate(bases):
                part = duals[kind, :, section.columns[group] : section.columns[group + 1]].astype(np.int64)
                live = section.live(group, step)
                rows.append(_quantized(wide_product(part, basis, width=live).T, step))
                rows.append(np.zeros((int(section.parts[group + 1] - section.parts[group]) - live, len(part)), np.int16))
            kinds.append(np.concatenate(rows))
        return kinds[0], kinds[1]

    def write(self, coefficients: tuple[np.ndarray, np.ndarray], *, step: int) -> tuple[bytes, bytes]:
        """The sections K and V of a payload. Deterministic. Section: rows used of each part (u16), then the words of the stream."""
        first, second = (self._write(section, rows, step) for section, rows in zip(self._sections, coefficients, strict=True))
        return first, second

    def read(self, sections: tuple[memoryview, memoryview], *, tokens: int, step: int) -> Parts:
        """For K and V: int16 [used components, tokens], one array a part. Raises CorruptPayload otherwise."""
        first, second = (self._read(section, data, tokens, step) for section, data in zip(self._sections, sections, strict=True))
        return first, second

    def parts(self, coefficients: tuple[np.ndarray, np.ndarray]) -> Parts:
        """What `read` would give for these coefficients once written."""
        first, second = (
            [rows[start:stop][: _used_rows(rows[start:stop])] for start, stop in pairwise(section.parts)]
            for section, rows in zip(self._sections, coefficients, strict=True)
        )
        return first, second

    def block(self, parts: Parts, *, start_position: int, step: int) -> np.ndarray:
        """The float32 block [layers, 2, heads, tokens, head_dim] of the coefficients that `read` gives."""
        tokens = parts[0][0].shape[1]
        products = np.empty((2, tokens, self.tables.dimensions), np.float32)
        for kind, (section, arrays) in enumerate(zip(self._sections, parts, strict=True)):
            for group, rows in enumerate(arrays):
                products[kind, :, section.columns[group] : section.columns[group + 1]] = product(rows, section.bases[group])
        return klt_rotation.from_products(products, self.tables, start_position=start_position, step=step)

    def stepped_down(self, parts: Parts, *, step: int, factor: int) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients at `step` * `factor` from those that `read` gave at `step`; what was already rounded to 0 stays 0."""
        kinds = []
        for section, arrays in zip(self._sections, parts, strict=True):
            rows = np.zeros((int(section.parts[-1]), arrays[0].shape[1]), np.int16)
            for part, fine in enumerate(arrays):
                live = min(section.live(part, step * factor), len(fine))
                magnitude = np.floor(np.abs(fine[:live].astype(np.float64)) / factor + ROUNDING)
                rows[section.parts[part] : section.parts[part] + live] = np.copysign(magnitude, fine[:live])
            kinds.append(rows)
        return kinds[0], kinds[1]

    def count_symbols(self, block: np.ndarray, histograms: list[np.ndarray], *, start_position: int, step: int) -> None:
        """Adds the magnitudes of a block, by class, to those of K and of V: what `klt_fit.fitted_frequencies` takes."""
        coefficients = self.coefficients(block, start_position=start_position, step=step)
        for section, rows, histogram in zip(self._sections, coefficients, histograms, strict=True):
            klt_kernels.classify(rows, section.parts, np.diff(section.parts), section.means(step), section.weights, histogram)

    def _write(self, section: _Section, rows: np.ndarray, step: int) -> bytes:
        bounds = section.parts
        used = np.array([_used_rows(rows[first:stop]) for first, stop in pairwise(bounds)], np.int64)
        words = np.empty(rows.size * 4 + 64, np.uint16)
        start = klt_kernels.write_stream(
            rows, bounds, used, section.means(step), section.weights, section.starts, section.frequencies, section.shifts, words
        )
        assert start >= 0, "eight bytes hold any coefficient"
        return used.astype(_USED).tobytes() + words[start:].astype("<u2", copy=False).tobytes()

    def _read(self, section: _Section, data: memoryview, tokens: int, step: int) -> list[np.ndarray]:
        groups = len(section.bases)
        if len(data) < 2 * groups or len(data) % 2:
            raise CorruptPayload(f"a section of klt coefficients cannot have {len(data)} bytes")
        words = np.frombuffer(data, "<u2")
        used = words[:groups].astype(np.int64)
        if (used > np.diff(section.parts)).any():
            raise CorruptPayload("a section of klt coefficients uses more components than there are")
        first = np.concatenate([[0], np.cumsum(used)])
        rows = np.empty((int(first[-1]), tokens), np.int16)
        means = section.means(step)
        kept = np.concatenate([means[start : start + count] for start, count in zip(section.parts, used, strict=False)])
        fine = klt_kernels.read_stream(
            words[groups:].astype(np.uint16, copy=False),
            first,
            used,
            kept,
            section.weights,
            section.entries,
            section.shifts,
            rows,
        )
        if not fine:
            raise CorruptPayload("a section of klt coefficients is no whole stream")
        return [rows[start:stop] for start, stop in pairwise(first)]

    def _dual_bases(self) -> tuple[tuple[WideFactor, ...], ...]:
        """The bases transposed; only who encodes needs them."""
        with self._lock:
            if self._duals is None:
                self._duals = tuple(
                    tuple(wide_factor(np.ascontiguousarray(basis.entries.T)) for basis in section.bases) for section in self._sections
                )
            return self._duals


def _section(tables: KltTables, kind: int) -> _Section:
    bases = tables.bases[kind]
    rows = [len(basis) for basis in bases]
    before = sum(len(basis) for basis in tables.bases[0]) if kind else 0
    frequencies = np.ascontiguousarray(tables.frequencies[kind], np.int64)
    starts = np.cumsum(frequencies, axis=1) - frequencies
    shifts = np.array(tables.shifts[kind], np.int64)
    widths = [basis.shape[1] for basis in bases]
    return _Section(
        parts=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        magnitudes=np.array(tables.magnitudes[before : before + sum(rows)]),
        weights=(tables.weights[kind] / 256).astype(np.float32),
        starts=starts,
        frequencies=frequencies,
        shifts=shifts,
        entries=np.stack([_entries(*rows_of) for rows_of in zip(starts, frequencies, shifts, strict=True)]),
        bases=tuple(factor(basis) for basis in bases),
        columns=tuple(int(end) for end in np.concatenate([[0], np.cumsum(widths)])),
    )


def _quantized(wide: np.ndarray, step: int) -> np.ndarray:
    magnitude = np.floor(np.abs(wide) / float(step << klt_rotation.DUAL_BITS) + ROUNDING)
    if magnitude.max(initial=0.0) > klt_kernels.MAX_MAGNITUDE:
        raise CodecFailure("rung klt takes numbers like those it was calibrated with; these are too large", reason="out_of_range")
    signed: np.ndarray = np.copysign(magnitude, wide)
    return signed.astype(np.int16)


def _used_rows(rows: np.ndarray) -> int:
    """Rows up to the last one that is not all zero."""
    live = np.flatnonzero(rows.any(axis=1))
    return int(live[-1]) + 1 if live.size else 0


def _entries(starts: np.ndarray, frequencies: np.ndarray, shift: int) -> np.ndarray:
    """uint32 [TOTAL]: one class's table as klt_kernels.read_stream takes it."""
    symbols = np.repeat(np.arange(klt_kernels.SYMBOLS), frequencies)
    offsets = np.arange(klt_kernels.TOTAL) - starts[symbols]
    rare = (symbols == klt_kernels.ESCAPE) | (shift > 0)
    entries: np.ndarray = symbols << 24 | offsets << 12 | (frequencies[symbols] - 1) | rare * klt_kernels.RARE_ENTRY
    return entries.astype(np.uint32)
