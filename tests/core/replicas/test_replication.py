"""Which checkpoint is replicated next, and what may be deleted meanwhile."""

from penstock.core.replicas.replication import Replication


def keys(*steps):
    return [(step, 0) for step in steps]


ALL = keys(*range(1, 9))


def test_the_newest_safe_checkpoint_stays_until_a_newer_one_is_safe():
    replication = Replication(keys(1, 2), ())
    assert replication.target is None
    replication.committed((3, 0))
    assert replication.deletable(ALL) == keys(1)
    replication.secured((3, 0))
    assert replication.deletable(ALL) == keys(1, 2)


def test_slow_copies_skip_checkpoints_and_still_end():
    replication = Replication(keys(1), ())
    for key in keys(2, 3, 4):
        replication.committed(key)
    assert replication.target == (2, 0)
    assert replication.deletable(ALL) == keys(3)
    replication.deleted(keys(3))
    replication.secured((2, 0))
    assert replication.target == (4, 0)
    assert replication.deletable(ALL) == keys(1)


def test_what_a_job_finds_stays_until_one_is_safe_again():
    """Any of them may have been safe before hosts were lost, and may be all that is left."""
    replication = Replication((), keys(1, 2, 3))
    assert replication.target == (3, 0)
    for key in keys(4, 5, 6):
        replication.committed(key)
    assert replication.deletable(ALL) == keys(4, 5)
    replication.failed((3, 0))
    assert replication.target == (6, 0)
    assert replication.deletable(ALL) == keys(4, 5)
    replication.secured((6, 0))
    assert replication.deletable(ALL) == keys(1, 2, 3, 4, 5)


def test_a_failed_target_is_tried_again_if_there_is_no_newer_one():
    replication = Replication((), ())
    replication.committed((1, 0))
    replication.failed((1, 0))
    assert replication.target == (1, 0)
    assert replication.deletable(ALL) == []


def test_an_older_generation_stays_until_the_newer_one_is_safe():
    replication = Replication([(5, 0)], ())
    replication.committed((5, 2))
    assert replication.deletable([(5, 0)]) == []
    replication.secured((5, 2))
    assert replication.deletable([(5, 0)]) == [(5, 0)]


def test_a_rewind_makes_an_older_checkpoint_the_newest_safe_one():
    replication = Replication(keys(1, 2), keys(3))
    replication.deleted(keys(2, 3))
    assert replication.target is None
    assert replication.deletable(ALL) == []
    replication.secured((2, 0))  # too late
    assert replication.deletable(ALL) == []
    replication.committed((2, 0))
    assert replication.target == (2, 0)


def test_a_checkpoint_that_is_saved_again_is_copied_again():
    replication = Replication(keys(1, 2), ())
    replication.committed((2, 0))
    assert replication.target == (2, 0)
    assert replication.deletable(ALL) == []


def test_a_save_at_an_earlier_step_is_copied_and_stays():
    replication = Replication(keys(1, 8), ())
    replication.committed((2, 0))
    assert replication.target == (2, 0)
    replication.secured((2, 0))
    assert replication.target is None
    replication.committed((3, 0))
    assert replication.target == (3, 0)
    assert replication.deletable(ALL) == keys(1, 3, 4, 5, 6, 7)
    replication.secured((3, 0))
    assert replication.deletable(ALL) == keys(1, 2, 4, 5, 6, 7)
