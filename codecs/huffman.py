"""The encoding of a plane as a zstd frame of Huffman codes, compiled by numba.

Any zstd decoder reads the frame (RFC 8878). zstd takes 1.7 times as long to write it, since zstd
looks up single bytes instead of pairs.

All blocks of a frame share one code. Each has four streams of codes, and no sequences. The first
block stores the code as a weight for each byte: 0 for an unused byte, else `longest + 1 - bits`.
FSE codes store the weights, with fixed shares instead of counted frequencies: this makes the tables
constant, and costs about ten bytes.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numba  # pyright: ignore[reportMissingImports]  # an extra
import numpy as np
from numba import types  # pyright: ignore[reportMissingImports]

from penstock.codecs.compiled import compiled, filled, given

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.codecs.plain import Bytes

LEAST_BYTES = 16 << 10
"""In a smaller plane, the setup of the tables costs more than it gains."""

_BLOCK_BYTES = 128 << 10  # the most that zstd allows
_LONGEST = 11  # bits of a code; zstd's limit
_SPILL = 64  # bytes that may be written after a stream before the end of memory is noticed
_MOST_WEIGHTS = 127  # bytes of all weights; zstd's limit

# Shares of the weights 0 to 11: most bytes are unused. The shares add up to a power of two.
_SHARES = (40, 4, 3, 3, 3, 3, 2, 2, 1, 1, 1, 1)
_STATES, _STATE_BITS = 64, 6


def _described() -> Bytes:
    """Encode the shares in the format of a frame (RFC 8878, 4.1.1)."""
    bits, length, left = _STATE_BITS - 5, 4, _STATES
    for share in _SHARES:
        value, most = share + 1, left + 1
        width = most.bit_length()
        short = (1 << width) - 1 - most  # the number of smallest values that take a bit less
        if value < short:
            width -= 1
        elif value >= 1 << (width - 1):
            value += short
        bits |= value << length
        length += width
        left -= share
    return np.frombuffer(bits.to_bytes(-(-length // 8), "little"), np.uint8)


def _states() -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return the FSE tables, which encode weights from the last to the first.

    Returns:
        `final[weight]`: the decoder's last state for a weight. `before[weight, next]`: the state
        that decodes a weight and leads to the state `next`. `width[state]`: the number of bits that
        select the next state. `lowest[state]`: the lowest next state.
    """
    weights = np.empty(_STATES, np.uint8)
    at = 0
    for weight, share in enumerate(_SHARES):
        for _ in range(share):
            weights[at] = weight
            at = (at + (_STATES >> 1) + (_STATES >> 3) + 3) % _STATES
    final, before = np.empty(len(_SHARES), np.uint8), np.empty((len(_SHARES), _STATES), np.uint8)
    width, lowest = np.empty(_STATES, np.uint8), np.empty(_STATES, np.uint8)
    for weight, share in enumerate(_SHARES):
        for number, state in enumerate(np.flatnonzero(weights == weight), start=share):
            bits = _STATE_BITS + 1 - number.bit_length()
            low = (number << bits) - _STATES
            before[weight, low : low + (1 << bits)] = state
            width[state], lowest[state] = bits, low
        # The first state needs at least one more bit. That bit is missing, which shows the decoder
        # the end.
        final[weight] = np.argmax(weights == weight)
    return final, before, width, lowest


_SHARES_STORED = _described()
_FINAL, _BEFORE, _WIDTH, _LOWEST = _states()
_U8, _U64 = np.uint8, np.uint64
_SIX_BITS, _TWO_BYTES = np.uint64(63), np.uint64(0xFFFF)

_inner: Callable[[Any], Any] = numba.njit(nogil=True)


