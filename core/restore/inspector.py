"""Checks that a checkpoint is complete and readable, without reading its data.

Tested in `tests/integration/lifecycle/test_lifecycle.py`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.catalog.survey import has_data, sizes_of
from penstock.core.errors import CheckpointGoneError, DamagedError, PluginError
from penstock.core.restore.contents import Contents
from penstock.core.restore.sweep import sweep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.abc import Backend
    from penstock.core.format.records import CommitRecord
    from penstock.core.plugins.registry import Registry

log = logging.getLogger("penstock")


class Inspector:
    """Checks a newer checkpoint before older ones are deleted because of it.

    Decodes each manifest once, as a reader would; once is enough, since its digests rule out later
    changes. Compares the lengths of its files with a listing each time, since files may have been
    deleted. Does not compare checksums of the data; `verify` does that.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # No lock: the save thread and the caller's thread use these only in single, atomic
        # operations. At worst, both decode the same manifest.
        self._lengths: dict[tuple[str, str], Mapping[str, int]] = {}
        self._own: set[str] = set()
        self._warned: set[tuple[str, str]] = set()

    def note_own(self, uid: str) -> None:
        """Trust the manifest of this attempt without decoding it: this process wrote it."""
        self._own.add(uid)

    def is_whole(self, backend: Backend, record: CommitRecord) -> bool:
        """Return whether a backend without tiers has all files of this checkpoint; warn if not.

        Raises:
            StorageError: The backend does not answer.
        """
        if record.uid in self._own and has_data(backend, record):
            return True
        key = backend.url, record.uid
        lengths = self._lengths.get(key) or self._read(backend, record)
        if lengths is None:
            return False
        self._lengths[key] = lengths
        sizes = sizes_of(backend, record)
        lost = [name for name, length in lengths.items() if sizes.get(name) != length]
        if lost:
            more = f" and {len(lost) - 1} more" if lost[1:] else ""
            self._warn(backend, record, f"missing or truncated: {lost[0]}{more}")
        return not lost

    def _read(self, backend: Backend, record: CommitRecord) -> Mapping[str, int] | None:
        """Decode the manifest; return the lengths of all files, or None if readers would fail."""
        contents = Contents(backend, record, self._registry)
        problems: list[str] = []
        try:
            heads, _ = sweep(contents, lambda _, detail: problems.append(detail))
            for head in heads if not problems else ():
                contents.check_codecs(head)
        except CheckpointGoneError:
            return None
        except (DamagedError, PluginError) as error:
            problems.append(str(error))
        if not problems:
            return contents.manifest.lengths()
        self._warn(backend, record, problems[0])
        return None

    def _warn(self, backend: Backend, record: CommitRecord, problem: str) -> None:
        key = backend.url, record.uid
        if key not in self._warned:
            self._warned.add(key)
            log.warning(
                "step %d on %s is not whole, so no older step is deleted because of it: %s. "
                "`penstock verify` lists all damage.",
                record.step,
                backend.url,
                problem,
            )
