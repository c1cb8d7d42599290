"""The klt rung's machine code: rANS over quantized coefficients, equal to klt_reference.py, and exact integer products. Without the GIL.

The coefficients of a section stand in rows (components, strongest first) of one column for each token, part after part (a part is
one group of layers). Each is coded as a symbol under a static table: 0, or sign and size of |q| >> shift up to LARGEST, or ESCAPE, which is
also what a table without the symbol takes. Raw bits may follow: after an escape the bit length - 1 of (|q| >> shift) + 1 in 5 bits and
its lower bits; then the low `shift` bits; then the sign where the symbol does not tell it. Table and shift follow from the magnitude
to be expected: the component's mean times a mix of one and the token's gain, which is how the components so far of this token
compare with their means. So the tables of a whole row are known before it is read. These are float32 operations in a stated order.

rANS: eight states of 32 bits, token t uses state t % 8, probabilities of 12 bits, words of 16. The writer works from the last
coefficient to the first; a reader ends with every word read and every state back at its start, or the stream is no stream.

All kernels stay in this one file and vectors.py with what they call, because numba's cache on disk notices changes of the file it
caches and of no other.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from kvstore.codec import vectors as v
from kvstore.codec.machine_code import compiled, inlined

LANES = 8
CLASSES = 64
LARGEST = 15
SYMBOLS = 2 * LARGEST + 2
"""0, then +1, -1, +2, -2 and so on, then the escape."""
ESCAPE = SYMBOLS - 1
PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
LOWEST_STATE = 1 << 16
LEAST_MEAN = 2.0**-8
"""Means below it count as this."""
MAX_MEAN = 1 << 22
MAX_MAGNITUDE = (1 << 15) - 1
WEIGHTS = 2
"""Of one and of the token's gain in what a mean is multiplied by; 1/256 each."""
LARGEST_RATIO = 8.0
GAIN_MEMORY = 2.0**-5
MAX_OPERATIONS = 8
"""Of one coefficient: symbol, escape length, escape bits in two pieces, low bits in two pieces, sign."""
STRIP = 16
"""Columns of a basis that stand together: `strips` of klt.py."""

RARE_ENTRY = 1 << 29

_RAW = 1 << 31
_LONGEST_RAW = 12
_CLASS_BASE = (127 - 5) << 2
"""Classes are quarters of an octave of the expected magnitude, from 2**-5 on."""
_PAIRS_AT_ONCE = 256
"""So many rows of a strip fit the first-level cache beside the coefficients."""


@inlined
def _class_row(mean, first_weight, second_weight, gains, classes):
    """The class of each token's coefficient in a row; arrays are padded to whole vectors."""
    means, one, two = v.splat(mean), v.splat(first_weight), v.splat(second_weight)
    lowest, highest = v.i_splat(np.int32(0)), v.i_splat(np.int32(CLASSES - 1))
    for t in range(0, gains.size, 8):
        expected = v.multiply(means, v.add(one, v.multiply(two, v.load_f32(gains, t))))
        quarter = v.i_subtract(v.shifted_right(v.bits_of(expected), 21), v.i_splat(np.int32(_CLASS_BASE)))
        v.store_i32(classes, t, v.i_smaller(v.i_larger(quarter, lowest), highest))


@inlined
def _next_gains(mean, magnitudes, gains):
    """The gains after one more row: running means, over some 32 components, of magnitude by mean."""
    inverse, most, share = v.splat(np.float32(1) / mean), v.splat(np.float32(LARGEST_RATIO)), v.splat(np.float32(GAIN_MEMORY))
    for t in range(0, gains.size, 8):
        gain = v.load_f32(gains, t)
        ratio = v.smaller(v.multiply(v.load_f32(magnitudes, t), inverse), most)
        v.store_f32(gains, t, v.add(gain, v.multiply(v.subtract(ratio, gain), share)))