@_inner
def _count(plane: Any, words: Any, pairs: Any, counts: Any) -> None:
    """Count the bytes of the plane; `pairs` must be zero before, and is zero after."""
    # Equal bytes follow each other, and each addition waits for the last one to the same place.
    # Counting pairs halves the additions.
    whole = plane.size // 8 * 8
    for i in range(0, whole, 8):
        word = words[i]
        pairs[word & _TWO_BYTES] += np.uint32(1)
        pairs[(word >> _U64(16)) & _TWO_BYTES] += np.uint32(1)
        pairs[(word >> _U64(32)) & _TWO_BYTES] += np.uint32(1)
        pairs[word >> _U64(48)] += np.uint32(1)
    for i in range(whole, plane.size):
        counts[plane[i]] += 1
    for second in range(256):
        total = np.uint32(0)
        for first in range(256):
            total += pairs[256 * second + first]
            counts[first] += pairs[256 * second + first]
            pairs[256 * second + first] = np.uint32(0)
        counts[second] += total


@_inner
def _sort(counts: Any, order: Any, total: Any) -> Any:
    """List the used bytes and their counts, rarest first; return the number of used bytes."""
    n = 0
    for byte in range(256):
        if counts[byte]:
            # By insertion: numba takes seconds to compile a sort.
            i = n
            while i > 0 and total[i - 1] > counts[byte]:
                total[i], order[i] = total[i - 1], order[i - 1]
                i -= 1
            total[i], order[i] = counts[byte], byte
            n += 1
    return n


@_inner
def _fit(per_length: Any) -> None:
    """Lengthen short codes until all fit, after long codes were cut to `_LONGEST` bits."""
    space = 0
    for length in range(1, _LONGEST + 1):
        space += per_length[length] << (_LONGEST - length)
    while space > 1 << _LONGEST:
        # One code becomes two that are one bit longer: one for its byte, and one for a byte that
        # had one of the longest codes.
        length = _LONGEST - 1
        while not per_length[length]:
            length -= 1
        per_length[_LONGEST] -= 1
        per_length[length] -= 1
        per_length[length + 1] += 2
        space -= 1


@_inner
def _choose(counts: Any, bits: Any) -> Any:
    """Choose a code length for each used byte; return the longest, 0 if fewer than two are used."""
    order, total = np.empty(256, np.int64), np.zeros(512, np.int64)
    n = _sort(counts, order, total)
    bits[:] = 0
    if n < 2:  # noqa: PLR2004
        return 0
    # The tree: leaves by rising counts, then the nodes above them, also by rising counts.
    above, depth = np.zeros(512, np.int64), np.zeros(512, np.int64)
    leaf, inner = 0, n
    for node in range(n, 2 * n - 1):
        for _ in range(2):
            if leaf < n and (inner == node or total[leaf] <= total[inner]):
                child = leaf
                leaf += 1
            else:
                child = inner
                inner += 1
            total[node] += total[child]
            above[child] = node
    per_length = np.zeros(_LONGEST + 1, np.int64)
    for node in range(2 * n - 3, -1, -1):
        depth[node] = depth[above[node]] + 1
        if node < n:
            per_length[min(depth[node], _LONGEST)] += 1
    _fit(per_length)
    i, longest = 0, 0
    for length in range(_LONGEST, 0, -1):
        for _ in range(per_length[length]):
            bits[order[i]] = length
            i += 1
            longest = max(longest, length)
    return longest


@_inner
def _tabulate(bits: Any, longest: Any, codes: Any, pairs: Any) -> None:
    """Fill the tables; an entry has a code in its top bits, and the length in its low bits."""
    code = 0
    used = np.empty(256, np.int64)
    n = 0
    for length in range(longest, 0, -1):
        for byte in range(256):
            if bits[byte] == length:
                codes[byte] = _U64(code) << _U64(64 - length) | _U64(length)
                code += 1
                used[n] = byte
                n += 1
        code >>= 1
    for i in range(n):
        second = used[i]
        second_code = codes[second] & ~_SIX_BITS
        for j in range(n):
            first = used[j]
            both = _U64(bits[first]) + _U64(bits[second])
            first_code = codes[first]
            pairs[256 * second + first] = (
                second_code >> (first_code & _SIX_BITS) | first_code & ~_SIX_BITS | both
            )


