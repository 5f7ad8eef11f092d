"""Publishes the manifest of a save whose blobs are sealed: part, index, commit record.

The save thread runs this module. `finish` runs the steps before it, and ends the save.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.concurrency.garbage import collections_held
from penstock.core.errors import FormatError, SaveError
from penstock.core.format.index import encode_blocks, merged
from penstock.core.ranks.group import cause_of
from penstock.core.rounds.posts import Result
from penstock.core.save.merge import PartsOfRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from penstock.core.abc import Backend
    from penstock.core.catalog.commit_table import Commit
    from penstock.core.catalog.publisher import Publisher
    from penstock.core.concurrency.timing import Clock
    from penstock.core.format.index import IndexBlocks
    from penstock.core.format.records import CommitRecord
    from penstock.core.pipeline.chunks import ChunkResult
    from penstock.core.ranks.agreement import AgreementOfOne, SaveAgreement
    from penstock.core.reporting.reports import CodecChoice
    from penstock.core.save.bases import SaveBases
    from penstock.core.save.manifest import ManifestWriter, PartSummary, RankManifest, RankShare
    from penstock.core.save.merge import KnownParts
    from penstock.core.save.request import Onward, SaveRequest

log = logging.getLogger("penstock")


@dataclass(eq=False, slots=True, kw_only=True)
class Committer:
    """Publishes the manifest of one save whose blobs are sealed; the commit record comes last.

    Each rank publishes its part. Rank 0 also publishes the index and the commit record.

    Attributes:
        request: The plan and the options of the save.
        manifest: Encodes the manifest.
        backend: The backend that the save writes to.
        publisher: Publishes the commit record.
        agreement: This rank's agreement with the other ranks.
        state: The state of the commit.
        bases: Frames that the save may refer to; None: no frames.
        known: On rank 0, the index of the newest save.
        onward: Copies the checkpoint to slower tiers, if any.
        clock: Gives the time of the commit.
        check: Raises if the save was given up, or another rank has failed.
        begin: Begins the commit, which cannot be given up afterwards; raises if it must not begin.
        tick: Called whenever the store made progress.
    """

    request: SaveRequest
    manifest: ManifestWriter
    backend: Backend
    publisher: Publisher
    agreement: AgreementOfOne | SaveAgreement
    state: Commit
    bases: SaveBases | None
    known: KnownParts | None
    onward: Onward | None
    clock: Clock
    check: Callable[[], None]
    begin: Callable[[], None]
    tick: Callable[[], None]

    def encode_part(
        self,
        results: Mapping[int, ChunkResult],
        blobs: Sequence[tuple[str, int]],
        *,
        share: RankShare,
        derived: Mapping[int, int],
        choices: Sequence[CodecChoice],
    ) -> RankManifest:
        """Encode the part of this rank; see `ManifestWriter.encode_part`.

        Raises:
            SaveError: No reader would accept the part.
        """
        with self._refusing_manifest(), collections_held:
            return self.manifest.encode_part(
                self.agreement.uid, results, blobs, derived=derived, choices=choices, share=share
            )

    def commit(
        self, part: RankManifest, *, share: RankShare, derived: Collection[int], refers: bool
    ) -> None:
        """Publish the part of this rank; on rank 0, also the index and the commit record.

        Args:
            part: The part.
            share: The chunks and entries of this rank.
            derived: Numbers of the objects that this rank stores as derived.
            refers: Whether chunks of this rank are encoded against the base.

        Raises:
            PenstockError: Something failed, or the save was given up.
        """
        agreement = self.agreement
        encoded = None
        totals: tuple[int, ...] = ()
        if agreement.alone:  # before the seal: if the manifest is refused, its data may be deleted
            blocks = encode_blocks(merged([part.shards]))
            encoded = self._encoded([part.summary], blocks, refers=refers)
        posts = self._seal(part, lists=bool(share.own_paths), refers=refers)
        if not agreement.leads:
            return
        if encoded is None:
            encoded, totals = self._merged(part, posts, derived, refers=refers)
        index, record = encoded
        self._publish(record.index.name, index)
        if self.onward is not None:
            self.onward.prepare(record)
        agreement.merged()
        try:
            self.publisher.publish_commit(record, begin=self.begin)
        except BaseException as error:
            result = Result.NEVER if self.state.never_published else Result.UNKNOWN
            agreement.published(result, cause_of(error))
            raise
        agreement.published(Result.COMMITTED, totals=totals)
        self.tick()

    def forget(self) -> None:
        """Drop all references to the state: the traceback of an error holds this object."""
        del self.request, self.manifest

    def _seal(
        self, part: RankManifest, *, lists: bool, refers: bool
    ) -> dict[int, Mapping[str, Any]]:
        """Publish the part of this rank, and wait for the others; return their posts."""
        agreement, summary = self.agreement, part.summary
        entry = summary.entry
        post: dict[str, Any] = {"raw": summary.bytes_raw, "part": None}
        if refers:
            post["refers"] = True
        if agreement.leads or len(part.shards) or lists:
            self._publish(entry.name, part.data)
            post["part"] = [entry.length, entry.head_length, entry.head_sha256]
            post["listing"] = part.listing_bytes
        known = agreement.terms["providers"]
        more = {name: n for name, n in self.request.providers if name not in known}
        return agreement.seal(post | ({"providers": more} if more else {}))

    def _merged(
        self,
        part: RankManifest,
        posts: Mapping[int, Mapping[str, Any]],
        derived: Collection[int],
        *,
        refers: bool,
    ) -> tuple[tuple[bytes, CommitRecord], tuple[int, ...]]:
        """Return the index and the commit record, and the totals of all ranks."""
        agreement = self.agreement
        nothing = agreement.check_values(posts)
        reader = PartsOfRanks(
            self.backend,
            uid=agreement.uid,
            step=self.request.step,
            world_size=agreement.world_size,
            references=() if self.bases is None else self.bases.references,
            tick=self.tick,
            known=self.known,
        )
        parts = reader.read(part.summary, posts)
        providers: dict[str, int] = {}
        for post in posts.values():
            providers |= post.get("providers", {})
            refers = refers or bool(post.get("refers"))
        merged_parts = reader.merge(
            part.shards,
            self.request.entries,
            derived=[self.request.plan.objects[n].entry.path for n in derived],
            structures=agreement.structures,
            nothing=nothing,
        )
        totals = (
            sum(summary.bytes_raw for summary in parts),
            sum(summary.bytes_stored for summary in parts),
            sum(summary.blobs for summary in parts),
            merged_parts.bytes_twice,
        )
        self.tick()
        return self._encoded(parts, merged_parts.blocks, providers, refers=refers), totals

    def _encoded(
        self,
        parts: Sequence[PartSummary],
        blocks: IndexBlocks,
        providers: Mapping[str, int] | None = None,
        *,
        refers: bool,
    ) -> tuple[bytes, CommitRecord]:
        base = self.bases.entry() if refers and self.bases is not None else None
        with self._refusing_manifest(), collections_held:
            return self.manifest.encode(
                self.agreement.uid,
                parts,
                blocks,
                engine=self.backend.name,
                created=self.clock.now_iso(),
                base=base,
                world_size=self.agreement.world_size,
                providers=providers,
            )

    @contextmanager
    def _refusing_manifest(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:  # a limit of readers; nothing stored is damaged
            msg = (
                f"step {self.request.step}: no reader would accept its manifest, so nothing was "
                f"committed: {error}. Put fewer or smaller objects into the state"
            )
            raise SaveError(msg) from error

    def _publish(self, name: str, data: bytes) -> None:
        self.check()
        began = time.monotonic()
        self.backend.publish(name, data)
        self.tick()
        log.debug("published %s: %d bytes in %.3f s", name, len(data), time.monotonic() - began)
