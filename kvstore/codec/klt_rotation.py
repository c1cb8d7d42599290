"""What surrounds the klt rung's matrix products: un-rotating keys, centring, dual coordinates, and all of it backwards.

Elementwise float32 operations of IEEE 754 in the order written here (no fastmath, no contraction): the same bits on every machine.
Sine and cosine come from polynomials for that reason, not from the C library.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from kvstore.codec.klt_tables import KltTables
from kvstore.codec.machine_code import compiled

DUAL_BITS = 19
"""Dual coordinates are rounded to multiples of 2**-19: an error of .005 steps in a coefficient of 2,000 dimensions."""

MAX_DUAL = float(1 << 26)
"""26 bits of a dual coordinate, 11 of a basis entry and 13 of the number of dimensions: every sum is exact in float64."""

_SINE = tuple(sign / factorial for sign, factorial in ((1, 1), (-1, 6), (1, 120), (-1, 5040), (1, 362880), (-1, 39916800), (1, 6227020800)))
_COSINE = tuple(sign / factorial for sign, factorial in ((1, 1), (-1, 2), (1, 24), (-1, 720), (1, 40320), (-1, 3628800), (1, 479001600)))
_QUARTER_HIGH = 1.5707963267341256  # pi / 2 to 33 bits, so that small multiples are exact, and the rest of it
_QUARTER_LOW = 6.077100506506192e-11


def rotations(positions: np.ndarray, inverse_frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cosine, sine), float32 [positions, pairs], of position * frequency; within 1e-7 below position 2**20, and the same everywhere."""
    angles = positions.astype(np.float64)[:, None] * inverse_frequencies[None]
    quarters = np.rint(angles * (2 / np.pi))
    rest = (angles - quarters * _QUARTER_HIGH) - quarters * _QUARTER_LOW
    square = rest * rest
    sine, cosine = np.full_like(rest, _SINE[-1]), np.full_like(rest, _COSINE[-1])
    for factor in _SINE[-2::-1]:
        sine = sine * square + factor
    for factor in _COSINE[-2::-1]:
        cosine = cosine * square + factor
    sine = sine * rest
    turn = quarters.astype(np.int64) & 3
    swapped = (turn & 1) == 1
    cosines = np.where(swapped, sine, cosine) * np.where((turn == 1) | (turn == 2), -1.0, 1.0)
    sines = np.where(swapped, cosine, sine) * np.where(turn >= 2, -1.0, 1.0)
    return cosines.astype(np.float32), sines.astype(np.float32)


def unrotated(keys: np.ndarray, inverse_frequencies: np.ndarray, *, start_position: int) -> np.ndarray:
    """Keys [..., tokens, head_dim] float32 as they were before RoPE, the first token being at `start_position`."""
    cosine, sine = rotations(np.arange(start_position, start_position + keys.shape[-2]), inverse_frequencies)
    half = keys.shape[-1] // 2
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate([first * cosine + second * sine, second * cosine - first * sine], axis=-1)


def duals(block: np.ndarray, tables: KltTables, *, start_position: int) -> np.ndarray:
    """float64 [2, tokens, dimensions] of integers: dual coordinates of a float32 block [layers, 2, heads, tokens, head_dim]."""
    tokens = block.shape[3]
    cosine, sine = rotations(np.arange(start_position, start_position + tokens), tables.inverse_frequencies)
    out = np.empty((2, tokens, tables.dimensions), np.float64)
    _duals(np.ascontiguousarray(block), cosine, sine, tables.means, tables.key_metric, tables.value_metric, out)
    return out


def from_products(products: np.ndarray, tables: KltTables, *, start_position: int, step: int) -> np.ndarray:
    """float32 block [layers, 2, heads, tokens, head_dim] of products [2, tokens, dimensions]: scaled, moved by the mean, keys rotated."""
    tokens = products.shape[1]
    cosine, sine = rotations(np.arange(start_position, start_position + tokens), tables.inverse_frequencies)
    block = np.empty((tables.layers, 2, tables.kv_heads, tokens, tables.head_dim), np.float32)
    _from_products(products, cosine, sine, tables.means, tables.scales * np.float32(step), block)
    return block


@compiled
def _duals(block, cosine, sine, means, key_metric, value_metric, out):
    layers, _, heads, tokens, width = block.shape
    half = width // 2
    one = np.float32(1 << 19)
    magic = 6755399441055744.0  # 1.5 * 2**52 rounds float64 to integers
    centred = np.empty(width, np.float32)
    sums = np.empty(width, np.float32)
    for layer in range(layers):
        for head in range(heads):
            plane = layer * heads + head
            first = plane * width
            mean = means[0, first : first + width]
            metric = key_metric[first : first + width]
            for t in range(tokens):
                row = block[layer, 0, head, t]
                target = out[0, t, first : first + width]
                for i in range(half):
                    a, b = row[i], row[half + i]
                    centred[i] = (a * cosine[t, i] + b * sine[t, i]) - mean[i]
                    centred[half + i] = (b * cosine[t, i] - a * sine[t, i]) - mean[half + i]
                for i in range(width):
                    target[i] = (np.float64(centred[i] * metric[i] * one) + magic) - magic
            mean = means[1, first : first + width]
            for t in range(tokens):
                row = block[layer, 1, head, t]
                target = out[1, t, first : first + width]
                sums[:] = np.float32(0)
                for j in range(width):
                    x = row[j] - mean[j]
                    weights = value_metric[plane, j]
                    for i in range(width):
                        sums[i] += x * weights[i]
                for i in range(width):
                    target[i] = (np.float64(sums[i] * one) + magic) - magic


@compiled
def _from_products(products, cosine, sine, means, scales, block):
    layers, _, heads, tokens, width = block.shape
    half = width // 2
    wide = np.empty(width, np.float32)
    for layer in range(layers):
        for head in range(heads):
            first = (layer * heads + head) * width
            for kind in range(2):
                mean = means[kind, first : first + width]
                scale = scales[kind, first : first + width]
                for t in range(tokens):
                    row = block[layer, kind, head, t]
                    product = products[kind, t, first : first + width]
                    if kind == 1:
                        for i in range(width):
                            row[i] = product[i] * scale[i] + mean[i]
                    else:
                        for i in range(width):
                            wide[i] = product[i] * scale[i] + mean[i]
                        for i in range(half):
                            row[i] = wide[i] * cosine[t, i] - wide[half + i] * sine[t, i]
                            row[half + i] = wide[half + i] * cosine[t, i] + wide[i] * sine[t, i]