@_inner
def _store_weights(bits: Any, longest: Any, out: Any, at: Any) -> Any:
    """Write the weights to `out[at:]`; return the end offset, or 0 if zstd cannot read them."""
    last = 255
    while not bits[last]:
        last -= 1
    if last < 2:  # noqa: PLR2004 - there are two states
        return 0
    begin = at
    at += 1
    for i in range(_SHARES_STORED.size):
        out[at] = _SHARES_STORED[i]
        at += 1
    # The decoder alternates between two states, and reads from the end. The last weight follows
    # from the others.
    states = np.zeros(2, np.int64)
    kept, held = _U64(0), 0
    for i in range(last - 1, -1, -1):
        weight = longest + 1 - bits[i] if bits[i] else 0
        if i >= last - 2:
            states[i & 1] = _FINAL[weight]
            continue
        state = _BEFORE[weight, states[i & 1]]
        kept |= _U64(states[i & 1] - _LOWEST[state]) << _U64(held)
        held += _WIDTH[state]
        states[i & 1] = state
        while held >= 8:  # noqa: PLR2004
            out[at] = _U8(kept & _U64(255))
            at += 1
            kept >>= _U64(8)
            held -= 8
    kept |= _U64(states[1]) << _U64(held) | _U64(states[0]) << _U64(held + _STATE_BITS)
    kept |= _U64(1) << _U64(held + 2 * _STATE_BITS)
    held += 2 * _STATE_BITS + 1
    while held > 0:
        out[at] = _U8(kept & _U64(255))
        at += 1
        kept >>= _U64(8)
        held -= 8
    size = at - begin - 1
    out[begin] = _U8(size)
    return at if size <= _MOST_WEIGHTS else 0


