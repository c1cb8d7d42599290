"""From moments of calibration KV to KltTables. numpy only; whoever runs the model brings the moments."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from kvstore.codec import klt_kernels
from kvstore.codec.klt_rotation import unrotated
from kvstore.codec.klt_tables import BASIS_LIMIT, KltTables

DEFAULT_WEIGHTS = (24, 232)
"""Of one and of a token's gain in what is expected of a component (klt_kernels.py), 1/256 each."""

_WORTH_A_SLOT = 0.25
"""Symbols that fewer slots than this would hold are left to the escape."""


class Moments:
    """Mean and covariance of K (un-rotated) and V in groups of layers, gathered window by window."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, group_layers: int, inverse_frequencies: np.ndarray) -> None:
        self.layers, self.kv_heads, self.head_dim, self.group_layers = layers, kv_heads, head_dim, group_layers
        self.inverse_frequencies = inverse_frequencies
        widths = [min(group_layers, layers - first) * kv_heads * head_dim for first in range(0, layers, group_layers)]
        self.columns = np.concatenate([[0], np.cumsum(widths)])
        self.tokens = 0
        self._sums = np.zeros((2, self.columns[-1]))
        self._origin: np.ndarray | None = None
        self._squares = [[np.zeros((width, width), np.float32) for width in widths] for _ in range(2)]

    def add(self, kv: np.ndarray, *, start_position: int) -> None:
        """KV float32 [layers, 2, heads, tokens, head_dim] of one stretch of text, K after RoPE.

        Cost: 4 * tokens * dimensions * width of a group operations.
        """
        vectors = self.vectors(kv, start_position=start_position)
        if self._origin is None:
            self._origin = vectors.mean(axis=1, keepdims=True)
        vectors -= self._origin
        self.tokens += vectors.shape[1]
        self._sums += vectors.sum(axis=1, dtype=np.float64)
        for kind in range(2):
            for squares, first, stop in zip(self._squares[kind], self.columns, self.columns[1:], strict=False):
                squares += vectors[kind, :, first:stop].T @ vectors[kind, :, first:stop]

    def vectors(self, kv: np.ndarray, *, start_position: int) -> np.ndarray:
        """float32 [2, tokens, dimensions]: layer by layer, head by head, keys un-rotated."""
        keys = unrotated(kv[:, 0], self.inverse_frequencies, start_position=start_position)
        return np.stack([part.transpose(2, 0, 1, 3).reshape(kv.shape[3], -1) for part in (keys, kv[:, 1])])

    @property
    def means(self) -> np.ndarray:
        assert self._origin is not None
        return (self._origin[:, 0] + self._sums / self.tokens).astype(np.float32)

    def covariance(self, kind: int, group: int) -> np.ndarray:
        first, stop = self.columns[group], self.columns[group + 1]
        shift = self._sums[kind, first:stop] / self.tokens
        return self._squares[kind][group].astype(np.float64) / self.tokens - np.outer(shift, shift)


def fit_bases(
    moments: Moments,
    *,
    key_metric: np.ndarray,
    value_metric: np.ndarray,
    base_step: float,
    keep_above: float,
    model_digest: bytes,
) -> KltTables:
    """Tables without entropy statistics: `with_statistics` adds them.

    key_metric [dimensions] and value_metric [planes, head_dim, head_dim] (symmetric, positive) say what squared errors cost. `base_step` is
    step 1 in units of the square root of that cost; components with a standard deviation below `keep_above` * base_step are dropped.

    Cost: one eigendecomposition a kind and group.
    """
    scales = np.empty((2, moments.columns[-1]), np.float32)
    all_bases: list[tuple[np.ndarray, ...]] = []
    magnitudes: list[np.ndarray] = []
    for kind in range(2):
        bases = []
        for group in range(len(moments.columns) - 1):
            first, stop = int(moments.columns[group]), int(moments.columns[group + 1])
            forward, inverse = _roots(kind, first, stop, key_metric, value_metric, moments.head_dim)
            weighted = _sandwich(moments.covariance(kind, group), forward)
            variances, vectors = np.linalg.eigh(weighted.astype(np.float32))
            kept = np.flatnonzero(variances > (keep_above * base_step) ** 2)[::-1]
            if not kept.size:
                kept = np.array([len(variances) - 1])
            deviations = np.sqrt(np.maximum(variances[kept], 0)) / base_step
            decoder = _times(vectors[:, kept].T.astype(np.float64) * base_step, inverse)
            scale = np.maximum(np.abs(decoder).max(axis=0) / BASIS_LIMIT, 1e-30).astype(np.float32)
            scales[kind, first:stop] = scale
            bases.append(np.clip(np.rint(decoder / scale), -BASIS_LIMIT, BASIS_LIMIT).astype(np.int16))
            magnitudes.append(deviations * math.sqrt(2 / math.pi))
        all_bases.append(tuple(bases))
    planes = moments.layers * moments.kv_heads
    value_scales = scales[1].reshape(planes, 1, moments.head_dim).astype(np.float64)
    frequencies, shifts = default_statistics()
    return KltTables(
        model_digest=model_digest,
        layers=moments.layers,
        kv_heads=moments.kv_heads,
        head_dim=moments.head_dim,
        group_layers=moments.group_layers,
        inverse_frequencies=moments.inverse_frequencies,
        means=moments.means,
        scales=scales,
        key_metric=(key_metric * scales[0].astype(np.float64) / base_step**2).astype(np.float32),
        value_metric=(value_metric * value_scales / base_step**2).astype(np.float32),
        bases=(all_bases[0], all_bases[1]),
        magnitudes=np.concatenate(magnitudes).astype(np.float32),
        weights=np.array([DEFAULT_WEIGHTS] * 2, np.int64),
        frequencies=frequencies,
        shifts=shifts,
    )


def default_statistics() -> tuple[np.ndarray, np.ndarray]:
    """(frequencies, shifts) [2, CLASSES, ...] of geometric magnitudes with the mean that each class stands for."""
    shifts = np.maximum(np.arange(klt_kernels.CLASSES) // 4 - 5 - 1, 0)
    histograms = np.zeros((klt_kernels.CLASSES, klt_kernels.MAX_MAGNITUDE + 1))
    sizes = np.arange(histograms.shape[1])
    for index in range(klt_kernels.CLASSES):
        mean = 2.0 ** ((index + 0.5) / 4 - 5)
        histograms[index] = (mean / (1 + mean)) ** sizes / (1 + mean)
    one = _frequencies(histograms, shifts)
    return np.stack([one, one]), np.stack([shifts, shifts])


def fitted_frequencies(histograms: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(frequencies, shifts) for K and V from counts [CLASSES, magnitudes] of `klt_kernels.classify`; thin classes lean on the default."""
    defaults, shifts = default_statistics()
    fitted = []
    for kind, histogram in enumerate(histograms):
        counts = _symbol_counts(histogram, shifts[kind])
        fitted.append(_integers(counts + defaults[kind] * (64.0 / klt_kernels.TOTAL)))
    return np.stack(fitted), shifts


