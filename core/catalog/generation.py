"""Whether a step may be saved, and as which generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.errors import StepExistsError
from penstock.core.format.records import commit_name, generation_above
from penstock.core.limits import MAX_INT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def claim_generation(
    step: int,
    entries: Mapping[int, Sequence[str]],
    *,
    url: str,
    overwrite: bool,
    may_go: Callable[[str], bool] = lambda _: False,
) -> int:
    """Return the generation that a save of `step` publishes.

    Args:
        step: The step that is to be saved.
        entries: Names of commit records by step, ascending. To overwrite, all of them are needed:
            a generation below one that is not known would count as the older one.
        url: How messages name the run.
        overwrite: Whether the step may replace what is committed.
        may_go: Whether a record of that name may be deleted yet, by a deletion that was given up;
            its generation is passed over.

    Raises:
        StepExistsError: The step, or a later one, is committed, and is not to be overwritten.
    """
    if overwrite:
        return _staying(step, generation_above(entries.get(step, ())), may_go)
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
            f"step {step} on {url} {what}. Pass overwrite=True to save it all "
            f"the same, or {way} first to go on from there. If you did not save it, another "
            "process saves here: give each training a root of its own."
        )
        raise StepExistsError(msg)
    return _staying(step, 0, may_go)


def _staying(step: int, generation: int, may_go: Callable[[str], bool]) -> int:
    while may_go(commit_name(step, generation)):
        generation += 1
    if generation > MAX_INT:
        msg = f"step {step} has a generation that none can follow: delete the step, and save again"
        raise StepExistsError(msg)
    return generation
