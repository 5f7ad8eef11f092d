"""Penstock's own suites: a plugin author writes a few lines for each kind."""

from array import array

import pytest
from penstock.core.plugins.registry import default_registry
from penstock.testing.backends import BACKEND_CHECKS
from penstock.testing.codecs import check_codec
from penstock.testing.providers import check_provider

from penstock_example_plugin.array_provider import ArrayProvider
from penstock_example_plugin.lzma_codec import LzmaCodec, LzmaConfig
from penstock_example_plugin.sqlite_backend import SqliteBackend, SqliteConfig


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_backend(check, tmp_path):
    check(lambda root: SqliteBackend(SqliteConfig(path=str(tmp_path / f"{root}.db"))))


def test_codec():
    check_codec(LzmaCodec(LzmaConfig(preset=0)))


@pytest.mark.parametrize("code", "bBhHiIlLqQfd")
def test_provider(code):
    def change(value):
        value[0] = 9

    def equal(one, other):
        return one.typecode == other.typecode and one.tobytes() == other.tobytes()

    check_provider(
        make=lambda: array(code, [1, 2, 3, 4, 5]),
        change=change,
        equal=equal,
        providers=default_registry().providers,
        # Without a template `l` comes back as `q`: where both have 8 bytes they are one dtype.
        loaded=lambda one, other: one.tolist() == other.tolist(),
        loads=array,
    )


def test_installed_provider_is_the_one_under_test():
    assert isinstance(default_registry().providers.for_type(array), ArrayProvider)
