"""Planes of bytes of many distributions, coded by numba and read by zstd."""

from __future__ import annotations

import hashlib

import numpy as np
import zstandard

from penstock.codecs.floatsplit import entropy

_GUARD = b"\xa5" * 64
_SIZES = (16384, 131072, 131073, 131080, 262143, 262144)


def plane_of(seed: bytes):
    """A plane that depends on `seed` alone."""
    rng = np.random.default_rng(list(hashlib.sha256(seed).digest()))
    size = int(rng.choice(_SIZES) if rng.integers(2) else rng.integers(16384, 1 << 16))
    match rng.integers(5):
        case 0:  # a few bytes by a steep law, anywhere
            used = rng.choice(256, rng.integers(2, 60), replace=False)
            share = rng.exponential(1, len(used)) ** rng.uniform(1, 9)
            plane = rng.choice(used, size, p=share / share.sum())
        case 1:  # exponents
            plane = rng.normal(rng.integers(256), rng.uniform(0.2, 20), size).astype(np.int64)
        case 2:
            plane = rng.geometric(rng.uniform(0.02, 0.99), size) + rng.integers(256)
        case 3:  # as good as random
            plane = rng.integers(0, rng.integers(2, 257), size)
        case _:  # some bytes in one place only
            plane = np.full(size, rng.integers(256))
            at = rng.integers(size)
            plane[at : at + rng.integers(1, size)] = rng.integers(256)
            plane[: rng.integers(1, size)] += rng.integers(0, 3)
    return plane.astype(np.uint8)


def stored(plane, room=None):
    """The frame of a plane; b"": it is left to zstd. Memory around it stays unchanged."""
    from penstock.codecs.huffman import store_codes

    room = plane.size if room is None else room
    memory = np.frombuffer(bytearray(_GUARD + bytes(room) + _GUARD), np.uint8)
    out, before = memory[len(_GUARD) : len(_GUARD) + room], plane.copy()
    length = store_codes(plane, out)
    assert bytes(memory[: len(_GUARD)]) == bytes(memory[len(_GUARD) + room :]) == _GUARD
    assert length < max(plane.size, 1)
    assert (plane == before).all()
    return bytes(out[:length])


def read(frame, size):
    """The plane that both libraries read from it; they accept no more than the frame holds."""
    one = zstandard.ZstdDecompressor().decompress(frame)
    assert entropy.zstd.decompress(frame) == one
    assert zstandard.get_frame_parameters(frame).content_size == size == len(one)
    return np.frombuffer(one, np.uint8)


def code(seed: bytes):
    """A fuzz target: a plane is coded so that zstd reads it, or left to zstd."""
    plane = plane_of(seed)
    frame = stored(plane)
    assert not frame or (read(frame, plane.size) == plane).all()
    return "coded" if frame else "left"
