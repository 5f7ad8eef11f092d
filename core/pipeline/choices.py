"""Chooses the chains of one save's chunks while it runs, and measures what the choice needs."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.core.concurrency.copy_bytes import copy_bytes
from penstock.core.concurrency.workers import BusyClock, CoreMeter
from penstock.core.errors import CodecError
from penstock.core.plan.choice import Choice, CodecChooser, Encoding, cores_left
from penstock.core.plan.save import context_of
from penstock.core.reporting.reports import CodecChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from penstock.core.abc import CodecContext
    from penstock.core.concurrency.workers import Workers
    from penstock.core.pipeline.chain import CodecChain
    from penstock.core.pipeline.chunks import Captured, ChunkResult
    from penstock.core.plan.save import SavePlan

log = logging.getLogger("penstock")

_LEAST_BYTES = 1 << 20  # of a class; encoding fewer gains nothing that counts
_LEAST_PROBE_BYTES = 4 << 20
_MOST_PROBE_BYTES = 64 << 20
_PROBE_SHARE = 16  # of a save that has to measure the store, the share that is written raw first
_PROBE_S = 0.1  # the first writes also create a file and allocate space: shorter is too short

# floatsplit and zstd take a time for each call besides that for each byte: two sizes tell them
# apart. The first call warms up, and its time is not taken.
_SMALL_BYTES = 256 << 10
_LARGE_BYTES = 1 << 20
_SAMPLES = (_SMALL_BYTES, _SMALL_BYTES, _LARGE_BYTES)
_MOST_FASTER = 2.0  # than a sample on the whole: differences of two times are noisy
_UNMEASURED = Choice(None, "raw: all of it was needed to measure the store")


@dataclass(frozen=True, slots=True)
class AutoChains:
    """The objects of a save whose chains are chosen while it runs, and the choices there are.

    Attributes:
        classes: The class of objects by the number of the chain that the plan says for them.
        candidates: The number of the chain by the name of its codec.
        chooser: Remembers what earlier saves have measured.
        meter: Says how many cores encoding may use.
    """

    classes: Mapping[int, str]
    candidates: Mapping[str, int]
    chooser: CodecChooser
    meter: CoreMeter


class Effort:
    """The processor's time that a worker takes to encode one chunk, from now on.

    Attributes:
        core_s: The time in seconds, once encoding has ended.
    """

    def __init__(self) -> None:
        self.core_s = 0.0
        self._began = time.thread_time()

    def end_encoding(self) -> None:
        """Count the time until now as that of encoding."""
        self.core_s = time.thread_time() - self._began


@dataclass(slots=True)
class _Sums:
    raw_bytes: int = 0
    stored_bytes: int = 0
    core_s: float = 0.0
    clock: BusyClock = field(default_factory=BusyClock)


@dataclass(frozen=True, slots=True)
class _Sample:
    data: memoryview
    context: CodecContext


@dataclass(slots=True)
class _Class:
    """A class of objects in this save."""

    total_bytes: int = 0
    longest_bytes: int = 0
    samples: dict[str, Future[Encoding]] = field(default_factory=dict)
    choice: Choice | None = None


class ChainChoices:
    """Chooses the chains of one save.

    Workers call `begin_encoding` and `end_encoding`, one thread all other methods.

    Until the bandwidth of the store is known chunks are written raw, in rounds: a round that was
    over too soon to tell is followed by one of twice the size. So a fast store gets all of a small
    save raw, and a slow one a small part. Samples are encoded by the workers.
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
        """Choose nothing yet.

        Args:
            plan: The plan of the save.
            chains: Chains by number.
            auto: The objects to choose for, and the choices; None: the plan says all chains.
            store: The URL of the store.
            workers: The threads that encode.
            blocking: Whether the caller waits for the save, so that nothing trains meanwhile.
        """
        auto = auto or AutoChains({}, {}, CodecChooser(()), CoreMeter())
        self._auto = auto
        self._plan = plan
        self._chains = chains
        self._store = store
        self._workers = workers
        self._chooser = auto.chooser
        self._classes: dict[str, _Class] = {}
        for chunk in plan.chunks:
            if chunk.chain in auto.classes:
                name = auto.classes[chunk.chain]
                one = self._classes.setdefault(name, _Class())
                one.total_bytes += chunk.length
                one.longest_bytes = max(one.longest_bytes, chunk.length)
        total = sum(one.total_bytes for one in self._classes.values())
        auto.meter.begin_save()
        self._chooser.begin_save()
        self._probing = self._chooser.needs_bandwidth(store)
        self._round_bytes = min(max(total // _PROBE_SHARE, _LEAST_PROBE_BYTES), _MOST_PROBE_BYTES)
        self._left_bytes = self._round_bytes
        self._before_round = (0, 0.0)
        busy = 0.0 if blocking else auto.meter.busy
        self._cores = cores_left(auto.meter.cores, busy, workers.count)
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()  # guards all below, which workers add to
        self._encoded: dict[tuple[str, int], _Sums] = defaultdict(_Sums)

    def number(self, index: int) -> int:
        """Return the number of the chain of the chunk `index`; 0 while none is chosen."""
        chain = self._plan.chunks[index].chain
        return self._numbers.get(index, 0) if chain in self._auto.classes else chain

    def chain(self, index: int) -> CodecChain | None:
        """Return the chain of the chunk `index`; None is raw."""
        return self._chains[self.number(index)]

    def is_open(self, index: int) -> bool:
        """Whether the chain of the chunk `index` is chosen while the save runs."""
        return self._plan.chunks[index].chain in self._auto.classes

    def take(self, captured: Sequence[Captured]) -> tuple[list[Captured], list[Captured]]:
        """Return the chunks whose chains are chosen now, and the rest; call `decide` for these."""
        chosen: list[Captured] = []
        rest: list[Captured] = []
        for item in captured:
            if rest:
                rest.append(item)  # raw chunks keep the order of the plan
                continue
            if not self.is_open(item.index):
                chosen.append(item)
                continue
            name = self._auto.classes[self._plan.chunks[item.index].chain]
            one = self._classes[name]
            if one.choice is None:
                self._try_to_choose(name, one, item)
            choice = one.choice
            if choice is None and not self._tells(one, item):
                choice = self._chooser.choose_for_few()
            if choice is not None:
                self._numbers[item.index] = self._number_of(choice)
                chosen.append(item)
            elif self._probing and self._left_bytes > 0:
                self._left_bytes -= item.view.nbytes
                chosen.append(item)
            else:
                rest.append(item)
        return chosen, rest

    def decide(self, raw_written: Callable[[], tuple[int, float]]) -> None:
        """Measure the store if it is not known yet, so that `take` takes what it left.

        Args:
            raw_written: Waits until no raw bytes are in flight; returns how many of this save were
                written, and the seconds in which they were in flight.
        """
        if not self._probing:
            return
        now = raw_written()
        size_bytes, seconds = now[0] - self._before_round[0], now[1] - self._before_round[1]
        if seconds < _PROBE_S:
            self._round_bytes *= 2
            self._left_bytes = self._round_bytes
            self._before_round = now
            return
        self._probing = False
        self._chooser.note_raw(self._store, size_bytes, seconds)

    def begin_encoding(self, index: int) -> Effort:
        """Note that a worker begins to encode a chunk; see `end_encoding`."""
        if self.is_open(index):
            with self._lock:
                clock = self._encoded[self._key(index)].clock
            clock.start()
        return Effort()

    def end_encoding(self, index: int, stored_bytes: int, effort: Effort) -> None:
        """Note that a worker has encoded a chunk, and handed its frame on to the store.

        Args:
            index: The number of the chunk.
            stored_bytes: The length of its frame.
            effort: From `begin_encoding`.
        """
        if not self.is_open(index):
            return
        with self._lock:
            sums = self._encoded[self._key(index)]
            sums.raw_bytes += self._plan.chunks[index].length
            sums.stored_bytes += stored_bytes
            sums.core_s += effort.core_s
        sums.clock.stop()

    def _key(self, index: int) -> tuple[str, int]:
        return self._auto.classes[self._plan.chunks[index].chain], self.number(index)

    def max_encoded_size(self) -> int:
        """Return the memory that any frame of the save may need."""
        lengths: dict[int, int] = {}  # the longest chunk of each number that the plan says
        for chunk in self._plan.chunks:
            lengths[chunk.chain] = max(chunk.length, lengths.get(chunk.chain, 0))
        open_length = max((lengths.get(n, 0) for n in self._auto.classes), default=0)
        for number in self._auto.candidates.values():
            lengths[number] = max(open_length, lengths.get(number, 0))
        found = ((self._chains[number], longest) for number, longest in lengths.items())
        return max((chain.max_encoded_size(n) for chain, n in found if chain), default=0)

    def finish(self, raw_bytes: int, raw_s: float) -> None:
        """Remember for the next saves what this one measured.

        Args:
            raw_bytes: The raw bytes that the store took.
            raw_s: The seconds in which such writes were in flight.
        """
        codecs = {number: codec for codec, number in self._auto.candidates.items()}
        for (name, number), sums in self._encoded.items():
            if sums.raw_bytes >= _LEAST_BYTES:
                encoding = Encoding(
                    sums.raw_bytes / max(sums.stored_bytes, 1),
                    sums.raw_bytes / max(sums.core_s, 1e-9),
                    sums.raw_bytes / max(sums.clock.seconds, 1e-9),
                )
                self._chooser.note_encoding(name, codecs[number], encoding)
        self._chooser.note_raw(self._store, raw_bytes, raw_s)
        choices = {
            name: one.choice or _UNMEASURED
            for name, one in self._classes.items()
            if one.total_bytes >= _LEAST_BYTES
        }
        for name in self._chooser.note_choices(choices):
            log.info("codecs of %s from now on: %s", name, choices[name].why)
        self._auto.meter.end_save()

    def report(self, results: Mapping[int, ChunkResult]) -> tuple[CodecChoice, ...]:
        """Return what was chosen, by class; `results` are those of chunks, by number."""
        stored: dict[str, int] = defaultdict(int)
        for number, result in results.items():
            chunk = self._plan.chunks[number]
            if chunk.chain in self._auto.classes:
                stored[self._auto.classes[chunk.chain]] += result.length
        return tuple(
            _reported(name, one, stored[name]) for name, one in sorted(self._classes.items())
        )

    def _tells(self, one: _Class, item: Captured) -> bool:
        """Whether a chunk is long enough to say something about the longer ones of its class."""
        return item.view.nbytes >= min(one.longest_bytes, _LARGE_BYTES) // 2

    def _number_of(self, choice: Choice) -> int:
        return 0 if choice.codec is None else self._auto.candidates[choice.codec]

    def _try_to_choose(self, name: str, one: _Class, item: Captured) -> None:
        """Choose if the store is known; begin to measure the codecs if they are not."""
        if one.total_bytes < _LEAST_BYTES:
            one.choice = self._chooser.choose_for_few()
            return
        if not self._tells(one, item):
            return
        if not one.samples and self._chooser.needs_samples(name):
            one.samples = self._start_samples(item)
        if not self._probing:
            self._choose(name, one)

    def _choose(self, name: str, one: _Class) -> None:
        for codec, sample in one.samples.items():
            self._chooser.note_sample(name, codec, sample.result())
        one.samples = {}
        one.choice = self._chooser.choose(name, self._store, self._cores)

    def _start_samples(self, item: Captured) -> dict[str, Future[Encoding]]:
        samples = self._samples(item)
        return {
            codec: self._workers.submit(
                _sampler(self._chains[number], samples, workers=self._workers.count)
            )
            for codec, number in self._auto.candidates.items()
        }

    def _samples(self, item: Captured) -> list[_Sample]:
        """Copy pieces of a chunk: its memory may be released before the workers get to them."""
        chunk = self._plan.chunks[item.index]
        found: list[_Sample] = []
        context = context_of(self._plan, chunk)
        for number, most in enumerate(_SAMPLES):
            size = min(most, chunk.length)
            size -= size % context.itemsize
            at = (chunk.length - size) * number // len(_SAMPLES)
            at -= at % context.itemsize
            data = memoryview(bytearray(size))
            copy_bytes(data, item.view[at : at + size])
            shape, start = context.shape, context.start + at
            if len(chunk.pieces) > 1:
                shape, start = (size // context.itemsize,), 0
            part = replace(context, shape=shape, start=start, raw_length=size)
            found.append(_Sample(data, part))
        return found


def _sampler(
    chain: CodecChain | None, samples: Sequence[_Sample], *, workers: int
) -> Callable[[], Encoding]:
    assert chain is not None

    def task() -> Encoding:
        sizes = [sample.data.nbytes for sample in samples]
        out = memoryview(bytearray(chain.max_encoded_size(max(sizes))))
        times: list[float] = []
        stored = 0
        wall_began = time.monotonic()
        try:
            for sample in samples:
                began = time.thread_time()
                stored += chain.encode(sample.data, out, context=sample.context).length
                times.append(time.thread_time() - began)
        except CodecError as error:
            log.debug("a sample could not be encoded, so the codec is not chosen: %s", error)
            return Encoding(1.0, 1.0)
        speed = _speed(sizes, times)
        # On a machine that others keep busy a worker has only a part of a core.
        share = min(1.0, sum(times) / max(time.monotonic() - wall_began, 1e-9))
        return Encoding(sum(sizes) / max(stored, 1), speed, workers * speed * share, is_sample=True)

    return task


def _speed(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return bytes per second of long chunks, from the times of a warm-up, a small and a large."""
    whole = sizes[-1] / max(times[-1], 1e-9)
    more, longer = sizes[-1] - sizes[-2], times[-1] - times[-2]
    if more <= 0 or longer <= 0:
        return whole
    return min(max(more / longer, whole), _MOST_FASTER * whole)


def _reported(name: str, one: _Class, stored_bytes: int) -> CodecChoice:
    choice = one.choice or _UNMEASURED
    encoding = choice.encoding
    return CodecChoice(
        name,
        choice.codec,
        choice.why,
        one.total_bytes,
        stored_bytes,
        None if encoding is None else encoding.ratio,
        None if encoding is None else encoding.speed(choice.cores),
        choice.cores,
        choice.store_bytes_per_s,
    )
