"""Chooses codecs for classes of objects under a rule with `codecs = "auto"`.

A class is a role and a dtype: `optimizer float32`. The first save to a store writes raw frames
until the store's rate is known. Then every candidate encodes one sample of each class. The choice
stays until the size of the class, its compression ratio or the rate changes by a factor of two.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.concurrency.workers import usable_cores
from penstock.core.errors import CodecError
from penstock.core.plan.save import context_of
from penstock.core.reporting.reports import CodecChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.core.abc import CodecContext
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chunks import Captured, ChunkResult
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.save import SavePlan
    from penstock.core.types import Role

log = logging.getLogger("penstock")

CANDIDATES: tuple[tuple[str, dict[str, int]], ...] = (
    ("floatsplit", {}),
    ("lz4", {}),
    ("zstd", {"level": 1}),
)
"""The codecs to choose from, with their options: lossless ones that keep up with a store. Codecs
that are not installed are skipped."""

_LEAST_GAIN = 1.05  # readers have to decode, and figures are not exact
_LEAST_CORES = 0.25  # even a busy machine gives a background thread its turn
_LEAST_BYTES = 1 << 20  # of a class; encoding fewer gains too little
_PROBE_BYTES = 4 << 20
_PROBE_S = 0.1  # not shorter: the first writes also create a file and allocate space
_SAMPLE_BYTES = 2 << 20  # long enough that the fixed time of a call is a small part
_RUNS = 3  # the first run loads the codec; the fastest counts
_CHANGED = 2.0


class Sample(NamedTuple):
    """The result of encoding a sample with a codec.

    Attributes:
        ratio: Raw bytes for each stored byte.
        bytes_per_s: Raw bytes per second of CPU time, which other load does not change.
    """

    ratio: float
    bytes_per_s: float


@dataclass(slots=True)
class StoreChoices:
    """The measurements and choices of earlier saves for one store.

    Attributes:
        bytes_per_s: The rate that choices depend on; None: not measured yet.
        by_class: The choices. In each, `bytes_raw` is the size of the class at the time of the
            choice; 0 makes the next save sample the class again.
    """

    bytes_per_s: float | None = None
    by_class: dict[str, CodecChoice] = field(default_factory=dict)

    def note_save(self, size_bytes: int, seconds: float) -> None:
        """Make the next save choose again if this save's rate differs from the measured one.

        Args:
            size_bytes: The bytes that the store accepted.
            seconds: The time in which writes were in flight.
        """
        if seconds < _PROBE_S:
            return
        rate = size_bytes / seconds
        if self.bytes_per_s is None or _has_changed(rate, self.bytes_per_s):
            self.bytes_per_s = rate
            self.by_class = {n: replace(c, bytes_raw=0) for n, c in self.by_class.items()}


@dataclass(frozen=True, slots=True)
class AutoChains:
    """The classes of objects whose chains are chosen while a save runs.

    Attributes:
        classes: The class by the number of its chain in the plan.
        candidates: The number of the chain by the name of its codec.
        stores: The measurements and choices for each store, by its URL.
    """

    classes: Mapping[int, str]
    candidates: Mapping[str, int]
    stores: dict[str, StoreChoices] = field(default_factory=dict)


def class_of(role: Role, dtype: str) -> str:
    """Return the class of an object. Codecs are chosen per class."""
    return f"{role.value} {dtype}"


def choose(
    name: str, samples: Mapping[str, Sample], *, store_bytes_per_s: float, cores: float, spare: bool
) -> CodecChoice:
    """Return the codec with the least expected time for a class, or raw if that gains too little.

    Args:
        name: The class.
        samples: The result of each codec on a sample.
        store_bytes_per_s: The rate of the store.
        cores: The cores that encode.
        spare: Whether other cores are free to write. If not, encoding and writing take turns.
    """

    def seconds(sample: Sample) -> float:  # for each raw byte
        parts = 1 / (cores * sample.bytes_per_s), 1 / (store_bytes_per_s * sample.ratio)
        return max(parts) if spare else sum(parts)

    raw = CodecChoice(name, None, "", 0, 0, cores=cores, store_bytes_per_s=store_bytes_per_s)
    takes = f"the store takes {store_bytes_per_s / 1e9:.2f} GB/s"
    smaller = {codec: sample for codec, sample in samples.items() if sample.ratio > 1}
    if not smaller:
        return replace(raw, why=f"raw: no codec makes it smaller; {takes}")
    codec = min(smaller, key=lambda c: seconds(smaller[c]))
    best = smaller[codec]
    speed = f"{best.bytes_per_s / 1e9:.2f} GB/s x {cores:.3g} cores"
    figures = f"{codec}: {best.ratio:.2f}x at {speed}"
    pays = seconds(best) * store_bytes_per_s * _LEAST_GAIN <= 1
    return replace(
        raw,
        codec=codec if pays else None,
        why=f"{figures}; {takes}" if pays else f"raw: {takes}; {figures}",
        ratio=best.ratio,
        encode_bytes_per_s=cores * best.bytes_per_s,
    )


class ChainChoices:
    """Chooses the chains of one save. One thread calls all methods but `number` and `chain`.

    Until the store's rate is known, chunks are written raw, in rounds. If the writes so far took
    too little time to measure, the next round writes as many bytes again. So a small save to a fast
    store is all raw, and a save to a slow store is raw only in small part.
    """

    def __init__(
        self,
        plan: SavePlan,
        chains: Sequence[CodecChain | None],
        *,
        auto: AutoChains | None,
        store: str,
        workers: Workers,
        blocking: bool,
    ) -> None:
        """Reuse the choices of earlier saves for classes of about the same size.

        Args:
            plan: The plan of the save.
            chains: Chains by number.
            auto: The classes to choose for, and earlier choices; None: the plan's chains are final.
            store: The URL of the store.
            workers: The threads that encode.
            blocking: Whether the caller waits for the save, so that nothing trains meanwhile.
        """
        self._auto = auto or AutoChains({}, {})
        self._plan = plan
        self._chains = chains
        self._workers = workers
        self._kept = self._auto.stores.setdefault(store, StoreChoices())
        self._sizes: dict[str, int] = defaultdict(int)
        self._longest: dict[str, int] = defaultdict(int)
        for chunk in plan.chunks:
            if chunk.chain in self._auto.classes:
                name = self._auto.classes[chunk.chain]
                self._sizes[name] += chunk.length
                self._longest[name] = max(self._longest[name], chunk.length)
        self._choices = {
            name: choice
            for name, choice in self._kept.by_class.items()
            if name in self._sizes and not _has_changed(self._sizes[name], choice.bytes_raw)
        }
        self._probe_bytes = _PROBE_BYTES
        free = usable_cores() - (0 if blocking else 1)
        self._cores = min(max(free, _LEAST_CORES), workers.count)
        self._spare = free >= workers.count + 1
        self._numbers: dict[int, int] = {}

    def number(self, index: int) -> int:
        """Return the number of the chain of chunk `index`; 0 while none is chosen."""
        return self._numbers.get(index, 0) if self._is_open(index) else self._planned(index)

    def chain(self, index: int) -> CodecChain | None:
        """Return the chain of chunk `index`; None is raw."""
        return self._chains[self.number(index)]

    def take(self, captured: list[Captured]) -> tuple[list[Captured], list[Captured]]:
        """Return the chunks to write now, and the rest, which needs a call of `measure` first."""
        for at, item in enumerate(captured):
            if self._is_open(item.index) and not self._chooses(item):
                return captured[:at], captured[at:]
        return captured, []

    def measure(self, raw_written: Callable[[], tuple[int, float]]) -> None:
        """Measure the store's rate, or decide to write the same amount raw again.

        Args:
            raw_written: Waits until no raw bytes are in flight; returns the raw bytes that this
                save has written, and the seconds in which they were in flight.
        """
        size_bytes, seconds = raw_written()
        if seconds >= _PROBE_S:
            self._kept.bytes_per_s = size_bytes / seconds
        self._probe_bytes = max(size_bytes, _PROBE_BYTES)

    def finish(self, results: Mapping[int, ChunkResult], size_bytes: int, seconds: float) -> None:
        """Keep the choices of this save for the next ones.

        Args:
            results: The stored frames of chunks, by number.
            size_bytes: The bytes that the store accepted.
            seconds: The time in which writes were in flight.
        """
        raw: dict[str, int] = defaultdict(int)
        stored: dict[str, int] = defaultdict(int)
        for index, result in results.items():
            if result.chain and self._is_open(index):
                raw[self._class(index)] += self._plan.chunks[index].length
                stored[self._class(index)] += result.length
        before = self._kept.by_class
        kept = {n: c for n, c in self._choices.items() if self._sizes[n] >= _LEAST_BYTES}
        for name, choice in kept.items():
            if name not in before or before[name].codec != choice.codec:
                log.info("codecs of %s from now on: %s", name, choice.why)
        for name, size in raw.items():
            # If the state no longer resembles the sample (an optimizer begins with zeros, say), the
            # next save samples the class again.
            ratio = kept[name].ratio if name in kept else None
            if ratio is not None and _has_changed(size / max(stored[name], 1), ratio):
                kept[name] = replace(kept[name], bytes_raw=0)
        self._kept.by_class = kept
        self._kept.note_save(size_bytes, seconds)

    def report(self, results: Mapping[int, ChunkResult]) -> tuple[CodecChoice, ...]:
        """Return the choices by class; `results` has the stored frames of chunks, by number."""
        stored: dict[str, int] = defaultdict(int)
        for index, result in results.items():
            if self._is_open(index):
                stored[self._class(index)] += result.length
        unmeasured = CodecChoice("", None, "raw: all bytes were needed to measure the store", 0, 0)
        return tuple(
            replace(
                self._choices.get(name, unmeasured),
                objects=name,
                bytes_raw=size,
                bytes_stored=stored[name],
            )
            for name, size in sorted(self._sizes.items())
        )

    def _planned(self, index: int) -> int:
        return self._plan.chunks[index].chain

    def _is_open(self, index: int) -> bool:
        """Return whether the chain of chunk `index` is chosen while the save runs."""
        return self._planned(index) in self._auto.classes

    def _class(self, index: int) -> str:
        return self._auto.classes[self._planned(index)]

    def _chooses(self, item: Captured) -> bool:
        """Choose the chain of a chunk; return whether the chunk can be written now."""
        name = self._class(item.index)
        choice = self._choices.get(name)
        if choice is None:
            if self._sizes[name] < _LEAST_BYTES:
                choice = self._choices[name] = self._choice_for_few()
            elif 2 * item.view.nbytes < min(self._longest[name], _SAMPLE_BYTES):
                choice = self._choice_for_few()  # too short to represent longer chunks
            elif self._kept.bytes_per_s is not None:
                choice = self._choices[name] = self._choose(name, item, self._kept.bytes_per_s)
            elif self._probe_bytes <= 0:
                return False
            else:
                self._probe_bytes -= item.view.nbytes
                return True
        self._numbers[item.index] = self._auto.candidates[choice.codec] if choice.codec else 0
        return True

    def _choice_for_few(self) -> CodecChoice:
        """Return the choice for a class or chunk of few bytes, not worth a separate blob."""
        codecs = {c.codec for n, c in self._choices.items() if self._sizes[n] >= _LEAST_BYTES}
        codec = codecs.pop() if len(codecs) == 1 else None
        if codec is None:
            return CodecChoice("", None, "raw: too few bytes to gain anything", 0, 0)
        return CodecChoice("", codec, f"{codec}: too few bytes for a separate blob", 0, 0)

    def _choose(self, name: str, item: Captured, store_bytes_per_s: float) -> CodecChoice:
        """Make the workers encode the middle of a chunk with each codec, then choose."""
        chunk = self._plan.chunks[item.index]
        context = context_of(self._plan, chunk)
        size = min(_SAMPLE_BYTES, chunk.length) // context.itemsize * context.itemsize
        at = (chunk.length - size) // 2 // context.itemsize * context.itemsize
        shape, start = context.shape, context.start + at
        if len(chunk.pieces) > 1:
            shape, start = (size // context.itemsize,), 0
        context = replace(context, shape=shape, start=start, raw_length=size)
        data = item.view[at : at + size]
        futures = {}
        for codec, number in self._auto.candidates.items():
            chain = self._chains[number]
            assert chain is not None
            futures[codec] = self._workers.submit(partial(_sampled, chain, data, context))
        wait(futures.values())  # the chunk must not be given back while a worker reads it
        choice = choose(
            name,
            {codec: future.result() for codec, future in futures.items()},
            store_bytes_per_s=store_bytes_per_s,
            cores=self._cores,
            spare=self._spare,
        )
        return replace(choice, bytes_raw=self._sizes[name])


def _sampled(chain: CodecChain, data: memoryview, context: CodecContext) -> Sample:
    out = memoryview(bytearray(chain.max_encoded_size(data.nbytes)))
    times, stored = [], 0
    try:
        for _ in range(_RUNS):
            began = time.thread_time()
            stored = chain.encode(data, out, context=context).length
            times.append(time.thread_time() - began)
    except CodecError as error:
        log.debug("a sample could not be encoded, so the codec is not chosen: %s", error)
        return Sample(1.0, 1.0)
    return Sample(data.nbytes / max(stored, 1), data.nbytes / max(min(times), 1e-9))


def _has_changed(now: float, then: float) -> bool:
    return not then / _CHANGED < now < then * _CHANGED