@_inner
def _store_stream(
    plane: Any, words: Any, start: Any, stop: Any, codes: Any, pairs: Any, out: Any, at: Any
) -> Any:
    """Write the codes of the bytes, last byte first; return the end offset, 0 if out of space.

    `out` has a 64-bit word at each address. The top `held` bits of `kept` are not written yet; its
    lower bits are undefined.
    """
    kept, held, here, room = _U64(0), _U64(0), _U64(at), _U64(out.size - _SPILL)
    # Unsigned numbers throughout: numba counts a negative index from the end.
    for number in range((stop - start) // 8):
        if here > room:
            return 0
        word = words[_U64(stop - 8 - 8 * number)]
        one, two = pairs[word >> _U64(48)], pairs[(word >> _U64(32)) & _TWO_BYTES]
        three, four = pairs[(word >> _U64(16)) & _TWO_BYTES], pairs[word & _TWO_BYTES]
        upper = one >> (two & _SIX_BITS) | two
        lower = three >> (four & _SIX_BITS) | four
        upper_bits, lower_bits = (one + two) & _SIX_BITS, (three + four) & _SIX_BITS
        bits = upper_bits + lower_bits
        # Entries have their lengths in the low bits, which must not get into the `held` bits.
        if bits <= _U64(48):
            kept = kept >> bits | (upper >> lower_bits | lower)
            held += bits
        else:
            kept = kept >> upper_bits | upper
            held += upper_bits
            out[here] = kept >> (_U64(64) - held)
            here += held >> _U64(3)
            held &= _U64(7)
            kept = kept >> lower_bits | lower
            held += lower_bits
        out[here] = kept >> (_U64(64) - held)
        here += held >> _U64(3)
        held &= _U64(7)
    for i in range(start + (stop - start) % 8 - 1, start - 1, -1):
        code = codes[plane[i]]
        kept = kept >> (code & _SIX_BITS) | code
        held += code & _SIX_BITS
        out[here] = kept >> (_U64(64) - held)
        here += held >> _U64(3)
        held &= _U64(7)
    kept = kept >> _U64(1) | _U64(1) << _U64(63)
    held += _U64(1)
    out[here] = kept >> (_U64(64) - held)
    return np.int64(here + ((held + _U64(7)) >> _U64(3)))


@_inner
def _put(out: Any, at: Any, value: Any, size: Any) -> None:
    for i in range(size):
        out[at + i] = _U8(value >> (8 * i) & 255)


_BYTE_WORDS = types.Array(types.uint64, 1, "A", readonly=True, aligned=False)
_OUT_WORDS = types.Array(types.uint64, 1, "A", aligned=False)


@compiled((
    given(types.uint8), _BYTE_WORDS, filled(types.uint8), _OUT_WORDS,
    filled(types.uint32), filled(types.uint64),
))  # fmt: skip
def _store(plane: Any, words: Any, out: Any, out_words: Any, counted: Any, pairs: Any) -> Any:
    counts, bits = np.zeros(256, np.int64), np.zeros(256, np.int64)
    _count(plane, words, counted, counts)
    longest = _choose(counts, bits)
    total = 0
    for byte in range(256):
        total += counts[byte] * bits[byte]
    blocks = -(-plane.size // _BLOCK_BYTES)
    # The most bytes that a frame of these codes writes, with the `_SPILL` after it.
    most = total // 8 + 32 * blocks + _MOST_WEIGHTS + _SPILL
    # Almost all bytes are equal: zstd stores a block of them in a byte, codes take a bit for each.
    few = total < plane.size + plane.size // 4
    if not longest or few or most > min(plane.size, out.size):
        return 0
    codes = np.zeros(256, np.uint64)
    _tabulate(bits, longest, codes, pairs)
    _put(out, 0, 0xFD2FB528, 4)
    _put(out, 4, 0xA0, 1)  # one segment, whose size has four bytes
    _put(out, 5, plane.size, 4)
    at = 9
    step = -(-plane.size // (8 * blocks)) * 8
    for number in range(blocks):
        begin, start, stop = at, number * step, min((number + 1) * step, plane.size)
        at += 8
        if not number:
            at = _store_weights(bits, longest, out, at)
            if not at:
                return 0
        sizes, at = at, at + 6
        quarter = (stop - start + 3) // 4
        for stream in range(4):
            here, upto = start + stream * quarter, min(start + (stream + 1) * quarter, stop)
            end = _store_stream(plane, words, here, upto, codes, pairs, out_words, at)
            if not end:
                return 0
            if stream < 3:  # noqa: PLR2004
                _put(out, sizes + 2 * stream, end - at, 2)
            at = end
        if at + 1 - begin > stop - start:
            return 0
        kind = 3 if number else 2  # 3: with the code of the block before
        _put(out, begin + 3, kind | 3 << 2 | (stop - start) << 4 | (at - begin - 8) << 22, 5)
        out[at] = _U8(0)  # no sequences
        at += 1
        last = int(number == blocks - 1)
        _put(out, begin, last | 2 << 1 | (at - begin - 3) << 3, 3)
    return at


class _PairTables(threading.local):
    """Memory of one thread for tables over pairs of bytes: 768 KiB, only partly touched."""

    def __init__(self) -> None:
        self.counted = np.zeros(1 << 16, np.uint32)
        self.codes = np.zeros(1 << 16, np.uint64)


_tables = _PairTables()


def store_codes(plane: Bytes, out: Bytes) -> int:
    """Write a frame to the start of `out`; return its length, or 0 if zstd must write it.

    Returns 0 for a plane that is small, repeats one byte or hardly shrinks, or whose code cannot be
    stored this way. May change `out` after the frame.
    """
    if plane.size < LEAST_BYTES or out.size < LEAST_BYTES:
        return 0
    words, out_words = _words_at_each_byte(plane), _words_at_each_byte(out)
    return int(_store(plane, words, out, out_words, _tables.counted, _tables.codes))


def _words_at_each_byte(memory: Bytes) -> NDArray[np.uint64]:
    return np.ndarray((memory.size - 7,), np.uint64, memory, 0, (1,))
