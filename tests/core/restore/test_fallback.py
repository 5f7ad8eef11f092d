"""Which checkpoint is tried next, and the half-written targets of damaged ones."""

import pytest
import torch

from penstock.core.abc import StateObject, Target
from penstock.core.errors import (
    CheckpointNotFoundError,
    DamagedError,
    FormatError,
    RestoreError,
    RestoreMismatchError,
    StorageError,
)
from penstock.core.plugins.registry import Registry
from penstock.core.restore.fallback import Candidates, Overwritten
from penstock.core.restore.fill import BytesSink
from penstock.core.tree.describe import describe_tree

PROVIDERS = Registry().providers


def candidates(*steps):
    return Candidates({step: lambda step=step: f"step {step}" for step in steps})


def damaged_above(whole):
    """An attempt for which each step above `whole` is damaged."""

    def attempt(step, open_step):
        if step > whole:
            message = f"step {step} is damaged"
            raise DamagedError(message)
        return open_step()

    return attempt


def test_newest_whole_step_is_used_and_others_are_reported(caplog):
    steps = candidates(7, 5, 3)
    assert steps.first == 7
    assert steps.use(damaged_above(3)) == "step 3"
    assert steps.skipped == [7, 5]
    assert steps.first is None
    assert "step 7 is damaged, so an older one is tried" in caplog.text


def test_error_comes_from_the_last_step():
    steps = candidates(7, 5)
    with pytest.raises(DamagedError, match="step 5"):
        steps.use(damaged_above(0))
    with pytest.raises(DamagedError, match="step 5"):
        steps.use(damaged_above(0))
    with pytest.raises(CheckpointNotFoundError):
        candidates().use(damaged_above(0))


def test_damaged_record_names_the_step_and_what_to_restore():
    def attempt(step, open_step):
        message = "data/a/parts/00000.json.zst: its sha256 is not the one recorded"
        raise FormatError(message)

    with pytest.raises(FormatError) as raised:
        candidates(7).use(attempt)
    (note,) = raised.value.__notes__
    assert note.startswith("Step 7 is damaged. Restore an older step: ")


def test_errors_other_than_damage_end_the_search():
    def fails(step, open_step):
        message = "away"
        raise StorageError(message)

    steps = candidates(7, 5)
    with pytest.raises(StorageError):
        steps.use(fails)
    assert steps.first == 5
    assert steps.skipped == []


def overwritten(state):
    return Overwritten(state, PROVIDERS, allow_pickle=False)


def targets(state):
    """A target for each tensor of a state, by path."""
    tree = describe_tree(state, providers=PROVIDERS, allow_pickle=False)
    made = {}
    for entry in tree.entries:
        if isinstance(entry, StateObject):
            sink = BytesSink(entry.spec.nbytes)
            sink.memory = entry.source.memory
            made[entry.path] = Target(entry.path, entry.spec, entry.regions, sink)
    return made


def test_older_step_that_fills_all_that_a_damaged_one_began_is_whole():
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    seen = overwritten(state)
    assert seen.begin(targets(state).values()) == []
    earlier = seen.begin(targets(state).values())
    seen.check_left(earlier, targets(state).values(), 5)


def test_older_step_lacking_objects_of_a_damaged_one_names_them():
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    seen = overwritten(state)
    seen.begin(targets(state).values())
    rest = [targets(state)["a",]]
    with pytest.raises(RestoreError, match="undefined now: b") as raised:
        seen.check_left(seen.begin(rest), rest, 5)
    assert "step 5 is restored instead of a damaged one" in str(raised.value)


def test_dropped_tensors_are_not_named():
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    seen = overwritten(state)
    seen.begin(targets(state).values())
    rest = [targets(state)["a",]]
    del state["b"]
    seen.check_left(seen.begin(rest), rest, 5)


def test_mismatch_after_damage_does_not_claim_that_nothing_was_changed():
    state = {"a": torch.zeros(3)}
    seen = overwritten(state)
    mismatch = RestoreMismatchError("step 5 does not fit; nothing was changed", ["a"])
    seen.check_mismatch(mismatch)
    seen.begin(targets(state).values())
    with pytest.raises(RestoreError, match="undefined now: a") as raised:
        seen.check_mismatch(mismatch)
    assert "nothing was changed" not in str(raised.value)
