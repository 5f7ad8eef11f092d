"""Chooses codecs for classes of objects from what was measured while saving. Sans-IO.

A class is a role and a dtype: `optimizer float32`. A save takes as long as the slower one of two:
encoding, and writing what encoding gives. So a codec is worth

    min(cores x speed of one core, speed achieved, bandwidth of the store x ratio)

of raw bytes per second, and storing the bytes as they are is worth the bandwidth of the store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.types import Role

CANDIDATES: tuple[tuple[str, dict[str, int]], ...] = (
    ("floatsplit", {}),
    ("lz4", {}),
    ("zstd", {"level": 1}),
)
"""The codecs to choose from, with their options: lossless ones that keep up with a store. Those
that are not installed are left out."""

_LEAST_GAIN = 1.05  # readers have to decode, and figures are not exact
_ALIKE = 0.97  # of two chains that are so close the one that takes less of the cores is better
_LEAST_CORES = 0.25  # even a busy machine gives a background thread its turn
_VALID_SAVES = 8  # figures are measured again after so many saves
_LEAST_MEASURED_BYTES = 4 << 20  # fewer bytes tell no bandwidth
_FULL_WEIGHT_BYTES = 64 << 20  # fewer count less: the store's latency is a larger part of them
_CHANGED = 0.2  # figures of a class are measured again when a ratio differs by more than this part
_GB = 1e9

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoding:
    """What encoding some bytes of a class showed.

    Attributes:
        ratio: Raw bytes for each stored byte.
        core_bytes_per_s: Raw bytes per second of the processor's time.
        achieved_bytes_per_s: Raw bytes per second from the first chunk that was taken to the last
            frame that was handed to the store, whatever workers had to wait for. Of samples, what
            the workers' share of the cores would allow.
        is_sample: Whether samples showed it: then nothing was achieved yet.
    """

    ratio: float
    core_bytes_per_s: float
    achieved_bytes_per_s: float = math.inf
    is_sample: bool = False

    def speed(self, cores: float) -> float:
        """Return raw bytes per second that `cores` encode."""
        return min(cores * self.core_bytes_per_s, self.achieved_bytes_per_s)

    def merged(self, other: Encoding) -> Encoding:
        """Return the mean of an older one and `other`, a newer one."""
        return Encoding(
            (self.ratio + other.ratio) / 2,
            (self.core_bytes_per_s + other.core_bytes_per_s) / 2,
            other.achieved_bytes_per_s
            if self.is_sample
            else (self.achieved_bytes_per_s + other.achieved_bytes_per_s) / 2,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for one class.

    Attributes:
        codec: The name of the codec; None stores the class raw.
        why: The reason, in words.
        encoding: What is known of the codec: of a raw class, of the best one for it, if any.
        cores: The cores that encoding may use.
        store_bytes_per_s: The bandwidth of the store; None if it is not known.
    """

    codec: str | None
    why: str
    encoding: Encoding | None = None
    cores: float = 0.0
    store_bytes_per_s: float | None = None


@dataclass(slots=True)
class _Figure(Generic[T]):
    value: T
    save: int  # the number of the save that measured it


def cores_left(cores: float, busy: float, workers: int) -> float:
    """Return the cores that encoding may use.

    Args:
        cores: The cores of this process: those it may run on, divided among the ranks of the
            machine.
        busy: The cores that the training loop uses. 0 while the caller waits for the save.
        workers: The threads that encode.
    """
    return min(max(cores - busy, _LEAST_CORES), workers)


def class_of(role: Role, dtype: str) -> str:
    """Return the class of an object, as codecs are chosen for it."""
    return f"{role.value} {dtype}"


