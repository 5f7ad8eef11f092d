"""What is cleaned up after a commit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.core.events import DeleteEvent

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.core.catalog import Catalog
    from penstock.core.config import Retention
    from penstock.core.events import EventStream
    from penstock.core.reports import SaveReport

log = logging.getLogger("penstock")


def clean_up_after(
    report: SaveReport,
    catalog: Catalog,
    *,
    overwrite: bool,
    retention: Retention | None,
    protect: Collection[int],
    events: EventStream,
) -> None:
    """Delete what a commit has replaced, and what retention does not keep.

    On rank 0, outside of `durable`: a failure is logged, never the save's.
    """
    try:
        if overwrite:
            catalog.delete_older_generations(report.step)
        if retention is not None:
            gone = catalog.apply_retention(
                keep_last=retention.keep_last,
                keep_every=retention.keep_every,
                protect={report.step, *protect},
            )
            if gone:
                events.emit(DeleteEvent("deleted", tuple(gone), "retention"))
    except Exception as error:  # noqa: BLE001 - a task's boundary: recorded in the log
        log.warning("cleaning up after step %d failed: %s", report.step, str(error))
