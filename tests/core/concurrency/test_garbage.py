"""The effects of a hold on the garbage collector."""

import gc
import weakref

import pytest

from penstock.core.concurrency.garbage import collections_held

MANY = 120_000


@pytest.fixture
def visited():
    """The objects in the generations that the collector visits often."""
    frozen = gc.get_freeze_count()  # conftest freezes what was imported
    gc.unfreeze()
    gc.collect()
    yield lambda: len(gc.get_objects(0)) + len(gc.get_objects(1))
    gc.unfreeze()
    if frozen:
        gc.freeze()


class Node:
    """Garbage that refers to itself."""

    def __init__(self):
        self.me = self


def test_objects_of_a_hold_are_not_visited_after_it(visited):
    with collections_held:
        made = [[] for _ in range(MANY)]
        cycle = weakref.ref(Node())
    assert gc.isenabled()
    assert visited() < len(made) / 2
    assert gc.get_freeze_count() < 1000  # of Python itself, in 3.12
    assert cycle() is not None
    gc.collect()
    assert cycle() is None


def test_objects_the_user_froze_stay_frozen(visited):
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collections_held:
        made = [[] for _ in range(MANY)]
    assert frozen - MANY / 2 < gc.get_freeze_count() <= frozen
    assert made
