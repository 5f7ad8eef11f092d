"""From a described state tree to everything that one save needs to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.core.abc import StateObject
from penstock.core.blame import said
from penstock.core.capture import Subject
from penstock.core.errors import PenstockError, PluginError
from penstock.core.index import encode_index
from penstock.core.manifest import (
    BlobRecord,
    CodecRecord,
    CommitRecord,
    NodeRecord,
)
from penstock.core.part import encode_part
from penstock.core.plan import Capture, PlanItem, plan_save
from penstock.core.publishing import now_iso
from penstock.core.save_request import EncodedManifest, SaveRequest
from penstock.core.sections import ObjectEntry, build_sections
from penstock.core.select import Selection
from penstock.core.types import PAGE_BYTES, Kind, align_up, show_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.core.abc import ByteSource
    from penstock.core.chain import CodecChain
    from penstock.core.config import CheckpointerConfig
    from penstock.core.describe import Description
    from penstock.core.plan import SavePlan
    from penstock.core.registry import Registry
    from penstock.core.sections import ChunkResult
    from penstock.core.types import ObjectPath, Region, TensorSpec

_CUDA_PHASE = 64  # where torch puts large CPU tensors, so that a restore meets the same phase


class ChainTable:
    """The codec chains of a configuration, by the first rule that matches; number 0 is raw."""

    def __init__(self, config: CheckpointerConfig, registry: Registry) -> None:
        self._rules = [(Selection(include=rule.match), rule) for rule in config.rules]
        self._numbers: dict[int, int] = {}
        self.chains: list[CodecChain | None] = [None]
        for index, rule in enumerate(config.rules):
            chain = rule.chain(registry)
            self._numbers[index] = 0 if chain is None else len(self.chains)
            if chain is not None:
                self.chains.append(chain)

    def number(self, path: ObjectPath) -> int:
        """Chain of the object at `path`."""
        for index, (selection, _) in enumerate(self._rules):
            if selection.selects(path):
                return self._numbers[index]
        return 0

    def records(self) -> list[tuple[CodecRecord, ...]]:
        """The table as it is stored."""
        return [
            tuple(
                CodecRecord(c.name, c.version, c.config.model_dump(mode="json"))
                for c in (chain.codecs if chain else ())
            )
            for chain in self.chains
        ]


def plan_state(
    description: Description,
    *,
    config: CheckpointerConfig,
    table: ChainTable,
    step: int,
    generation: int,
    mode: str,
    metadata: Mapping[str, Any],
) -> SaveRequest:
    """Plan the save of a described tree."""
    defer = Selection(include=config.defer) if config.defer else None
    entries: list[ObjectEntry | NodeRecord] = []
    items: list[PlanItem] = []
    subjects: list[Subject] = []
    # Not the objects: those hold the state.
    described: list[tuple[ObjectPath, TensorSpec, Region]] = []
    for ordinal, entry in enumerate(description.entries):
        if not isinstance(entry, StateObject):
            entries.append(NodeRecord(ordinal, entry.path, entry.form, entry.meta))
            continue
        item = None if entry.same_as is not None else len(items)
        entries.append(
            ObjectEntry(
                ordinal,
                entry.path,
                entry.kind,
                entry.spec,
                entry.region,
                entry.role,
                entry.form,
                entry.same_as,
                item,
            )
        )
        if item is None:
            continue
        source = entry.source
        items.append(
            PlanItem(
                nbytes=source.nbytes,
                itemsize=entry.spec.itemsize,
                phase=_CUDA_PHASE if source.address is None else source.address % PAGE_BYTES,
                group=entry.path[0],
                role=entry.role,
                chain=table.number(entry.path),
                device=source.device,
                capture=_capture(entry, description, mode=mode, defer=defer),
            )
        )
        described.append((entry.path, entry.spec, entry.region))
        subjects.append(Subject(entry.path, source, _version(entry)))
    plan = plan_save(items, chunk_bytes=config.chunk_bytes)
    chains = table.records()

    used = description.providers_used

    def context(item: int) -> tuple[str, int, tuple[int, ...]]:
        _, spec, region = described[item]
        return spec.dtype, spec.itemsize, region.sizes

    def manifest(
        uid: str,
        results: Sequence[ChunkResult],
        blobs: Sequence[tuple[str, int]],
        *,
        engine: str,
    ) -> EncodedManifest:
        part = encode_part(
            build_sections(
                entries, plan, results, blobs={n[-3:]: i for i, (n, _) in enumerate(blobs)}
            ),
            uid=uid,
            rank=0,
            step=step,
            block_bytes=config.block_bytes,
            blobs=[BlobRecord(name, length) for name, length in blobs],
            chains=chains,
        )
        index = encode_index(uid, [part.hashes])
        record = CommitRecord(
            uid=uid,
            step=step,
            generation=generation,
            created=now_iso(),
            world_size=1,
            index=index.entry,
            parts=(part.entry,),
            codecs={c.name: c.version for chain in chains for c in chain},
            providers=dict(used),
            references=(),
            metadata=dict(metadata),
            bytes_raw=plan.raw_bytes,
            bytes_stored=sum(length for _, length in blobs),
            objects=part.objects,
            penstock=__version__,
            engine=engine,
        )
        return EncodedManifest(part.entry.name, part.data, index.entry.name, index.data, record)

    return SaveRequest(
        step=step,
        generation=generation,
        mode=mode,
        plan=plan,
        subjects=subjects,
        chains=table.chains,
        contexts=context,
        shown=lambda item: show_path(described[item][0]),
        manifest=manifest,
        block_bytes=config.block_bytes,
        grace_s=config.grace_s,
        io_timeout_s=config.io_timeout_s,
        objects=len(described),
        staging_bytes=_staging_need(plan, subjects, blocking=mode == "blocking"),
        pin=any(s.source.device.startswith("cuda") for s in subjects),
    )


def _version(entry: StateObject) -> int | None:
    try:
        return entry.source.version()
    except PenstockError:
        raise
    except Exception as error:
        msg = f"{show_path(entry.path)}: its source cannot say its version: {said(error)}"
        raise PluginError(msg) from error


def _steady(source: ByteSource) -> bool:
    try:
        return source.steady()
    except Exception:  # noqa: BLE001 - the capture asks again, and says whose it is
        return False


def _capture(
    entry: StateObject, description: Description, *, mode: str, defer: Selection | None
) -> Capture:
    if entry.kind is Kind.VALUE:
        return Capture.FROZEN
    memory = entry.source.memory
    if mode == "lazy" and memory is not None:
        if memory in description.deferrable:
            return Capture.DEFERRED
        if defer is not None and defer.selects(entry.path):
            return Capture.DEFERRED
    return Capture.NOW


def _staging_need(plan: SavePlan, subjects: Sequence[Subject], *, blocking: bool) -> int:
    total = 0
    for chunk in plan.chunks:
        source = subjects[chunk.pieces[0].item].source
        if blocking and not chunk.slab and source.address is not None and _steady(source):
            continue  # lent, not copied
        total += align_up(chunk.phase + chunk.length, PAGE_BYTES)
    return total