def _frequencies(histograms: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    return _integers(_symbol_counts(histograms, shifts))


def _symbol_counts(histograms: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Both signs of a size count as seen equally often."""
    counts = np.zeros((klt_kernels.CLASSES, klt_kernels.SYMBOLS))
    sizes = np.arange(histograms.shape[1])
    for index in range(klt_kernels.CLASSES):
        high = np.minimum(sizes >> int(shifts[index]), klt_kernels.LARGEST + 1)
        by_size = np.bincount(high, histograms[index], klt_kernels.LARGEST + 2)
        counts[index, 0], counts[index, klt_kernels.ESCAPE] = by_size[0], by_size[-1]
        counts[index, 1 : klt_kernels.ESCAPE] = by_size[1:-1].repeat(2) / 2
    return counts


def _integers(counts: np.ndarray) -> np.ndarray:
    """Rows of integers that sum to TOTAL, close to the proportions of `counts`, positive where they are not 0; the escape always is."""
    total = klt_kernels.TOTAL
    shares = counts / counts.sum(axis=1, keepdims=True) * total
    rare = shares < _WORTH_A_SLOT
    rare[:, klt_kernels.ESCAPE] = False
    shares[:, klt_kernels.ESCAPE] += np.where(rare, shares, 0).sum(axis=1)
    shares[rare] = 0
    whole: np.ndarray = np.where(rare, 0, np.maximum(np.floor(shares), 1)).astype(np.int64)
    for row, share in zip(whole, shares, strict=True):
        missing = total - int(row.sum())
        if missing > 0:
            row[np.argsort(-(share - row), kind="stable")[:missing]] += 1
        elif missing:
            row[np.argmax(row)] += missing
    return whole


def _roots(
    kind: int, first: int, stop: int, key_metric: np.ndarray, value_metric: np.ndarray, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Square root of the metric and its inverse: a diagonal for keys, symmetric blocks [planes, head_dim, head_dim] for values."""
    if kind == 0:
        root = np.sqrt(key_metric[first:stop])
        return root, 1 / root
    values, vectors = np.linalg.eigh(value_metric[first // head_dim : stop // head_dim])
    root = np.sqrt(values)[:, None, :]
    return (vectors * root) @ vectors.transpose(0, 2, 1), (vectors / root) @ vectors.transpose(0, 2, 1)


def _times(rows: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """rows [n, width] times a diagonal, or times symmetric blocks along the width."""
    if factor.ndim == 1:
        scaled: np.ndarray = rows * factor
        return scaled
    blocks = rows.reshape(len(rows), len(factor), -1)
    product: np.ndarray = np.einsum("nbi,bij->nbj", blocks, factor, optimize=True)
    return product.reshape(rows.shape)


def _sandwich(matrix: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return _times(_times(matrix, factor).T, factor)
