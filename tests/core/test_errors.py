"""`errors` cross processes with all their fields."""

import pickle

import pytest

from penstock.core import errors


def classes(base):
    return {base}.union(*map(classes, base.__subclasses__()))


@pytest.mark.parametrize("cls", sorted(classes(errors.PenstockError), key=lambda c: c.__name__))
def test_every_error_pickles(cls):
    error = cls("step 7 is damaged")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_pickled_errors_keep_their_fields():
    for error in (
        errors.DamagedError("damaged", ["model/w"]),
        errors.RestoreMismatchError("differs", ["model/w: shape"]),
        errors.RankError("failed", 3, "host-b", "OutOfMemoryError"),
    ):
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error) != vars(type(error)(""))
