"""Each suite finds methods that core cannot call by the contract."""

import random

import pytest

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.codecs.zstd import ZstdCodec
from penstock.core.abc import Backend
from penstock.providers.rng import RngProvider
from penstock.testing.backends.published import its_methods_take_the_arguments_of_the_contract
from penstock.testing.codecs import check_declarations
from penstock.testing.expectations import expect_signatures
from penstock.testing.providers.promises import declarations_are_sane
from penstock.testing.stored import StaticProviders


class NarrowCodec(ZstdCodec):
    api_version = 1

    def decode(self, frame, /):
        raise AssertionError


class NarrowProvider(RngProvider):
    api_version = 1

    def describe(self, value, path, /):
        raise AssertionError


class NarrowBackend(MemoryBackend):
    api_version = 1

    def url(self):
        raise AssertionError


def test_each_suite_finds_a_method_that_core_cannot_call():
    message = r"NarrowCodec\.decode\(self, frame, /\) cannot be called .*, \*, context\): too many"
    with pytest.raises(AssertionError, match=message):
        check_declarations(NarrowCodec(NarrowCodec.Config()))
    with pytest.raises(AssertionError, match=r"NarrowProvider\.describe\(self, value, path, /\)"):
        declarations_are_sane(random.Random(0), StaticProviders([NarrowProvider()]))
    with pytest.raises(AssertionError, match=r"NarrowBackend\.url is a method, .* a property"):
        its_methods_take_the_arguments_of_the_contract(
            lambda root: NarrowBackend(MemoryConfig(name=root))
        )


def open_without_options(cls, config, /):
    return cls(config)


@pytest.mark.parametrize(
    ("name", "member", "complaint"),
    [
        ("stat", {}, r"Odd\.stat is not a method"),
        ("list", lambda self: [], r"Odd\.list\(self\) cannot be called"),
        (
            "open",
            classmethod(open_without_options),
            r"Odd\.open\(config, /\) cannot be called by the contract, \(config, /",
        ),
        ("read", lambda self, *arguments: None, None),
    ],
)
def test_an_uncallable_member_is_reported_with_both_signatures(name, member, complaint):
    odd = type("Odd", (MemoryBackend,), {name: member})(MemoryConfig())
    if complaint is None:
        expect_signatures(odd, Backend)
        return
    with pytest.raises(AssertionError, match=complaint):
        expect_signatures(odd, Backend)
