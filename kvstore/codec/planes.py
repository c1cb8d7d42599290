"""Parts of kernels: a plane of a block (the lossy tokens of one head's keys, or values, in one layer) as float32 and back, and its codes as
bytes and back. `kind` says which view of the block counts: kernels.py.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from kvstore.codec import vectors as v
from kvstore.codec.machine_code import inlined


@inlined
def widened_half(bits):
    """F8 of float16 bit patterns in an I8; exact for every finite value."""
    magnitude = v.multiply(v.float_of(v.shifted_left(v.i_and(bits, v.i_splat(np.int32(0x7FFF))), 13)), v.splat(np.float32(2.0**112)))
    sign = v.shifted_left(v.i_and(bits, v.i_splat(np.int32(0x8000))), 16)
    return v.float_of(v.i_or(v.bits_of(magnitude), sign))


@inlined
def bfloat16_bits(values):
    """I8: the bit patterns nearest to an F8, ties to even."""
    bits = v.bits_of(values)
    odd = v.i_and(v.shifted_right(bits, 16), v.i_splat(np.int32(1)))
    return v.shifted_right(v.i_add(v.i_add(bits, v.i_splat(np.int32(0x7FFF))), odd), 16)


@inlined
def float16_bits(values):
    bits = v.bits_of(values)
    magnitude = v.i_and(bits, v.i_splat(np.int32(0x7FFFFFFF)))
    small = v.below(magnitude, v.i_splat(np.int32(113 << 23)))  # below 2**-14: the sum with 0.5 rounds to a multiple of the smallest step
    fine = v.i_subtract(v.bits_of(v.add(v.float_of(magnitude), v.splat(np.float32(0.5)))), v.i_splat(np.int32(126 << 23)))
    odd = v.i_and(v.shifted_right(magnitude, 13), v.i_splat(np.int32(1)))
    coarse = v.shifted_right(v.i_add(v.i_add(magnitude, v.i_splat(np.int32(0xFFF - (112 << 23)))), odd), 13)
    narrow = v.i_or(v.i_and(fine, small), v.i_and(coarse, v.i_subtract(v.i_splat(np.int32(-1)), small)))
    return v.i_or(narrow, v.shifted_right(v.i_and(bits, v.i_splat(np.int32(-0x80000000))), 16))


@inlined
def narrowed(values, kind):
    """An F8 rounded to what the dtype can hold, ties to even."""
    if kind == 0:
        values = v.float_of(v.shifted_left(bfloat16_bits(values), 16))
    elif kind == 1:
        values = widened_half(float16_bits(values))
    return values


@inlined
def load_plane(half, single, kind, first, width, tile):
    """`tile` [rows * padded width] from the elements of a block from `first` on, widened to float32; zeros beyond each row."""
    if width % 8 == 0:
        if kind == 0:
            for i in range(0, tile.size, 8):
                v.store_f32(tile, i, v.load_bf16(half, first + i))
        elif kind == 1:
            for i in range(0, tile.size, 8):
                v.store_f32(tile, i, widened_half(v.load_u16(half, first + i)))
        else:
            for i in range(0, tile.size, 8):
                v.store_f32(tile, i, v.load_f32(single, first + i))
    else:
        padded = (width + 7) // 8 * 8
        for row in range(tile.size // padded):
            for d in range(width):
                at = first + row * width + d
                bits = np.uint32(0)
                if kind == 0:
                    bits = np.uint32(half[at]) << np.uint32(16)
                elif kind == 1:
                    magnitude = np.uint32((half[at] & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
                    bits = np.float32(magnitude).view(np.uint32) | np.uint32((half[at] & np.uint32(0x8000)) << np.uint32(16))
                else:
                    bits = np.float32(single[at]).view(np.uint32)
                tile[row * padded + d] = np.uint32(bits).view(np.float32)
            for d in range(width, padded):
                tile[row * padded + d] = np.float32(0)


@inlined
def store_plane(tile, half, single, kind, first, width):
    """Inverse of `load_plane`, rounding."""
    if width % 8 == 0:
        if kind == 0:
            for i in range(0, tile.size, 8):
                v.store_u16(half, first + i, bfloat16_bits(v.load_f32(tile, i)))
        elif kind == 1:
            for i in range(0, tile.size, 8):
                v.store_u16(half, first + i, float16_bits(v.load_f32(tile, i)))
        else:
            for i in range(0, tile.size, 8):
                v.store_f32(single, first + i, v.load_f32(tile, i))
    else:
        padded = (width + 7) // 8 * 8
        eight = np.empty(8, np.uint16)
        for row in range(tile.size // padded):
            for d in range(0, padded, 8):
                if kind == 0:
                    v.store_u16(eight, 0, bfloat16_bits(v.load_f32(tile, row * padded + d)))
                elif kind == 1:
                    v.store_u16(eight, 0, float16_bits(v.load_f32(tile, row * padded + d)))
                for i in range(min(8, width - d)):
                    if kind == 2:
                        single[first + row * width + d + i] = tile[row * padded + d + i]
                    else:
                        half[first + row * width + d + i] = eight[i]


@inlined
def pack_plane(codes, bits, out, sixteen):
    """Codes (uint8, zeros beyond the plane) as bytes: reference.pack_plane."""
    if bits == 8:
        for i in range(out.size):
            out[i] = codes[i]
        return
    parts = 2 if bits == 4 else 4 if bits == 6 else 8
    carriers = parts * bits // 8
    size = out.size // carriers
    if bits == 4:
        lower, upper = codes[:size], codes[size : 2 * size]
        for j in range(size):
            out[j] = lower[j] | np.uint8(upper[j] << np.uint8(4))
        return
    mask = v.h_splat(np.int16((1 << (8 - bits)) - 1))
    for j in range(0, size, 16):
        rest = v.h_splat(np.int16(0))
        for part in range(carriers, parts):
            rest = v.h_or(rest, v.h_shifted_left(v.load_u8x16(codes, part * size + j), bits * (part - carriers)))
        for part in range(carriers):
            piece = v.h_shifted_left(v.h_and(v.h_shifted_right(rest, (8 - bits) * part), mask), bits)
            joined = v.h_or(v.load_u8x16(codes, part * size + j), piece)
            if j + 16 <= size:
                v.store_u8x16(out, part * size + j, joined)
            else:
                v.store_u8x16(sixteen, 0, joined)
                for i in range(size - j):
                    out[part * size + j + i] = sixteen[i]


@inlined
def unpack_plane(packed, bits, codes):
    """Inverse of `pack_plane`; `codes` holds the plane and what pads it."""
    parts = 2 if bits == 4 else 4 if bits == 6 else 8
    carriers = parts * bits // 8
    size = packed.size // carriers
    if bits == 4:
        lower, upper = codes[:size], codes[size : 2 * size]
        for j in range(size):
            lower[j] = packed[j] & np.uint8(15)
            upper[j] = packed[j] >> np.uint8(4)
        return
    mask = v.h_splat(np.int16((1 << bits) - 1))
    whole = size // 16 * 16
    for j in range(0, whole, 16):
        rest = v.h_splat(np.int16(0))
        for part in range(carriers):
            row = v.load_u8x16(packed, part * size + j)
            v.store_u8x16(codes, part * size + j, v.h_and(row, mask))
            rest = v.h_or(rest, v.h_shifted_left(v.h_shifted_right(row, bits), (8 - bits) * part))
        for part in range(carriers, parts):
            v.store_u8x16(codes, part * size + j, v.h_and(v.h_shifted_right(rest, bits * (part - carriers)), mask))
    for j in range(whole, size):
        rest = np.int64(0)
        for part in range(carriers):
            row = np.int64(packed[part * size + j])
            codes[part * size + j] = np.uint8(row & ((1 << bits) - 1))
            rest |= (row >> bits) << ((8 - bits) * part)
        for part in range(carriers, parts):
            codes[part * size + j] = np.uint8((rest >> (bits * (part - carriers))) & ((1 << bits) - 1))


@inlined
def packed_bytes(count, bits):
    """block_format.plane_bytes."""
    parts = 1 if bits == 8 else 2 if bits == 4 else 4 if bits == 6 else 8
    return (count + parts - 1) // parts * (parts * bits // 8)
