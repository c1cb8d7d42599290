"""Rung fp8: e4m3 bytes with one power of two for each head's keys, and values, in each layer. What engines hold that compute in fp8.

exponent  the smallest e with max |x| <= MAX_E4M3 * 2**e, within -100..127
code      sign, 4 bits of exponent (bias 7), 3 of mantissa: x / 2**e rounded to nearest, ties to even; S.1111.111 (NaN) never
decoded   narrow(value of code * 2**e): exact in every dtype but for float16's smallest numbers
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from kvstore.codec.kernels import compiled

MAX_E4M3 = 448.0
_MIN_EXPONENT = -100


def encoded(block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(exponents int8 [2, layers * heads], key codes, value codes uint8 [layers * heads, tokens, head_dim]) of a finite float32 block
    [layers, 2, heads, tokens, head_dim]."""
    layers, _, heads, tokens, width = block.shape
    largest = np.abs(block).max(axis=(3, 4)).transpose(1, 0, 2).reshape(2, layers * heads)
    mantissa, exponent = np.frexp(largest)  # largest = mantissa * 2**exponent, mantissa in [.5, 1); 448 is .875 * 2**9
    exponents = np.clip(exponent - 9 + (mantissa > 0.875), _MIN_EXPONENT, 127).astype(np.int8)
    codes = np.empty((2, layers * heads, tokens, width), np.uint8)
    inverse = np.ldexp(np.float32(1), -exponents.astype(np.int32)).astype(np.float32)
    _encode(np.ascontiguousarray(block), inverse, codes)
    return exponents, codes[0], codes[1]


def decoded(exponents: np.ndarray, keys: np.ndarray, values: np.ndarray, *, shape: tuple[int, int, int, int, int]) -> np.ndarray:
    """Inverse of `encoded`, up to the rounding; codes that no writer makes (NaN) decode to numbers."""
    layers, _, heads, tokens, width = shape
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)
    block = np.empty(shape, np.float32)
    for kind, codes in enumerate((keys, values)):
        numbers = VALUES[codes].reshape(layers * heads, tokens, width) * scales[kind][:, None, None]
        block[:, kind] = numbers.reshape(layers, heads, tokens, width)
    return block


def _values() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude: np.ndarray = np.where(exponent, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa.astype(float), -9))
    signed: np.ndarray = np.where(codes & 128, -magnitude, magnitude)
    return signed.astype(np.float32)


VALUES = _values()
"""float32 [256]."""


@compiled
def _encode(block, inverse, codes):
    layers, _, heads, tokens, width = block.shape
    for layer in range(layers):
        for kind in range(2):
            for head in range(heads):
                plane = layer * heads + head
                factor = inverse[kind, plane]
                for t in range(tokens):
                    row = block[layer, kind, head, t]
                    out = codes[kind, plane, t]
                    for d in range(width):
                        bits = np.float32(row[d] * factor).view(np.uint32)
                        sign = np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)
                        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
                        if magnitude < np.uint32(121 << 23):  # below 2**-6: multiples of 2**-9
                            shifted = np.float32(magnitude.view(np.float32) + np.float32(16384.0))  # whose last place is 2**-9
                            code = np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x46800000))
                        else:
                            rounded = np.uint32(magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1)))
                            code = np.uint32(rounded >> np.uint32(20)) - np.uint32((127 - 7) << 3)
                        out[d] = np.uint8(sign | min(np.uint32(code), np.uint32(0x7E)))
