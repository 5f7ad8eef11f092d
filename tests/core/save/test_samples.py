"""Changes before a capture: those found by versions and by memory samples, and until when."""

import numpy as np
import pytest
from tests.core.planned import NoBytes, planned

from penstock.core.errors import TornSnapshotError
from penstock.core.plan.save import Capture, plan_save
from penstock.core.save.samples import TornCheck


class Counted(NoBytes):
    """Flat memory whose owner counts some of its changes."""

    __slots__ = ("array", "number", "watch")

    def __init__(self, nbytes):
        super().__init__(nbytes)
        self.array, self.number = np.zeros(nbytes, np.uint8), 0
        self.address = self.array.ctypes.data
        self.watch = lambda: self.number

    def version(self):
        return self.watch()


NAMES = ("now", "later")


class Watched:
    """One object captured at once, and a deferred one."""

    def __init__(self):
        self.sources = [Counted(20_000), Counted(20_000)]
        objects = [
            planned(source, path=("g", name), capture=when)
            for source, name, when in zip(
                self.sources, NAMES, (Capture.NOW, Capture.DEFERRED), strict=True
            )
        ]
        self.plan = plan_save(objects, chunk_bytes=1 << 20, slab_limit_bytes=1000)
        self.check = TornCheck(self.plan.chunks, self.plan.objects, now=[0], deferred=[1])
        self.check.sample()


def test_versions_of_the_requested_objects_are_compared():
    watched = Watched()
    watched.sources[1].number += 1
    watched.check.check(deferred=False)
    with pytest.raises(TornSnapshotError, match="g/later changed before the fence"):
        watched.check.check(deferred=True)


def test_samples_find_a_change_without_a_version_bump():
    watched = Watched()
    watched.sources[1].array[0] += 1
    watched.check.check(deferred=True)
    with pytest.raises(TornSnapshotError, match="g/later"):
        watched.check.check(deferred=True, samples=True)
    with pytest.raises(TornSnapshotError, match="g/later"):
        watched.check.check_items([1])


def test_copy_is_compared_with_samples_even_if_memory_is_unchanged():
    watched = Watched()
    copy = watched.sources[1].array.copy()
    watched.check.check_copies({1: copy.ctypes.data})
    copy[-1] += 1
    with pytest.raises(TornSnapshotError, match="g/later"):
        watched.check.check_copies({1: copy.ctypes.data})


@pytest.mark.parametrize("bad", [2, 3, 5])
def test_each_of_several_copies_is_compared(bad):
    sources = [Counted(20_000) for _ in range(6)]
    objects = [
        planned(s, path=("g", str(n)), capture=Capture.DEFERRED) for n, s in enumerate(sources)
    ]
    plan = plan_save(objects, chunk_bytes=1 << 20, slab_limit_bytes=1000)
    check = TornCheck(plan.chunks, plan.objects, now=[], deferred=range(6))
    check.sample()
    copies = {number: sources[number].array.copy() for number in (5, 2, 3)}
    places = {number: copy.ctypes.data for number, copy in copies.items()}
    check.check_copies(places)
    copies[bad][0] += 1
    with pytest.raises(TornSnapshotError, match=f"g/{bad} changed"):
        check.check_copies(places)


def test_deferred_memory_may_change_after_the_fence():
    watched = Watched()
    watched.check.passed = True
    for source in watched.sources:
        source.number += 1
    watched.check.check(deferred=True, samples=True)
    with pytest.raises(TornSnapshotError, match="g/now changed while save"):
        watched.check.check(deferred=False)


def test_nothing_is_compared_or_held_after_the_save():
    watched = Watched()
    assert watched.check.deferred_sources() == [watched.sources[1]]
    watched.check.forget()
    watched.sources[0].number += 1
    watched.check.check(deferred=False)
    assert watched.check.deferred_sources() == []


def test_comparison_continues_as_the_save_ends():
    watched = Watched()
    check = TornCheck(watched.plan.chunks, watched.plan.objects, now=[], deferred=[0, 1])

    def version():
        check.forget()
        return 0

    watched.sources[0].watch = version
    check.check(deferred=True)
    assert check.passed
