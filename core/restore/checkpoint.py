"""A read-only view of one committed checkpoint."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from penstock.core.abc import host_roots
from penstock.core.catalog.catalog import Catalog
from penstock.core.catalog.lender_report import find_lenders, records_newest_first
from penstock.core.catalog.notes import NotesOfRun
from penstock.core.catalog.survey import has_data
from penstock.core.concurrency.workers import Workers
from penstock.core.errors import (
    BlobNotFoundError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigError,
    DamagedError,
    SelectionError,
)
from penstock.core.format.records import blob_uid, commit_name
from penstock.core.pipeline.loader import Loader
from penstock.core.plan.reads import ObjectRequest
from penstock.core.plugins.registry import default_registry
from penstock.core.reporting.progress import Meter, metered
from penstock.core.reporting.reports import CheckpointInfo, CopyFound, Damage, VerifyReport
from penstock.core.restore.contents import AbsentChain, Contents
from penstock.core.restore.fill import (
    Opened,
    bytes_of,
    read_range,
    read_region,
)
from penstock.core.restore.restore import build_leaf, build_new
from penstock.core.restore.specs import Rounding, Specs
from penstock.core.restore.sweep import sweep
from penstock.core.suggest import nearest
from penstock.core.tree.paths import parse_path, show_path
from penstock.core.tree.select import Selection
from penstock.core.types import Kind, Region, TensorSpec, flat_view

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.core.abc import Backend, Tier
    from penstock.core.format.records import ObjectRecord, PartHead
    from penstock.core.pipeline.codec_chain import CodecChain
    from penstock.core.plan.reads import FrameJob
    from penstock.core.plugins.registry import Registry
    from penstock.core.reporting.progress import Meter
    from penstock.core.reporting.reports import LendingSave, Progress
    from penstock.core.restore.specs import ObjectSpec
    from penstock.core.types import BlobInfo, Buffer

log = logging.getLogger("penstock")

_FEW = 1000
_ATTEMPTS = 3  # the most attempts to verify a copy that changes meanwhile


class Checkpoint:
    """One committed checkpoint. Reads only the requested data, and verifies it.

    `keys()` returns shown paths, `specs()` shapes and dtypes. `ckpt["model/wte.weight"]` reads one
    object, `ckpt["model"]` a subtree, and `read(path, region)` a part of a tensor.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self._record = opened.contents.record

    @classmethod
    def open(
        cls,
        backend: Backend,
        step: int,
        *,
        registry: Registry | None = None,
        loader: Loader | None = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Open the checkpoint of `step`. Reads only its commit record.

        Raises:
            CheckpointNotFoundError: There is no such step; the message lists the steps.
            DamagedError: Its commit record cannot be read.
        """
        record = Catalog(backend).record(step)
        loader = loader or Loader(backend, Workers(2))
        registry = registry or default_registry()
        return cls(Opened.open(backend, record, loader, registry, allow_pickle=allow_pickle))

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._record.step

    @property
    def backend(self) -> Backend:
        """The backend that holds the checkpoint."""
        return self.opened.backend

    @property
    def contents(self) -> Contents:
        """The objects and containers of the checkpoint, which are read from its manifest."""
        return self.opened.contents

    @property
    def info(self) -> CheckpointInfo:
        """The facts in the commit record, and the notes added since."""
        record = self._record
        notes = NotesOfRun.of(self.backend, record).read(record)
        return CheckpointInfo(
            step=record.step,
            generation=record.generation,
            uid=record.uid,
            created=record.created,
            bytes_raw=record.bytes_raw,
            bytes_stored=record.bytes_stored,
            objects=record.objects,
            world_size=record.world_size,
            metadata=notes.metadata,
            references=tuple(record.references),
            codecs=record.codecs,
            providers=record.providers,
            plugins=record.plugins,
            tags=notes.tags,
        )

    def keys(self) -> list[str]:
        """Return the shown paths of all objects, in tree order."""
        return [show_path(o.path) for o in self.contents.objects()]

    def objects(self) -> list[ObjectRecord]:
        """Return the records of all objects, in tree order."""
        return self.contents.objects()

    def specs(self) -> Mapping[str, ObjectSpec]:
        """Return the spec of each object by shown path, in tree order, without reading data.

        Builds no tensor and needs no torch. Looking up one path reads a small part of the manifest;
        iterating reads the whole manifest.
        """
        return Specs(self.contents)

    def __contains__(self, path: object) -> bool:
        return path in self.specs()

    def __len__(self) -> int:
        return self._record.objects

    def __getitem__(self, path: str) -> Any:
        """Read one object, or the subtree below a container.

        Builds nothing above `path`. A provider builds an optimizer only as a whole, so a part of an
        optimizer is returned as a dict.

        Raises:
            KeyError: The checkpoint has nothing at `path`.
            SelectionError: `path` is not a string.
        """
        record = self._locate(path)
        if record is not None:
            return build_leaf(self.opened, record, record.spec, None)
        parts = parse_path(path)
        selection = Selection.subtree(parts)
        if not self.contents.touched(selection)[0]:
            raise self._nothing_at(path)
        return build_new(self.opened, selection=selection, device=None, at=parts)[0]

    def read(self, path: str, region: Region | slice | tuple[slice, ...] | None = None) -> Any:
        """Read a tensor, or a region of it.

        Fetches only the blocks of raw frames, and the encoded frames, that hold the region.

        Args:
            path: Shown path of a tensor; without a region, also of a plain value.
            region: A `Region`, or slices (step 1) for the leading dimensions; None: all.

        Returns:
            A tensor (or array) of the region's shape; for a plain value, the value.

        Raises:
            KeyError: No object at `path`.
            SelectionError: `path` is not a string, `region` is neither a region nor slices or is
                not within the tensor, or a region of a plain value is requested.
            DamagedError: Stored bytes differ from those written.
        """
        record = self._record_at(path)
        spec = record.spec
        if region is None:
            return build_leaf(self.opened, record, spec, None)
        if record.kind is Kind.VALUE:
            msg = f"{path} is a plain value, which has no regions: read it without a region"
            raise SelectionError(msg)
        region = _as_region(region, spec.shape, path)
        data = read_region(self.opened, record, region)
        return build_leaf(
            self.opened, record, TensorSpec(spec.dtype, spec.itemsize, region.sizes), data
        )

    def load(
        self,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        device: str | None = None,
        streamed: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Any:
        """Return the tree of this checkpoint, or a part of it; see `Checkpointer.load`.

        Args:
            include: As for `Checkpointer.load`.
            exclude: As for `Checkpointer.load`.
            device: As for `Checkpointer.load`.
            streamed: Whether to return each plain tensor as a `Streamed`, which reads and verifies
                its bytes from this checkpoint on request. A tree larger than memory can then be
                saved elsewhere, or written to files. Tied tensors are one `Streamed`. Needs
                `device=None`.
            on_progress: As for `Checkpointer.load`.

        Raises:
            ConfigError: `streamed` and `device` are both set.
            DamagedError: Stored bytes differ from those written; names the paths.
            SelectionError: A pattern matches nothing.
        """
        if streamed and device is not None:
            msg = f"streamed=True builds no tensors, so there is nothing to put on {device!r}"
            raise ConfigError(msg)
        selection = Selection(include, exclude)
        with metered(on_progress, "the load") as meter:
            opened = replace(self.opened, meter=meter)
            return build_new(opened, selection=selection, device=device, streamed=streamed)[0]

    def read_into(self, path: str, out: Buffer, *, start: int = 0) -> None:
        """Fill `out` with the bytes of a tensor from byte `start` on.

        Needs no torch, and no memory besides `out` for objects stored without a codec. The bytes
        are the elements, row by row.

        Args:
            path: Shown path of a tensor.
            out: Writable memory for whole elements.
            start: The first byte to read, at the start of an element.

        Raises:
            KeyError: No object at `path`.
            SelectionError: A plain value is at `path`, or the bytes are not whole elements of the
                tensor.
            DamagedError: Stored bytes differ from those written; `out` is undefined.
        """
        record = self._record_at(path)
        view, spec = flat_view(out), record.spec
        if record.kind is Kind.VALUE:
            msg = f"{path} is a plain value, which has no elements: read it with `read`"
            raise SelectionError(msg)
        whole = start % spec.itemsize == view.nbytes % spec.itemsize == 0
        if not whole or not 0 <= start <= start + view.nbytes <= spec.nbytes:
            msg = (
                f"bytes {start} to {start + view.nbytes} are not whole elements of {path}, which "
                f"has {spec.nbytes} bytes, {spec.itemsize} for each element"
            )
            raise SelectionError(msg)
        if view.nbytes:
            read_range(self.opened, record, start, view)

    def verify(
        self, *, deep: bool = True, on_progress: Callable[[Progress], None] | None = None
    ) -> VerifyReport:
        """Verify the stored bytes, and report all damage, not only the first.

        With tiers, verifies the copy in each tier.

        Args:
            deep: Whether to read, verify and decode every frame. If not, only the manifest is
                verified, and the sizes of the blobs are compared.
            on_progress: As for `Checkpointer.restore`.

        Raises:
            CheckpointGoneError: The checkpoint was deleted meanwhile.
        """
        began = time.monotonic()
        with metered(on_progress, "the verification") as meter:
            copies: Sequence[CopyFound | None]
            if self.backend.tiers:
                copies = self.verify_copies(meter, deep=deep)
            else:
                copies = [self._verify(meter, deep=deep)]
            return self.report_of(copies, deep=deep, began=began)

    def verify_copies(self, meter: Meter, *, deep: bool) -> list[CopyFound | None]:
        """Verify the copy in each tier, as `verify` does; None for a tier without a copy.

        Raises:
            CheckpointGoneError: No tier has a copy any longer.
        """
        copies = [self.verify_copy(tier, meter, deep=deep) for tier in self.backend.tiers]
        if any(copy is not None and not copy.damaged for copy in copies):
            # A lost host has taken its files along, which is no damage of a tier on hosts.
            for number, place in host_roots(self.backend).items():
                if not has_data(place, self._record):
                    copies[number] = None
        if not any(copies):
            self.opened.check_there()
        return copies

    def verify_copy(self, tier: Tier, meter: Meter, *, deep: bool) -> CopyFound | None:
        """Verify the copy in one tier; None if the tier has no copy.

        The copy may be evicted or copied again meanwhile, and then seem damaged. So if it seems
        damaged and its commit record has changed, it is verified again.
        """
        copy: CopyFound | None = None
        for _ in range(_ATTEMPTS):
            before = _records_at(tier.backend, self.step)
            copy = self._verify_in(tier, meter, deep=deep)
            is_bad = copy is None or bool(copy.damaged)
            if not is_bad or _records_at(tier.backend, self.step) == before:
                break
        return copy

    def _verify_in(self, tier: Tier, meter: Meter, *, deep: bool) -> CopyFound | None:
        try:
            checkpoint = Checkpoint.open(
                tier.backend,
                self.step,
                registry=self.opened.registry,
                loader=self.opened.loader.of(tier.backend),
            )
            copy = checkpoint._verify(meter, deep=deep)  # noqa: SLF001 - its own class
        except (CheckpointNotFoundError, CheckpointGoneError):
            return None
        except DamagedError as error:
            return CopyFound(tier.name, None, tuple(Damage(n, str(error)) for n in error.damaged))
        return replace(copy, tier=tier.name)

    def report_of(
        self, copies: Sequence[CopyFound | None], *, deep: bool, began: float
    ) -> VerifyReport:
        """Return the report on copies, whose verification began at `began` (monotonic)."""
        present = [copy for copy in copies if copy is not None]
        damaged = [
            replace(damage, detail=f"in tier {copy.tier}: {damage.detail}") if copy.tier else damage
            for copy in present
            for damage in copy.damaged
        ]
        return VerifyReport(
            step=self.step,
            ok=not damaged,
            damaged=tuple(damaged),
            objects=self._record.objects,
            frames=sum(copy.frames for copy in present),
            bytes_read=sum(copy.bytes_read for copy in present),
            deep=deep,
            seconds=time.monotonic() - began,
            tiers=tuple(copy.tier for copy in present if copy.tier),
            not_decoded=tuple(sorted({why for copy in present for why in copy.not_decoded})),
            lossy=tuple(sorted({name for copy in present for name in copy.lossy})),
            links=tuple(dict.fromkeys(link for copy in present for link in copy.links)),
        )

    def rounding(self, objects: Iterable[ObjectRecord]) -> Rounding:
        """Return the codecs of `objects` that round, or that may round. Reads no data.

        A tied object is rounded if its owner is, and a derived object if its master is.
        """
        names: set[str] = set()
        for record in objects:
            stored = self.contents.master(self.contents.owner(record))
            for part in self.contents.descriptions(stored):
                chunks = (chunk for shard in part.shards for chunk in shard.chunks)
                for number in {part.frames[chunk.frame].chain for chunk in chunks}:
                    names.update(link.name for link in part.head.chains[number])
        is_lossless = {name: self.opened.registry.is_lossless(name) for name in sorted(names)}
        return Rounding(
            tuple(name for name, lossless in is_lossless.items() if lossless is False),
            tuple(name for name, lossless in is_lossless.items() if lossless is None),
        )

    def still_there(self) -> bool:
        """Return whether the commit record still names this checkpoint."""
        try:
            self.opened.check_there()
        except CheckpointGoneError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} {self._record.objects} objects {self.backend.url}>"

    def _verify(self, meter: Meter, *, deep: bool) -> CopyFound:
        meter.begin("manifest")
        damaged: list[Damage] = []
        heads, objects = sweep(
            self.contents, lambda what, detail: damaged.append(Damage(what, detail))
        )
        notes = NotesOfRun.of(self.backend, self._record).read(self._record, warn=False)
        damaged += [Damage(name, str(error)) for name, error in notes.damaged.items()]
        missing_blob = self._verify_sizes(heads, damaged)
        frames = bytes_read = 0
        absent: set[str] = set()
        if deep:
            jobs, _ = self.contents.jobs([ObjectRequest(o, None) for o in objects], absent=absent)
            meter.will_enter("read")
            meter.expect(bytes_of(jobs))
            stored = [job for job in jobs if _lacks_codecs(job)]
            whole = [job for job in jobs if not _lacks_codecs(job)]
            for some, decode in ((whole, True), (stored, False)):
                stats = self.opened.loader.run(some, decode=decode, progress=meter.advance)
                frames, bytes_read = frames + stats.frames, bytes_read + stats.bytes_read
                damaged += [Damage(*fields) for fields in stats.damaged]
                missing_blob |= stats.missing_blob
        if missing_blob:
            self.opened.check_there()
        return CopyFound(
            "",
            self._record.uid,
            tuple(dict.fromkeys(damaged)),
            frames,
            bytes_read + self.contents.manifest.bytes_read,
            not_decoded=tuple(sorted(absent)),
            lossy=self.rounding(o for o in objects if o.derived is None).lossy,
            links=tuple(self._damaged_links(damaged)),
        )

    def _damaged_links(self, damaged: Sequence[Damage]) -> Collection[LendingSave]:
        """Return the other saves whose blobs are damaged. Reads commit records only if needed."""
        named = {blob_uid(damage.blob) for damage in damaged}
        uids = [uid for uid in self._record.references if uid in named]
        records = records_newest_first(Catalog(self.backend), self.step) if uids else ()
        return find_lenders(records, uids).values()

    def _verify_sizes(self, heads: Sequence[PartHead], damaged: list[Damage]) -> bool:
        missing = False
        for blob in (blob for head in heads for blob in head.blobs):
            try:
                size = self.backend.stat(blob.name).size_bytes
            except BlobNotFoundError as error:
                damaged.append(Damage(blob.name, str(error), blob.name))
                missing = True
                continue
            if size != blob.length:
                detail = f"has {size} bytes, but {blob.length} were written"
                damaged.append(Damage(blob.name, detail, blob.name))
        return missing

    def _nothing_at(self, path: str) -> KeyError:
        parts = parse_path(path)
        for depth in range(1, len(parts)):
            if self.contents.find(parts[:depth]) is not None:
                whole = show_path(parts[:depth])
                return KeyError(
                    f"step {self.step} has no {path!r}: {whole} is stored as one object; read "
                    f"{whole!r}"
                )
        few = len(self) <= _FEW  # comparing with a million names takes too long
        return KeyError(
            f"step {self.step} has no {path!r}{nearest(path, self.keys() if few else ())}"
        )

    def _locate(self, path: str) -> ObjectRecord | None:
        record = self.contents.find(parse_path(_check_text(path)))
        return None if record is None else self.contents.owner(record)

    def _record_at(self, path: str) -> ObjectRecord:
        record = self._locate(path)
        if record is None:
            raise self._nothing_at(path)
        return record


def _lacks_codecs(job: FrameJob[CodecChain]) -> bool:
    return any(isinstance(link.chain, AbsentChain) for link in job.links)


def _records_at(backend: Backend, step: int) -> list[BlobInfo]:
    """Return the commit records of one step, with times that reveal a replaced record."""
    prefix = commit_name(step, 0).rpartition("-")[0] + "-"
    return sorted(backend.list(prefix), key=lambda info: info.name)


def _check_text(path: object) -> str:
    if isinstance(path, str):
        return path
    likely = repr("/".join(map(str, path))) if isinstance(path, tuple) else "'model/wte.weight'"
    msg = f"a path is one string, its segments joined by `/`: {likely}, not {path!r}"
    raise SelectionError(msg)


def _as_region(region: object, shape: tuple[int, ...], path: str) -> Region:
    """Return `region`, which may be slices, as offsets and sizes within `shape`.

    Raises:
        SelectionError: It is neither a region nor slices, or is not within `shape`.
    """
    if not isinstance(region, Region):
        items = list(region) if isinstance(region, list | tuple) else [region]
        slices = [item for item in items if isinstance(item, slice)]
        if len(slices) < len(items):
            msg = (
                f"{region!r} is not a region of {path}: pass slices of the leading dimensions, "
                "such as (slice(0, 1),) for the first row, or a penstock.Region"
            )
            raise SelectionError(msg)
        if len(slices) > len(shape) or any(s.step not in (None, 1) for s in slices):
            msg = f"{path} has shape {list(shape)}: give at most {len(shape)} slices of step 1"
            raise SelectionError(msg)
        padded = slices + [slice(None)] * (len(shape) - len(slices))
        spans = [s.indices(n) for s, n in zip(padded, shape, strict=True)]
        region = Region(
            tuple(start for start, _, _ in spans),
            tuple(max(0, stop - start) for start, stop, _ in spans),
        )
    inside = len(region.sizes) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= n
        for o, s, n in zip(region.offsets, region.sizes, shape, strict=True)
    )
    if not inside:
        msg = f"{path} has shape {list(shape)}; the region {region} is not within it"
        raise SelectionError(msg)
    return region