class CodecChooser:
    """Remembers what saves have measured, and chooses by it.

    One thread at a time calls the methods, and one save at a time feeds it.
    """

    def __init__(self, codecs: tuple[str, ...]) -> None:
        """Know nothing yet.

        Args:
            codecs: The names of the codecs to choose from.
        """
        self.codecs = codecs
        self._save = 0
        self._alone: str | None = None
        self._chosen: dict[str, str | None] = {}
        self._stores: dict[str, _Figure[float]] = {}
        self._encodings: dict[str, dict[str, _Figure[Encoding]]] = {}

    def begin_save(self) -> None:
        """Count a save: figures of saves long ago are no longer used."""
        self._save += 1

    def needs_bandwidth(self, store: str) -> bool:
        """Whether some bytes should be written raw to `store` first, to measure it."""
        return not self._is_valid(self._stores.get(store))

    def needs_samples(self, name: str) -> bool:
        """Whether samples of the class `name` should be encoded before the choice."""
        known = self._encodings.get(name, {})
        return not all(self._is_valid(known.get(codec)) for codec in self.codecs)

    def note_raw(self, store: str, size_bytes: int, seconds: float) -> None:
        """Note that so many raw bytes took so long to write."""
        if size_bytes < _LEAST_MEASURED_BYTES or seconds <= 0:
            return
        old, now = self._stores.get(store), size_bytes / seconds
        # A later figure of the same save includes the bytes of the earlier one.
        if old is not None and self._is_valid(old) and old.save != self._save:
            weight = min(1.0, size_bytes / _FULL_WEIGHT_BYTES) / 2
            now = old.value + weight * (now - old.value)
        self._stores[store] = _Figure(now, self._save)

    def note_sample(self, name: str, codec: str, encoding: Encoding) -> None:
        """Note what samples of the class `name` showed."""
        self._encodings.setdefault(name, {})[codec] = _Figure(encoding, self._save)

    def note_encoding(self, name: str, codec: str, encoding: Encoding) -> None:
        """Note what encoding chunks of the class `name` showed, other than samples."""
        known = self._encodings.setdefault(name, {})
        old = known.get(codec)
        if old is None or abs(encoding.ratio / old.value.ratio - 1) > _CHANGED:
            # The state is another one than it was, also for the other codecs: as the zeros that
            # an optimizer begins with.
            known.clear()
            known[codec] = _Figure(encoding, self._save)
        else:
            known[codec] = _Figure(old.value.merged(encoding), self._save)

    def note_choices(self, choices: Mapping[str, Choice]) -> list[str]:
        """Note what a save chose for all classes that are large enough to choose for.

        Returns:
            The classes that got another codec than before, or are new.
        """
        codecs = {choice.codec for choice in choices.values()}
        self._alone = codecs.pop() if len(codecs) == 1 else None
        before = self._chosen
        news = [n for n, c in choices.items() if n not in before or before[n] != c.codec]
        self._chosen |= {name: choice.codec for name, choice in choices.items()}
        return news

    def choose_for_few(self) -> Choice:
        """Choose for a class of too few bytes to gain anything."""
        if self._alone is None:
            return Choice(None, "raw: too few bytes to gain anything")
        # One more blob costs a store more than a few bytes: a file to create and to sync.
        return Choice(self._alone, f"{self._alone}: too few bytes for a blob of their own")

    def choose(self, name: str, store: str, cores: float) -> Choice:
        """Choose for the class `name`, of which samples were noted.

        Args:
            name: The class.
            store: The URL of the store.
            cores: The cores that encoding may use, from `cores_left`.
        """
        known = self._stores.get(store)
        if known is None:
            return Choice(None, "raw: the bandwidth of the store is not known yet")
        raw = known.value
        found = {
            codec: figure.value
            for codec, figure in self._encodings.get(name, {}).items()
            if codec in self.codecs and figure.value.ratio > 1
        }
        takes = f"the store takes {raw / _GB:.2f} GB/s"
        if not found:
            why = f"raw: no codec makes it smaller; {takes}"
            return Choice(None, why, None, cores, raw)
        worth = {c: min(e.speed(cores), raw * e.ratio) for c, e in found.items()}
        alike = [c for c in worth if worth[c] >= _ALIKE * max(worth.values())]
        codec = max(alike, key=lambda c: found[c].core_bytes_per_s)
        best = found[codec]
        said = f"{codec}: {_in_words(best, cores)}"
        if worth[codec] < _LEAST_GAIN * raw:
            return Choice(None, f"raw: {takes}; {said}", best, cores, raw)
        return Choice(codec, f"{said}; {takes}", best, cores, raw)

    def _is_valid(self, figure: _Figure[T] | None) -> bool:
        return figure is not None and self._save - figure.save < _VALID_SAVES


def _in_words(encoding: Encoding, cores: float) -> str:
    """Return `1.51x at 1.70 GB/s x 2 cores`."""
    speed = f"{encoding.core_bytes_per_s / _GB:.2f} GB/s x {cores:.3g} cores"
    if encoding.achieved_bytes_per_s < cores * encoding.core_bytes_per_s:
        speed = f"{encoding.achieved_bytes_per_s / _GB:.2f} GB/s achieved"
    return f"{encoding.ratio:.2f}x at {speed}"