@compiled
def write_stream(coefficients, parts, used, means, weights, starts, frequencies, shifts, out):
    """Codes coefficients [rows, tokens] int16 into the end of `out` (uint16); returns the index of the first word, -1 for no room.

    Part p has rows parts[p] to parts[p + 1], of which the first used[p] are coded. means [rows] float32; weights [WEIGHTS] float32;
    starts and frequencies [CLASSES, SYMBOLS] int64, shifts [CLASSES] int64. The first 2 * LANES words are the states, low word first.
    """
    rows, tokens = coefficients.shape
    padded = (tokens + 7) // 8 * 8
    operations = np.empty(rows * tokens * MAX_OPERATIONS, np.uint32)
    lanes = np.empty(rows * tokens * MAX_OPERATIONS, np.uint8)
    count = 0
    gains = np.empty(padded, np.float32)
    magnitudes = np.zeros(padded, np.float32)
    classes = np.empty(padded, np.int32)
    for part in range(used.size):
        gains[:] = np.float32(1)
        for row in range(parts[part], parts[part] + used[part]):
            _class_row(means[row], weights[0], weights[1], gains, classes)
            for t in range(tokens):
                q = np.int64(coefficients[row, t])
                magnitude = abs(q)
                magnitudes[t] = np.float32(magnitude)
                index = classes[t]
                lane = t % LANES
                shift = shifts[index]
                high = magnitude >> shift
                symbol = np.int64(ESCAPE)
                if high <= LARGEST:
                    symbol = np.int64(0) if high == 0 else 2 * high - (1 if q > 0 else 0)
                    if frequencies[index, symbol] == 0:
                        symbol = np.int64(ESCAPE)
                operations[count] = np.uint32((starts[index, symbol] << 12) | (frequencies[index, symbol] - 1))
                lanes[count] = lane
                count += 1
                if symbol == ESCAPE:
                    rest = high + 1
                    length = np.int64(0)
                    while rest >> (length + 1):
                        length += 1
                    operations[count] = np.uint32(_RAW | (5 << 16) | length)
                    lanes[count] = lane
                    count += 1
                    rest -= np.int64(1) << length
                    while length > 0:
                        piece = min(length, np.int64(_LONGEST_RAW))
                        operations[count] = np.uint32(_RAW | (piece << 16) | (rest & ((1 << piece) - 1)))
                        lanes[count] = lane
                        count += 1
                        rest >>= piece
                        length -= piece
                low = magnitude & ((np.int64(1) << shift) - 1)
                while shift > 0:
                    piece = min(shift, np.int64(_LONGEST_RAW))
                    operations[count] = np.uint32(_RAW | (piece << 16) | (low & ((1 << piece) - 1)))
                    lanes[count] = lane
                    count += 1
                    low >>= piece
                    shift -= piece
                if magnitude and (symbol == 0 or symbol == ESCAPE):
                    operations[count] = np.uint32(_RAW | (1 << 16) | (1 if q < 0 else 0))
                    lanes[count] = lane
                    count += 1
            _next_gains(means[row], magnitudes, gains)
    states = np.full(LANES, LOWEST_STATE, np.int64)
    at = out.size
    for step in range(count - 1, -1, -1):
        operation = np.int64(operations[step])
        lane = lanes[step]
        x = states[lane]
        raw = operation & _RAW
        bits = (operation >> 16) & 31 if raw else np.int64(PROBABILITY_BITS)
        frequency = np.int64(1) if raw else (operation & 0xFFF) + 1
        start = operation & 0xFFFF if raw else operation >> 12
        if x >= frequency << (32 - bits):
            if at == 0:
                return -1
            at -= 1
            out[at] = np.uint16(x & 0xFFFF)
            x >>= 16
        states[lane] = ((x // frequency) << bits) + x % frequency + start
    if at < 2 * LANES:
        return -1
    at -= 2 * LANES
    for lane in range(LANES):
        out[at + 2 * lane] = np.uint16(states[lane] & 0xFFFF)
        out[at + 2 * lane + 1] = np.uint16(states[lane] >> 16)
    return at


@inlined
def _renormalized(x, words, at):
    """(state, next word): one word is read when the state has become small. Past the end zeros are read, and `at` tells."""
    if x < LOWEST_STATE:
        word = np.int64(words[at]) if at < words.size else np.int64(0)
        return (x << 16) | word, at + 1
    return x, at


@compiled
def read_stream(words, parts, used, means, weights, entries, shifts, coefficients):
    """Inverse of `write_stream`: fills the used rows of coefficients [rows, tokens] int16; True when the stream was one.

    entries [CLASSES, TOTAL] uint32: for each slot symbol << 24, slot - start of the symbol << 12, and frequency - 1; RARE_ENTRY besides
    where raw bits may follow. Never reads outside `words`, whatever they are; magnitudes are at most MAX_MAGNITUDE.
    """
    tokens = coefficients.shape[1]
    if words.size < 2 * LANES:
        return False
    padded_words = np.zeros(words.size + tokens + LANES, np.uint16)
    padded_words[: words.size] = words
    last = np.int64(padded_words.size - 1)
    states = np.empty(LANES, np.int64)
    for lane in range(LANES):
        states[lane] = np.int64(words[2 * lane]) | (np.int64(words[2 * lane + 1]) << 16)
        if states[lane] < LOWEST_STATE:
            return False
    at = np.int64(2 * LANES)
    padded = (tokens + 7) // 8 * 8
    gains = np.empty(padded, np.float32)
    magnitudes = np.zeros(padded, np.float32)
    classes = np.empty(padded, np.int32)
    values = np.zeros(SYMBOLS, np.int16)
    for size in range(1, LARGEST + 1):
        values[2 * size - 1], values[2 * size] = size, -size
    for part in range(used.size):
        gains[:] = np.float32(1)
        for row in range(parts[part], parts[part] + used[part]):
            _class_row(means[row], weights[0], weights[1], gains, classes)
            for t in range(tokens):
                lane = t & (LANES - 1)
                x = states[lane]
                entry = np.int64(entries[classes[t], x & (TOTAL - 1)])
                x = ((entry & 0xFFF) + 1) * (x >> 12) + ((entry >> 12) & 0xFFF)
                small = np.int64(x < LOWEST_STATE)
                x = (x << (small << 4)) | (np.int64(padded_words[at if at < last else last]) & -small)
                at += small
                symbol = (entry >> 24) & (SYMBOLS - 1)
                q = np.int64(values[symbol])
                if entry >> 29:
                    shift = shifts[classes[t]]
                    negative = q < 0
                    magnitude = abs(q)
                    if symbol == ESCAPE:
                        length = x & 31
                        x, at = _renormalized(x >> 5, words, at)
                        if length > 15:
                            return False
                        rest = np.int64(1) << length
                        done = np.int64(0)
                        while done < length:
                            piece = min(length - done, np.int64(_LONGEST_RAW))
                            rest += (x & ((np.int64(1) << piece) - 1)) << done
                            x, at = _renormalized(x >> piece, words, at)
                            done += piece
                        magnitude = rest - 1
                    magnitude <<= shift
                    done = np.int64(0)
                    while done < shift:
                        piece = min(shift - done, np.int64(_LONGEST_RAW))
                        magnitude += (x & ((np.int64(1) << piece) - 1)) << done
                        x, at = _renormalized(x >> piece, words, at)
                        done += piece
                    if magnitude > MAX_MAGNITUDE:
                        return False
                    if magnitude and (symbol == 0 or symbol == ESCAPE):
                        negative = x & 1 != 0
                        x, at = _renormalized(x >> 1, words, at)
                    q = -magnitude if negative else magnitude
                states[lane] = x
                coefficients[row, t] = np.int16(q)
                magnitudes[t] = np.float32(abs(q))
            _next_gains(means[row], magnitudes, gains)
            if at > words.size:
                return False
    for lane in range(LANES):
        if states[lane] != LOWEST_STATE:
            return False
    return at == words.size


@compiled
def classify(coefficients, parts, used, means, weights, histogram):
    """Counts magnitudes by class into histogram [CLASSES, sizes] int64, the last size standing for all beyond: for the fit of tables."""
    tokens = coefficients.shape[1]
    padded = (tokens + 7) // 8 * 8
    gains = np.empty(padded, np.float32)
    magnitudes = np.zeros(padded, np.float32)
    classes = np.empty(padded, np.int32)
    for part in range(used.size):
        gains[:] = np.float32(1)
        for row in range(parts[part], parts[part] + used[part]):
            _class_row(means[row], weights[0], weights[1], gains, classes)
            for t in range(tokens):
                magnitude = abs(np.int64(coefficients[row, t]))
                magnitudes[t] = np.float32(magnitude)
                histogram[classes[t], min(magnitude, np.int64(histogram.shape[1] - 1))] += 1
            _next_gains(means[row], magnitudes, gains)


@compiled
def multiply_pairs(pairs, strips, out):
    """out [tokens, columns] int32 = the product of coefficients and basis, both of 16 bits, two components at a time.

    pairs [tokens, components / 2] int32: two coefficients, the first one low. strips [columns / STRIP, components / 2 or more,
    2 * STRIP] int16: for each column the entries of two components. Sums must stay within int32. tokens a multiple of 4.
    """
    tokens, count = pairs.shape
    columns = out.shape[1]
    length = strips.shape[1] * 2 * STRIP
    flat, wanted, sums = strips.reshape(-1), pairs.reshape(-1), out.reshape(-1)
    for column in range(0, columns, STRIP):
        base = column // STRIP * length
        for first in range(0, count, _PAIRS_AT_ONCE):
            stop = min(first + _PAIRS_AT_ONCE, count)
            for t in range(0, tokens, 4):
                a, b, c, e = t * columns + column, (t + 1) * columns + column, (t + 2) * columns + column, (t + 3) * columns + column
                a_left = a_right = b_left = b_right = c_left = c_right = e_left = e_right = v.i_splat(np.int32(0))
                for pair in range(first, stop):
                    left = v.load_i16x16(flat, base + pair * (2 * STRIP))
                    right = v.load_i16x16(flat, base + pair * (2 * STRIP) + 16)
                    q = v.load_pairs(wanted, t * count + pair)
                    a_left, a_right = v.i_add(a_left, v.dot_pairs(q, left)), v.i_add(a_right, v.dot_pairs(q, right))
                    q = v.load_pairs(wanted, (t + 1) * count + pair)
                    b_left, b_right = v.i_add(b_left, v.dot_pairs(q, left)), v.i_add(b_right, v.dot_pairs(q, right))
                    q = v.load_pairs(wanted, (t + 2) * count + pair)
                    c_left, c_right = v.i_add(c_left, v.dot_pairs(q, left)), v.i_add(c_right, v.dot_pairs(q, right))
                    q = v.load_pairs(wanted, (t + 3) * count + pair)
                    e_left, e_right = v.i_add(e_left, v.dot_pairs(q, left)), v.i_add(e_right, v.dot_pairs(q, right))
                if first:
                    a_left, a_right = v.i_add(a_left, v.load_i32(sums, a)), v.i_add(a_right, v.load_i32(sums, a + 8))
                    b_left, b_right = v.i_add(b_left, v.load_i32(sums, b)), v.i_add(b_right, v.load_i32(sums, b + 8))
                    c_left, c_right = v.i_add(c_left, v.load_i32(sums, c)), v.i_add(c_right, v.load_i32(sums, c + 8))
                    e_left, e_right = v.i_add(e_left, v.load_i32(sums, e)), v.i_add(e_right, v.load_i32(sums, e + 8))
                v.store_i32(sums, a, a_left)
                v.store_i32(sums, a + 8, a_right)
                v.store_i32(sums, b, b_left)
                v.store_i32(sums, b + 8, b_right)
                v.store_i32(sums, c, c_left)
                v.store_i32(sums, c + 8, c_right)
                v.store_i32(sums, e, e_left)
                v.store_i32(sums, e + 8, e_right)
