"""The chunks of the golden frames, the same everywhere and forever."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.abc import CodecContext

if TYPE_CHECKING:
    from collections.abc import Callable

# By dtype: bytes of an element, bits of the mantissa, and the exponent of common values.
FLOATS = {
    "float8_e4m3fn": (1, 3, 9),
    "float8_e5m2": (1, 2, 17),
    "float8_e4m3fnuz": (1, 3, 9),
    "float8_e5m2fnuz": (1, 2, 17),
    "float16": (2, 10, 17),
    "bfloat16": (2, 7, 122),
    "float32": (4, 23, 122),
    "float64": (8, 52, 1018),
}
INTEGERS = {"uint16": 2, "uint32": 4, "uint64": 8, "int16": 2, "int32": 4, "int64": 8}
_LEADING_ZEROS = np.array([8 - n.bit_length() for n in range(256)], np.uint8)


@dataclass(frozen=True)
class Case:
    """A chunk, and the codecs that encode it, each with its options."""

    codecs: tuple[tuple[str, dict[str, Any]], ...]
    make: Callable[[], bytes]
    dtype: str = "uint8"
    itemsize: int = 1
    shape: tuple[int, ...] | None = None
    start: int = 0
    declined: tuple[int, ...] = field(default=())
    base: Callable[[], bytes] | None = None

    def chunk(self) -> tuple[bytes, CodecContext]:
        """Return the chunk and its context for codecs."""
        raw = self.make()
        shape = self.shape or (len(raw) // self.itemsize,)
        base = None if self.base is None else memoryview(self.base())
        return raw, CodecContext(self.dtype, self.itemsize, shape, self.start, len(raw), base)


def noise(name: str, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return `size` random bytes that depend on `name` alone."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(size), np.uint8)


def text(size: int) -> bytes:
    """Return bytes with repetitions."""
    line = b"".join(b"step %d loss %d\n" % (n, n * n % 977) for n in range(500))
    return (line * (size // len(line) + 1))[:size]


def floats(
    dtype: str, rows: int, columns: int, *, kind: str = "plain", start: int = 0, count: int = 0
) -> bytes:
    """Return elements of a matrix, from element `start` on (all, if `count` is 0).

    Args:
        dtype: One of `FLOATS`.
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        kind: `"plain"`: random signs and mantissas, and some values that arithmetic changes;
            `"product"`: near an outer product, without signs, as second moments are, with
            mantissas of two bits; `"short"`: with zeros in the lower half of each mantissa.
        start: The first element.
        count: The number of elements.
    """
    itemsize, mantissa, exponent = FLOATS[dtype]
    size = rows * columns
    bits = noise(f"{dtype} {kind} {rows} {columns}", 10 * size + 2 * (rows + columns))
    mixed = bits[: 8 * size].view("<u8") & np.uint64((1 << mantissa) - 1)
    kept = {"plain": mantissa, "product": 2, "short": mantissa - mantissa // 2}[kind]
    mixed &= ~np.uint64((1 << mantissa - kept) - 1)
    powers = exponent - _LEADING_ZEROS[bits[8 * size : 9 * size]].astype(np.int64)
    if kind == "product":
        ends = bits[10 * size :]
        reach = 64 if itemsize > 1 and dtype != "float16" else 4
        powers += (ends[:rows].astype(np.int64) % reach)[:, None].repeat(columns, 1).reshape(-1)
        powers += np.tile(ends[rows : rows + columns].astype(np.int64) % reach, rows) - reach
    words = np.maximum(powers, 0).astype(np.uint64) << np.uint64(mantissa) | mixed
    if kind == "plain":
        signs = (bits[9 * size : 10 * size] & 1).astype(np.uint64)
        words |= signs << np.uint64(8 * itemsize - 1)
    words &= np.uint64((1 << 8 * itemsize) - 1)
    data = bytearray(words.astype(f"<u{itemsize}").tobytes())
    if kind == "plain":
        data[: 14 * itemsize] = _rare(itemsize, mantissa)
    count = count or size - start
    return bytes(data[start * itemsize : (start + count) * itemsize])


def _rare(itemsize: int, mantissa: int) -> bytes:
    """Return 14 elements: zeros, denormals, infinities and NaNs with payloads, of both signs."""
    sign = 1 << 8 * itemsize - 1
    infinity, quiet = sign - (1 << mantissa), 1 << mantissa - 1
    words = (0, 1, infinity, infinity | 1, infinity | quiet, infinity | quiet | 1, sign - 1)
    return b"".join(w.to_bytes(itemsize, "little") for word in words for w in (sign | word, word))


def sparse(itemsize: int, elements: int) -> bytes:
    """Return mostly zero elements, with some others in the last places."""
    words = np.zeros(elements, f"<u{itemsize}")
    values = noise(f"sparse {itemsize}", elements // 512)
    words[::512][: len(values)] = values
    words[-3:] = (1 << 8 * itemsize) - 1
    return words.tobytes()


def integers(itemsize: int, elements: int) -> bytes:
    """Return numbers that need few of their bytes, negative ones among them."""
    small = noise(f"integers {itemsize}", elements).astype(np.int64) - 3
    return small.astype(f"<i{itemsize}").tobytes()


def powers(elements: int) -> bytes:
    """Return numbers of two bytes, the upper one with few values, the lower one zero."""
    upper = _LEADING_ZEROS[noise("powers", elements)].astype(np.uint16)
    return (upper << np.uint16(8)).astype("<u2").tobytes()


def moments(itemsize: int, rows: int, columns: int, kind: str) -> bytes:
    """Return floats whose top 16 bits are near the sum of a term of the row and one of the column.

    Args:
        itemsize: 2 or 4; the bits below the top are zero.
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        kind: `"near"`; `"far"`: but for one zero; `"signed"`: with signs.
    """
    size = rows * columns
    bits = noise(f"moments {itemsize} {kind}", 3 * size + rows + columns).astype(np.uint16)
    terms = (bits[3 * size :][:rows, None] + bits[-columns:]).reshape(-1) * np.uint16(16)
    tops = np.uint16(0x2000) + terms + bits[:size] + (bits[size : 2 * size] >> np.uint16(1))
    if kind == "far":
        tops[size // 2] = 0
    if kind == "signed":
        tops |= (bits[2 * size : 3 * size] & np.uint16(1)) << np.uint16(15)
    return (tops.astype(f"<u{itemsize}") << (8 * itemsize - 16)).astype(f"<u{itemsize}").tobytes()


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    found: dict[str, Case] = {}
    for name, options in (
        ("zstd", [{}, {"level": -50}, {"level": 19}]),
        ("lz4", [{}, {"acceleration": 32}, {"level": 9}]),
    ):
        for number, option in enumerate(options):
            codecs = ((name, option),)
            found[f"{name}-{number}-text"] = Case(codecs, lambda: text(30_000))
            found[f"{name}-{number}-noise"] = Case(codecs, lambda: noise("n", 3000).tobytes())
            found[f"{name}-{number}-one"] = Case(codecs, lambda: b"\x07")
            # More than one of the pieces into which both codecs cut large chunks.
            found[f"{name}-{number}-pieces"] = Case(codecs, lambda: bytes((4 << 20) + 5) + text(50))
    return found | _of_floatsplit() | _of_factor() | _of_lossy() | _of_delta()


def _of_floatsplit() -> dict[str, Case]:
    found: dict[str, Case] = {}
    plain, own = (("floatsplit", {"predict": False}),), (("floatsplit", {}),)
    for dtype, (size, *_) in FLOATS.items():
        # Terms of rows and columns must pay off: a matrix of few rows is not predicted.
        wide = (300, 301) if size == 2 else (160, 161)
        for kind in ("plain", "short"):
            found[f"floatsplit-{dtype}-{kind}"] = Case(
                own, lambda d=dtype, k=kind: floats(d, 40, 64, kind=k), dtype, size, (40, 64)
            )
        inside = wide[0] * wide[1] - 150
        for name, codecs, start, count in (
            ("predicted", own, 0, 0), ("unpredicted", plain, 0, 0), ("inside", own, 71, inside)
        ):  # fmt: skip
            found[f"floatsplit-{dtype}-{name}"] = Case(
                codecs,
                lambda d=dtype, w=wide, s=start, c=count: floats(
                    d, *w, kind="product", start=s, count=c
                ),
                dtype, size, wide, start * size,
            )  # fmt: skip
        found[f"floatsplit-{dtype}-blocks"] = Case(
            own, lambda s=size: sparse(s, (128 << 10) + 1001), dtype, size
        )
    for dtype, size in INTEGERS.items():
        found[f"floatsplit-{dtype}"] = Case(own, lambda s=size: integers(s, 2001), dtype, size)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for kind in ("near", "far", "signed"):
            found[f"floatsplit-{dtype}-{kind}"] = Case(
                own, lambda s=size, k=kind: moments(s, 160, 161, k), dtype, size, (160, 161)
            )
    found["floatsplit-uint32-sparse"] = Case(own, lambda: sparse(4, 40_000), "uint32", 4)
    # A plane of two blocks of zstd, in one Huffman code.
    found["floatsplit-uint16-codes"] = Case(own, lambda: powers(140_000), "uint16", 2)
    both = (("floatsplit", {}), ("zstd", {"level": 3}))
    found["floatsplit-zstd-taken"] = Case(
        both, lambda: floats("float32", 40, 64), "float32", 4, (40, 64)
    )
    found["floatsplit-zstd-declined"] = Case(
        both, lambda: text(5000), "int8", 1, (50, 100), declined=(0,)
    )
    return found


def products(elements: int, factor: int) -> bytes:
    """Return bfloat16 numbers times a float32, given by its bits, and some other elements."""
    tops = np.frombuffer(floats("bfloat16", 1, elements), "<u2").astype("<u4") << np.uint32(16)
    few = tops & np.uint32(0x7F80_0000)
    numbers = np.where(few == 0x7F80_0000, np.uint32(0), tops).view("<f4")
    raw = bytearray((numbers * np.uint32(factor).view("<f4")).tobytes())
    raw[20 : 20 + 14 * 4] = _rare(4, 23)
    raw[-2000:-1600] = noise("products", 400).tobytes()
    return bytes(raw)


def _of_factor() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, factor in (("one", 0x3F80_0000), ("some", 0x3E9A_BCDE), ("most", 0x3FFF_FFFF)):
        found[f"factor-{name}"] = Case(
            (("factor", {}),), lambda f=factor: products(3001, f), "float32", 4
        )
    found["factor-blocks"] = Case(
        (("factor", {}),), lambda: products(70_001, 0x3E9A_BCDE), "float32", 4
    )
    both = (("factor", {}), ("floatsplit", {}))
    found["factor-floatsplit"] = Case(both, lambda: products(9000, 0x3E9A_BCDE), "float32", 4)
    found["factor-declined"] = Case(
        both, lambda: floats("float32", 40, 64), "float32", 4, (40, 64), declined=(0,)
    )
    return found


def _of_lossy() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for dtype, to in (
        ("float64", "float32"), ("float32", "bfloat16"), ("float32", "float16"),
        ("float32", "float8_e4m3fnuz"), ("bfloat16", "float8_e5m2"), ("float16", "float8_e4m3fn"),
    ):  # fmt: skip
        found[f"cast-{dtype}-{to}"] = Case(
            (("cast", {"to": to, "saturate": True}),),
            lambda d=dtype: floats(d, 40, 64), dtype, FLOATS[dtype][0], (40, 64),
        )  # fmt: skip
    for dtype in ("float32", "bfloat16", "float16"):
        size = FLOATS[dtype][0]
        found[f"log8-{dtype}"] = Case(
            (("log8", {}),),
            lambda d=dtype, s=size: bytes(10 * s) + floats(d, 60, 61, kind="product"), dtype, size,
        )  # fmt: skip
    both = (("cast", {}), ("floatsplit", {}))
    found["cast-floatsplit"] = Case(both, lambda: floats("float32", 40, 64), "float32", 4, (40, 64))
    return found


def _of_delta() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for dtype, size in (("uint8", 1), ("bfloat16", 2), ("float32", 4), ("float64", 8)):
        for name in ("steps", "flips"):
            found[f"delta-{dtype}-{name}"] = Case(
                (("delta", {}),),
                lambda s=size, n=name: later(s, 3001, n),
                dtype,
                size,
                base=lambda s=size: earlier(s, 3001),
            )
    # No machine word has 16 bytes: single bytes are compared.
    found["delta-complex128"] = Case(
        (("delta", {}),),
        lambda: later(1, 3200, "steps"),
        "complex128",
        16,
        base=lambda: earlier(1, 3200),
    )
    found["delta-zstd-taken"] = Case(
        (("delta", {}), ("zstd", {"level": 3})),
        lambda: later(4, 3001, "steps"),
        "float32",
        4,
        base=lambda: earlier(4, 3001),
    )
    found["delta-zstd-declined"] = Case(
        (("delta", {}), ("zstd", {"level": 3})),
        lambda: text(4000),
        "float32",
        4,
        declined=(0,),
        base=lambda: noise("other", 4000).tobytes(),
    )
    return found


def earlier(itemsize: int, elements: int) -> bytes:
    """Return elements of any bits."""
    return noise(f"earlier {itemsize}", itemsize * elements).tobytes()


def later(itemsize: int, elements: int, how: str) -> bytes:
    """Return `earlier` after small steps up and down, or with some bits flipped."""
    words = np.frombuffer(earlier(itemsize, elements), f"<u{itemsize}").copy()
    small = noise(f"later {itemsize}", elements)
    if how == "steps":
        words += (small % 5).astype(words.dtype) - np.array(2, words.dtype)
    else:
        words[small < 40] ^= np.array(1 << 8 * itemsize - 2, words.dtype)
    return words.tobytes()


CASES = cases()
