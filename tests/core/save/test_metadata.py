"""User metadata: its stored form, and refusals."""

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.save.metadata import check_metadata


def test_metadata_is_checked_as_it_will_be_read():
    assert check_metadata({"a": (1, 2), "3": None}) == {"a": [1, 2], "3": None}
    nan = check_metadata({"loss": float("nan")})["loss"]
    assert nan != nan  # noqa: PLR0124


SCALARS = {
    "float32": (np.float32(0.5), 0.5),
    "float64": (np.float64(0.1), 0.1),
    "longdouble": (np.longdouble(0.5), 0.5),
    "int64": (np.int64(-(2**40)), -(2**40)),
    "bool": (np.bool_(False), False),
    "str": (np.str_("x"), "x"),
    "array": (np.array(3), 3),
    "tensor": (torch.tensor(2.5, requires_grad=True), 2.5),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "tensor of int": (torch.tensor(2**62), 2**62),
    "tensor of bool": (torch.tensor(True), True),
}


def test_scalars_of_numpy_and_torch_become_plain_ones():
    for scalar, plain in SCALARS.values():
        found = check_metadata({"a": scalar, "b": [{"c": scalar}]})
        assert found == {"a": plain, "b": [{"c": plain}]}
        assert type(found["a"]) is type(plain)


@pytest.mark.parametrize("bad", [{1: "a", "1": "b"}, {"a": [{"b": {None: 1}}]}, {"a": {1.5: 2}}])
def test_keys_of_metadata_are_text(bad):
    with pytest.raises(ConfigError, match=r"has the key .* keys of metadata are text; pass str"):
        check_metadata(bad)


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": b"x"}, {(1, 2): 3}])
def test_non_json_metadata_is_refused(bad):
    with pytest.raises(ConfigError, match="metadata"):
        check_metadata(bad)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ([1], "metadata is a list: pass a dict"),
        ({"a": np.complex64(2)}, "metadata['a'] is a numpy.complex64: metadata is stored as JSON"),
        ({"a": torch.ones((), device="meta")}, "metadata['a'] is a torch.Tensor: metadata is"),
        ({"a": [0, {"b": np.ones(2)}]}, "metadata['a'][1]['b'] is a numpy.ndarray of several"),
        ({"a": {"b": {7: 1}}}, "metadata['a']['b'] has the key 7: keys of metadata are text"),
        ({"a": b"x"}, "metadata['a'] is a bytes: metadata is stored as JSON"),
    ],
)
def test_non_json_metadata_values_are_named(bad, complaint):
    with pytest.raises(ConfigError) as caught:
        check_metadata(bad)
    assert str(caught.value).startswith(complaint)


def test_huge_metadata_is_refused():
    with pytest.raises(ConfigError, match="at most"):
        check_metadata({"a": "x" * (17 << 20)})
