"""The klt rung's entropy coder as machine code: rANS over quantized coefficients, without the GIL, equal to klt_reference.py.

The coefficients of a section stand in rows (components, strongest first) of one column for each token, part after part (a part is
one group of layers). Each is coded as a symbol min(|q| >> shift, ESCAPE) under a static table, then raw bits: what an escape exceeds
ESCAPE by (its bit length - 1 in 5 bits, then these bits), the low `shift` bits, the sign of what is not zero. Table and shift
follow from the magnitude to be expected (`_expected`): the component's mean, the same component in the two tokens before, and how
the components so far of this token compare with their means. All of it is integer arithmetic.

rANS: four states of 32 bits, token t uses state t % 4, probabilities of 12 bits, words of 16. The writer works from the last
coefficient to the first; a reader ends with every word read and every state back at its start, or the stream is no stream.

All kernels stay in this one file with what they call, because numba's cache on disk notices changes of the file it caches and of
no other.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from kvstore.codec.kernels import compiled, inlined

LANES = 4
CLASSES = 64
SYMBOLS = 16
ESCAPE = SYMBOLS - 1
PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
LOWEST_STATE = 1 << 16
MEAN_ONE = 256
"""Means and expected magnitudes count in 1/256."""
MAX_MEAN = 1 << 22
MAX_MAGNITUDE = (1 << 15) - 1
WEIGHTS = 4
"""Of the mean, the token before, the one before that, and the mean scaled by the token's own gain; 1/256 each."""
GAIN_ONE = 1 << 12
MAX_OPERATIONS = 8
"""Of one coefficient: symbol, escape length, escape bits in two pieces, low bits in two pieces, sign."""

_RAW = 1 << 31
_LONGEST_RAW = 12


@inlined
def _expected(mean, before, twice_before, gain, weights):
    """The class of a coefficient: the binary logarithm of the magnitude to be expected, in quarters, from 2**-5 on."""
    scaled = (mean * gain) >> 12
    total = (weights[0] * mean + (weights[1] * before + weights[2] * twice_before) * MEAN_ONE + weights[3] * scaled) >> 8
    total = min(total, np.int64(0xFFFFFF))
    bits = np.float32(total).view(np.uint32) if total > 0 else np.uint32(0)
    quarter = np.int64(bits >> np.uint32(21)) - np.int64((127 + 3) << 2)
    return min(max(quarter, np.int64(0)), np.int64(CLASSES - 1))


@inlined
def _next_gain(gain, magnitude, inverse_mean):
    """The token's gain after one more component: a running mean, over some 32 components, of magnitude by mean."""
    ratio = min((magnitude * inverse_mean) >> 8, np.int64(GAIN_ONE * 8))
    return gain + ((ratio - gain) >> 5)


