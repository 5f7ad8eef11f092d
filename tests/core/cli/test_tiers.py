"""Commands on a run with a tier that cannot be opened, or hangs."""

import sys

import pytest
from tests.integration.support import checkpointer, make_state

from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.catalog import Catalog
from penstock.core.cli.commands.verify import grouped
from penstock.core.plugins.registry import default_registry
from penstock.core.reporting.reports import Damage
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
    """A third-party backend, `shelf`, that is `down` or `hangs` on demand."""
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
def test_ls_lists_steps_of_the_opened_tier(call, run, state_of_shelf, tier):
    state_of_shelf("down")
    done = call("ls", run(tier))
    assert done.code == 0
    assert done.err == f"penstock: tier {tier} does not answer: nobody opens the shelf\n"
    assert done.out.splitlines()[1].split()[0] == "1"
    found = call("ls", run(tier), "--json")
    assert (found.code, found.err) == (0, "")
    assert found.json["silent"] == {tier: "nobody opens the shelf"}
    assert [c["step"] for c in found.json["checkpoints"]] == [1]


# These would never end without the given limit.


def time_passes_once(hang, waits):
    """Lets a minute pass once this many calls of the shelf hang."""

    def ahead_s():
        # The command imports it, on another thread.
        hanging = getattr(sys.modules.get("shelf"), "hanging", ())
        return 60.0 if len(hanging) >= hang else 0.0

    waits(clock=ShiftedClock(ahead_s), poll_s=0.02)


def test_drain_ends_if_the_source_tier_hangs(call, run, state_of_shelf, waits):
    url = run("fast")
    state_of_shelf("hangs")
    time_passes_once(1, waits)
    done = call("drain", url, "--timeout", "60")
    assert done.code == 1
    assert "tier fast could not be checked" in done.out
    assert "asking shelf://there did not end within the 60 s of --timeout" in done.out


def test_drain_names_an_unreachable_tier(call, run, state_of_shelf):
    state_of_shelf("down")
    done = call("drain", run("fast"))
    assert (done.code, done.err) == (1, "")
    assert done.out == (
        "tier fast could not be checked, so more may be left to copy: nobody opens the shelf\n"
    )
    found = call("drain", run("fast"), "--json")
    assert (found.code, found.json["left"]) == (1, [])
    assert found.json["silent"] == {"fast": "nobody opens the shelf"}


def test_drain_ends_if_the_target_tier_hangs(call, run, state_of_shelf, waits):
    url = run("durable")
    state_of_shelf("hangs")
    time_passes_once(2, waits)  # one that compares the tiers, and one that copies
    done = call("drain", url, "--timeout", "60")
    assert done.code == 1
    assert "step 1 was on its way to tier durable: 0 B of" in done.out
    assert "; does tier fast hang, or durable?" in done.out
    assert "still to be copied: steps 1" in done.out


def test_deleting_in_one_tier_queries_no_other_in_vain(call, run, state_of_shelf):
    state_of_shelf("down")
    done = call("delete", run("fast"), "1", "--tier", "durable", "--force", "--yes")
    assert (done.code, done.err) == (0, "")
    assert "step 1 deleted" in done.out


def test_damage_is_grouped_by_the_blob_of_a_tier():
    blob, other = (f"data/{32 * digit}/blobs/00000-0.raw" for digit in "ab")
    groups = grouped(
        [
            Damage(blob, "has 5 bytes, but 9 were written"),
            Damage("model/a", f"checksum of 4 bytes at {blob}:0 does not match"),
            Damage("model/b", f"checksum of 4 bytes at {blob}:8 does not match"),
            Damage("model/b", f"in tier fast: cannot read {blob}: it does not exist"),
            Damage("model/c", f"cannot read {other}: it does not exist"),
            Damage("commits/1-0.json", "its sha256 is not the one in its first line"),
        ]
    )
    assert [list(group.hit) for group in groups] == [
        ["model/a", "model/b"],
        ["model/b"],
        ["model/c"],
        ["commits/1-0.json"],
    ]
    assert next(iter(groups[0].causes)) == f"{blob}: has 5 bytes, but 9 were written"
    assert len(groups[0].causes) == 3


@pytest.mark.parametrize(
    ("tier", "meanwhile"),
    [("fast", "saves go to the next tier"), ("durable", "saves stay in faster tiers")],
)
def test_doctor_reports_an_unresponsive_tier_once(call, run, state_of_shelf, tier, meanwhile):
    state_of_shelf("down")
    done = call("doctor", run(tier), "--json", "--no-probe")
    assert done.code == 0
    of_tier = [c for c in done.json["checks"] if c["name"].startswith(f"{tier}: ")]
    assert [(c["name"], c["status"]) for c in of_tier] == [(f"{tier}: answer", "warn")]
    assert "nobody opens the shelf" in of_tier[0]["found"]
    assert meanwhile in of_tier[0]["advice"]
    other = "durable" if tier == "fast" else "fast"
    assert f"{other}: checkpoints" in {c["name"] for c in done.json["checks"]}
