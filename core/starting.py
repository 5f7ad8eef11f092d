"""What a save is given before it starts: its generation, its staging memory, a line in the log."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.catalog import Catalog
from penstock.core.draining import Onward
from penstock.core.errors import StepExistsError
from penstock.core.manifest import commit_name, parse_commit_name
from penstock.core.staging import Staging, default_budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.abc import Backend
    from penstock.core.config import CheckpointerConfig
    from penstock.core.draining import Drains
    from penstock.core.save_request import SaveRequest
    from penstock.core.saving import SaveJob

log = logging.getLogger("penstock")


def claim_generation(
    backend: Backend,
    step: int,
    *,
    overwrite: bool,
    drains: Drains | None = None,
    may_go: Callable[[str], bool] = lambda _: False,
) -> int:
    """The generation that a save of `step` publishes; never one whose record `may_go`.

    Raises:
        StepExistsError: The step, or a later one, is committed, and is not to be overwritten.
        StorageError: A tier does not answer, and the step is to be overwritten.
    """
    # What replaces has to know all that it replaces: else it would count as the older one.
    entries = Catalog(backend).entries() if drains is None else drains.entries(strict=overwrite)
    if overwrite:
        parsed = [parse_commit_name(name) for name in entries.get(step, [])]
        above = max((generation for _, generation in filter(None, parsed)), default=-1) + 1
        return _staying(step, above, may_go)
    steps = list(entries)
    if steps and step <= steps[-1]:
        what = "exists" if step in steps else f"is before the latest step {steps[-1]}"
        older = [s for s in steps if s < step]
        way = (
            f"call rewind({older[-1]}), which forgets all later steps,"
            if older
            else f"delete steps {steps[0]} and later (there is no earlier one for rewind)"
        )
        msg = (
            f"step {step} on {backend.url} {what}. Pass overwrite=True to save it all "
            f"the same, or {way} first to go on from there."
        )
        raise StepExistsError(msg)
    return _staying(step, 0, may_go)


def _staying(step: int, generation: int, may_go: Callable[[str], bool]) -> int:
    while may_go(commit_name(step, generation)):
        generation += 1
    return generation


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes, and what becomes of it there."""

    backend: Backend
    onward: Onward | None = None


def choose_destination(
    backend: Backend, drains: Drains | None, request: SaveRequest
) -> Destination | None:
    """The backend, or the fastest of its tiers that has room; None: the save is to be skipped.

    Raises:
        StorageFullError: No tier has room, and the configuration says `raise`.
    """
    if drains is None:
        return Destination(backend)
    drains.resume_once()
    number = drains.place(request.step, request.plan.raw_bytes)
    if number is None:
        return None
    return Destination(backend.tiers[number].backend, Onward(drains, number))


def staging_for(
    request: SaveRequest, reusable: Staging | None, config: CheckpointerConfig
) -> Staging:
    """Staging memory within the budget: that of earlier saves where there is any."""
    budget = config.staging_bytes
    if budget is None:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        budget = default_budget(request.staging_bytes, local_ranks)
    budget = max(budget, 2 * config.chunk_bytes)
    staging = reusable or Staging(budget)
    staging.budget_bytes = max(staging.budget_bytes, budget)
    largest = min(request.staging_bytes, config.chunk_bytes)
    staging.expect(request.staging_bytes, largest_bytes=largest, pin=request.pin)
    return staging


def log_plan(job: SaveJob, staging: Staging) -> None:
    """One line on what a save is about to do."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    request = job.request
    chunks = request.plan.chunks
    log.debug(
        "step %d: %s save %s-%d of %d objects, %d bytes (%d deferred), in %d chunks (%d slabs, %d "
        "encoded); needs %d bytes of staging, may use %d",
        request.step,
        request.mode,
        job.uid,
        request.generation,
        request.objects,
        request.plan.raw_bytes,
        job.deferred_bytes,
        len(chunks),
        sum(chunk.slab for chunk in chunks),
        sum(chunk.chain != 0 for chunk in chunks),
        request.staging_bytes,
        staging.budget_bytes,
    )