@compiled
def write_stream(coefficients, parts, used, means, weights, starts, frequencies, shifts, out):
    """Codes coefficients [rows, tokens] int16 into the end of `out` (uint16); returns the index of the first word, -1 for no room.

    Part p has rows parts[p] to parts[p + 1], of which the first used[p] are coded. means [rows] int64; weights [WEIGHTS] int64; starts
    and frequencies [CLASSES, SYMBOLS] int64, shifts [CLASSES] int64. The first 2 * LANES words written are the states, low word first.
    """
    rows, tokens = coefficients.shape
    operations = np.empty(rows * tokens * MAX_OPERATIONS, np.uint32)
    lanes = np.empty(rows * tokens * MAX_OPERATIONS, np.uint8)
    count = 0
    gains = np.empty(tokens, np.int64)
    for part in range(used.size):
        gains[:] = GAIN_ONE
        for row in range(parts[part], parts[part] + used[part]):
            mean = means[row]
            inverse = np.int64(GAIN_ONE * 256 * MEAN_ONE) // mean
            before = (mean + MEAN_ONE // 2) // MEAN_ONE
            twice_before = before
            for t in range(tokens):
                q = np.int64(coefficients[row, t])
                magnitude = abs(q)
                index = _expected(mean, before, twice_before, gains[t], weights)
                gains[t] = _next_gain(gains[t], magnitude, inverse)
                twice_before = before
                before = magnitude
                lane = t % LANES
                shift = shifts[index]
                high = magnitude >> shift
                symbol = min(high, np.int64(ESCAPE))
                operations[count] = np.uint32((starts[index, symbol] << 12) | (frequencies[index, symbol] - 1))
                lanes[count] = lane
                count += 1
                if symbol == ESCAPE:
                    rest = high - ESCAPE + 1
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
                if magnitude:
                    operations[count] = np.uint32(_RAW | (1 << 16) | (1 if q < 0 else 0))
                    lanes[count] = lane
                    count += 1
    states = np.full(LANES, LOWEST_STATE, np.uint64)
    at = out.size
    for step in range(count - 1, -1, -1):
        operation = np.int64(operations[step])
        lane = lanes[step]
        x = states[lane]
        if operation & _RAW:
            bits = np.uint64((operation >> 16) & 31)
            if x >= np.uint64(1) << (np.uint64(32) - bits):
                if at == 0:
                    return -1
                at -= 1
                out[at] = np.uint16(x & np.uint64(0xFFFF))
                x >>= np.uint64(16)
            states[lane] = (x << bits) | np.uint64(operation & 0xFFFF)
        else:
            frequency = np.uint64((operation & 0xFFF) + 1)
            if x >= frequency << np.uint64(20):
                if at == 0:
                    return -1
                at -= 1
                out[at] = np.uint16(x & np.uint64(0xFFFF))
                x >>= np.uint64(16)
            states[lane] = ((x // frequency) << np.uint64(12)) + x % frequency + np.uint64(operation >> 12)
    if at < 2 * LANES:
        return -1
    at -= 2 * LANES
    for lane in range(LANES):
        out[at + 2 * lane] = np.uint16(states[lane] & np.uint64(0xFFFF))
        out[at + 2 * lane + 1] = np.uint16(states[lane] >> np.uint64(16))
    return at


@inlined
def _renormalized(x, words, at):
    """(state, next word): one word is read when the state has become small. Past the end zeros are read, and `at` tells."""
    if x < np.uint64(LOWEST_STATE):
        word = np.uint64(words[at]) if at < words.size else np.uint64(0)
        return (x << np.uint64(16)) | word, at + 1
    return x, at


@compiled
def read_stream(words, parts, used, means, weights, starts, frequencies, shifts, slots, coefficients):
    """Inverse of `write_stream`: fills the used rows of coefficients [rows, tokens] float32; True when the stream was one.

    slots [CLASSES, TOTAL] uint8 is the symbol of each slot. Never reads outside `words`, whatever they are; magnitudes are at most
    MAX_MAGNITUDE.
    """
    tokens = coefficients.shape[1]
    if words.size < 2 * LANES:
        return False
    states = np.empty(LANES, np.uint64)
    for lane in range(LANES):
        states[lane] = np.uint64(words[2 * lane]) | (np.uint64(words[2 * lane + 1]) << np.uint64(16))
        if states[lane] < np.uint64(LOWEST_STATE):
            return False
    at = 2 * LANES
    gains = np.empty(tokens, np.int64)
    for part in range(used.size):
        gains[:] = GAIN_ONE
        for row in range(parts[part], parts[part] + used[part]):
            mean = means[row]
            inverse = np.int64(GAIN_ONE * 256 * MEAN_ONE) // mean
            before = (mean + MEAN_ONE // 2) // MEAN_ONE
            twice_before = before
            out = coefficients[row]
            for t in range(tokens):
                index = _expected(mean, before, twice_before, gains[t], weights)
                lane = t % LANES
                x = states[lane]
                slot = np.int64(x & np.uint64(TOTAL - 1))
                symbol = np.int64(slots[index, slot])
                x = np.uint64(frequencies[index, symbol]) * (x >> np.uint64(12)) + np.uint64(slot - starts[index, symbol])
                x, at = _renormalized(x, words, at)
                shift = shifts[index]
                magnitude = symbol
                if symbol == ESCAPE:
                    length = np.int64(x & np.uint64(31))
                    x, at = _renormalized(x >> np.uint64(5), words, at)
                    if length > 15:
                        return False
                    rest = np.int64(1) << length
                    done = np.int64(0)
                    while done < length:
                        piece = min(length - done, np.int64(_LONGEST_RAW))
                        rest += np.int64(x & np.uint64((1 << piece) - 1)) << done
                        x, at = _renormalized(x >> np.uint64(piece), words, at)
                        done += piece
                    magnitude = ESCAPE + rest - 1
                if shift:
                    magnitude <<= shift
                    done = np.int64(0)
                    while done < shift:
                        piece = min(shift - done, np.int64(_LONGEST_RAW))
                        magnitude += np.int64(x & np.uint64((1 << piece) - 1)) << done
                        x, at = _renormalized(x >> np.uint64(piece), words, at)
                        done += piece
                if magnitude > MAX_MAGNITUDE:
                    return False
                negative = False
                if magnitude:
                    negative = x & np.uint64(1) != 0
                    x, at = _renormalized(x >> np.uint64(1), words, at)
                states[lane] = x
                gains[t] = _next_gain(gains[t], magnitude, inverse)
                twice_before = before
                before = magnitude
                out[t] = np.float32(-magnitude if negative else magnitude)
        if at > words.size:
            return False
    for lane in range(LANES):
        if states[lane] != np.uint64(LOWEST_STATE):
            return False
    return at == words.size


@compiled
def classify(coefficients, parts, used, means, weights, histogram):
    """Counts magnitudes by class into histogram [CLASSES, sizes] int64, the last size standing for all beyond: for the fit of tables."""
    tokens = coefficients.shape[1]
    gains = np.empty(tokens, np.int64)
    for part in range(used.size):
        gains[:] = GAIN_ONE
        for row in range(parts[part], parts[part] + used[part]):
            mean = means[row]
            inverse = np.int64(GAIN_ONE * 256 * MEAN_ONE) // mean
            before = (mean + MEAN_ONE // 2) // MEAN_ONE
            twice_before = before
            for t in range(tokens):
                magnitude = abs(np.int64(coefficients[row, t]))
                index = _expected(mean, before, twice_before, gains[t], weights)
                gains[t] = _next_gain(gains[t], magnitude, inverse)
                twice_before = before
                before = magnitude
                histogram[index, min(magnitude, np.int64(histogram.shape[1] - 1))] += 1
