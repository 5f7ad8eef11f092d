"""Commands on a run in tiers, one of which cannot be opened, or hangs."""

import sys

import pytest
from tests.integration.support import checkpointer, make_state

from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.plugins.registry import default_registry
from penstock.core.tiers.whereabouts import mark
from penstock.testing.hasty import ShiftedClock

SHELF = """
    import os, threading
    from penstock.backends.posix import PosixBackend
    from penstock.core.errors import StorageError

    hanging, goes_on = [], threading.Event()

    class Shelf(PosixBackend):
        name = "shelf"
        api_version = 1

        def __init__(self, config, /):
            if os.environ.get("SHELF") == "down":
                raise StorageError("nobody opens the shelf")
            super().__init__(config)

        @property
        def url(self):
            return "shelf://there"

        def list(self, prefix, /):
            if os.environ.get("SHELF") == "hangs":
                hanging.append(prefix)
                goes_on.wait()
            return super().list(prefix)
"""


@pytest.fixture
def state_of_shelf(plugin_site, monkeypatch):
    """A backend of a third party, `shelf`, that is `down` or `hangs` when it is told to."""
    plugin_site.add_penstock()
    plugin_site.add("shelf", {"penstock.backends": {"shelf": "shelf:Shelf"}}, shelf=SHELF)
    default_registry.cache_clear()
    yield lambda state: monkeypatch.setenv("SHELF", state)
    if "shelf" in sys.modules:
        sys.modules["shelf"].goes_on.set()
    default_registry.cache_clear()


@pytest.fixture
def run(tmp_path, state_of_shelf):
    """Step 1 waits in the folder; gives the run with the shelf as the one tier or the other."""
    folder = tmp_path / "folder"
    backend = PosixBackend(PosixConfig(path=str(folder)))
    with checkpointer(backend) as ckpt:
        ckpt.save(make_state(1), 1).result(60)
        mark(backend, Catalog(backend).record(1).uid, 1)
    backend.close()
    shelf, place = f"shelf://{tmp_path}/shelf", f"posix://{folder}"
    return lambda tier: (
        f"tiered://?fast={shelf}&durable={place}"
        if tier == "fast"
        else f"tiered://?fast={place}&durable={shelf}"
    )


@pytest.mark.parametrize("tier", ["fast", "durable"])
def test_ls_lists_what_the_tier_that_opens_has(call, run, state_of_shelf, tier):
    state_of_shelf("down")
    done = call("ls", run(tier))
    assert done.code == 0
    assert done.err == f"penstock: tier {tier} does not answer: nobody opens the shelf\n"
    assert done.out.splitlines()[1].split()[0] == "1"
    found = call("ls", run(tier), "--json")
    assert (found.code, found.err) == (0, "")
    assert found.json["silent"] == {tier: "nobody opens the shelf"}
    assert [c["step"] for c in found.json["checkpoints"]] == [1]


# These would never end, but for the limit that is given.


def time_passes_once(hang, waits):
    """Lets a minute pass once so many calls of the shelf hang."""

    def ahead_s():
        # The command imports it, on another thread.
        hanging = getattr(sys.modules.get("shelf"), "hanging", ())
        return 60.0 if len(hanging) >= hang else 0.0

    waits(clock=ShiftedClock(ahead_s), poll_s=0.02)


def test_drain_ends_where_the_tier_to_copy_from_hangs(call, run, state_of_shelf, waits):
    url = run("fast")
    state_of_shelf("hangs")
    time_passes_once(1, waits)
    done = call("drain", url, "--timeout", "60")
    assert done.code == 1
    assert "tier fast does not answer" in done.out
    assert "asking shelf://there did not end within the 60 s of --timeout" in done.out
