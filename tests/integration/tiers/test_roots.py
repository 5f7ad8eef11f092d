"""Changed tiers: swapped, not mounted, rolled back, replaced, one place."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime

import pytest
from tests.core.cli.command import caller
from tests.integration.support import TINY, make_state, same
from tests.integration.tiers.places import Folders, Places

from penstock import Checkpointer, ConfigError, FormatError, StorageError
from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.abc import ROOT_NAME, RootRecord, encode_root, read_root
from penstock.core.abc.tiers import decode_root
from penstock.core.catalog.catalog import Catalog
from penstock.core.concurrency.timing import Clock
from penstock.core.tiers.places import merged_order
from penstock.testing.faults import WrapperBackend
from penstock.testing.hasty import FAST


@pytest.fixture(autouse=True)
def hasty(waits):
    waits(FAST, drain_failing_s=0.0)


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory):
    made = Folders(tmp_path_factory.mktemp("saved"))
    save(made, 1)
    return made


@pytest.fixture
def folders(saved_folders, tmp_path):
    """A run with step 1 in both tiers."""
    return saved_folders.copy_to(tmp_path)


def opened(folders, **options):
    places = {"fast": f"posix://{folders.fast}", "durable": f"posix://{folders.durable}"}
    return Checkpointer({"type": "tiered", **places, **options}, **TINY)


def save(folders, *steps, **options):
    with opened(folders, **options) as ckpt:
        reports = [ckpt.save(make_state(step), step).result(300) for step in steps]
        assert ckpt._drains.settle(300)
    return reports[-1]


def url(folders, more=""):
    return f"tiered://?fast=posix://{folders.fast}&durable=posix://{folders.durable}{more}"


def steps_in(folder):
    backend = PosixBackend(PosixConfig(path=str(folder)))
    try:
        return Catalog(backend).steps()
    finally:
        backend.close()


def root_of(folder):
    return decode_root((folder / ROOT_NAME).read_bytes())


def test_roots_know_each_other_and_reading_writes_nothing(folders):
    fast, durable = root_of(folders.fast), root_of(folders.durable)
    assert fast.run == durable.run
    assert [root for root, _ in fast.tiers] == [fast.root, durable.root]
    assert fast.tiers == durable.tiers
    assert fast.slower() == [durable.root]
    with opened(folders) as ckpt:
        assert same(ckpt.load(1), make_state(1))
        ckpt.prune()
    assert (root_of(folders.fast), root_of(folders.durable)) == (fast, durable)


def test_swapped_tiers_are_refused(folders):
    right = folders.fast, folders.durable
    folders.fast, folders.durable = folders.durable, folders.fast
    with pytest.raises(ConfigError, match=r"are swapped.*Nothing was changed"):
        opened(folders)
    save(folders, 2, roots="accept")  # unless on purpose
    save(folders, 3)
    assert steps_in(right[0]) == [1, 2, 3]
    folders.fast, folders.durable = right
    with pytest.raises(ConfigError, match="are swapped"):
        opened(folders)


def test_the_place_of_another_run_is_refused(folders, tmp_path):
    other = Folders(tmp_path / "other")
    save(other, 1)
    folders.durable = other.durable
    with pytest.raises(ConfigError, match="different runs"):
        opened(folders)


def test_an_empty_root_in_place_of_a_known_one_is_never_durable(folders, tmp_path):
    aside = tmp_path / "mounted elsewhere"
    folders.durable.rename(aside)
    folders.durable.mkdir()  # the empty folder below a file system that is not mounted
    with opened(folders) as ckpt:
        with pytest.raises(StorageError, match="Is its file system mounted"):
            ckpt.latest()  # data only there may be newer
        handle = ckpt.save(make_state(2), 2)
        handle.committed.result(300)
        assert not handle.durable.done()
        assert not list(folders.durable.rglob("*"))
        folders.durable.rmdir()
        aside.rename(folders.durable)
        assert handle.result(300).tiers == ("fast", "durable")
    assert steps_in(folders.durable) == [1, 2]


def test_a_root_replaced_on_purpose_gets_all_that_is_left(folders, caplog):
    shutil.rmtree(folders.durable)
    report = save(folders, 2, roots="accept")
    assert report.tiers == ("fast", "durable")
    assert "tier durable" in caplog.text
    assert "is new to this run" in caplog.text
    assert steps_in(folders.durable) == [1, 2]
    assert save(folders, 3).tiers == ("fast", "durable")  # from now on this is the root


def test_a_root_replaced_while_the_run_is_open_counts_as_away(folders, tmp_path):
    aside = tmp_path / "aside"
    with opened(folders) as ckpt:
        ckpt.save(make_state(2), 2).result(300)
        folders.durable.rename(aside)
        handle = ckpt.save(make_state(3), 3)
        handle.committed.result(300)
        ckpt._drains.settle(300)
        assert not handle.durable.done()
        assert not folders.durable.exists()
        aside.rename(folders.durable)
        handle.result(300)
    assert steps_in(folders.durable) == [1, 2, 3]


@pytest.mark.parametrize("how", ["trainer", "command"])
def test_steps_missing_in_an_old_backup_are_recopied(how, folders, tmp_path, caplog, call):
    shutil.copytree(folders.durable, tmp_path / "backup")
    save(folders, 2, 3)
    shutil.rmtree(folders.durable)
    (tmp_path / "backup").rename(folders.durable)
    if how == "command":
        done = call("drain", url(folders))
        assert (done.code, "copied 2 checkpoints" in done.out) == (0, True)
        assert call("drain", url(folders)).out.strip() == "nothing was left to copy"
    else:
        save(folders, 4)
        assert "restored from a" in caplog.text
    assert steps_in(folders.durable)[:3] == [1, 2, 3]


class StoppedClock(Clock):
    def __init__(self, second):
        self._time = datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)

    def wall_s(self):
        return self._time.timestamp()


def at(waits, second):
    """Later saves were made then."""
    waits(clock=StoppedClock(second))


def rewind_on_another_node(folders, tmp_path):
    """Steps 1 to 3 are of this node; another one continues from step 1, and saves step 2."""
    first, folders.fast = folders.fast, tmp_path / "other node"
    with opened(folders) as ckpt:
        ckpt.rewind(1)
        ckpt.save(make_state(7), 2).result(300)
    folders.fast = first


@pytest.fixture
def rewound(folders, tmp_path, waits):
    """A run: this node saved steps 1 to 3, and another one rewound the last two."""
    at(waits, 1)
    save(folders, 2, 3)
    at(waits, 2)
    rewind_on_another_node(folders, tmp_path)
    return folders


def test_steps_rewound_by_another_node_stay_deleted(rewound, caplog):
    save(rewound, 4)
    assert "step 3 is in tier fast, and was deleted from slower tiers" in caplog.text
    assert steps_in(rewound.durable) == [1, 2, 4]
    assert steps_in(rewound.fast) == [1, 2, 3, 4]


def test_steps_missing_in_a_shared_old_backup_are_recopied(folders, tmp_path, waits):
    shutil.copytree(folders.durable, tmp_path / "backup")
    at(waits, 1)
    save(folders, 2)
    save(folders, 3)
    shutil.rmtree(folders.durable)
    (tmp_path / "backup").rename(folders.durable)
    at(waits, 2)
    rewind_on_another_node(folders, tmp_path)
    save(folders, 4)
    assert steps_in(folders.durable) == [1, 2, 3, 4]


def swapped(folders):
    folders.fast, folders.durable = folders.durable, folders.fast
    return url(folders, "&roots=accept")


@pytest.fixture
def evicted(folders, waits):
    """A run with steps 1 to 4 in the durable tier, and only the last two in the fast one."""
    at(waits, 1)
    save(folders, 2, 3, 4, keep_fast=2)
    assert steps_in(folders.fast) == [3, 4]
    return folders


def test_evicted_steps_are_copied_after_a_deliberate_tier_swap(evicted, call):
    accepted = swapped(evicted)
    assert "copied 2 checkpoints" in call("drain", accepted).out
    assert steps_in(evicted.durable) == [1, 2, 3, 4]
    assert call("drain", url(evicted)).out.strip() == "nothing was left to copy"


def test_evicted_steps_do_not_count_as_deleted_after_a_tier_swap(evicted, tmp_path, waits, call):
    at(waits, 2)
    right, evicted.durable = evicted.durable, tmp_path / "meanwhile"
    save(evicted, 5, roots="accept")  # unseen by the last tier, and newer
    evicted.durable = right
    call("drain", swapped(evicted))
    assert steps_in(evicted.durable) == [1, 2, 3, 4, 5]


def test_a_durable_tier_that_becomes_fast_is_copied_to_a_new_one(folders, tmp_path, call):
    save(folders, 2, 3)
    folders.fast, folders.durable = folders.durable, tmp_path / "new disk"
    assert "copied 3 checkpoints" in call("drain", url(folders, "&roots=accept")).out
    save(folders, 4, keep_fast=1)
    assert steps_in(folders.durable) == [1, 2, 3, 4]


@pytest.mark.parametrize(("drain_every", "copied"), [(1, [1, 2]), (0, [])])
def test_a_run_without_tiers_is_copied_to_a_newly_added_tier(drain_every, copied, tmp_path, call):
    folders = Folders(tmp_path)
    with Checkpointer(f"posix://{folders.fast}", **TINY) as ckpt:
        for step in (1, 2):
            ckpt.save(make_state(step), step).result(300)
    assert call("drain", url(folders, f"&drain_every={drain_every}")).code == 0
    assert steps_in(folders.durable) == copied


def test_steps_rewound_by_another_node_are_gone_only_in_its_tier(rewound, call):
    save(rewound, 4)
    assert steps_in(rewound.durable) == [1, 2, 4]
    shutil.rmtree(rewound.durable)
    call("drain", url(rewound, "&roots=accept"))
    assert steps_in(rewound.durable) == [1, 2, 3, 4]


class Overtaken(WrapperBackend):
    """A root that another process starts to use right before this one."""

    def __init__(self, inner, meanwhile):
        super().__init__(inner)
        self.meanwhile = [meanwhile]

    def publish(self, name, data, /, *, exclusive=False):
        if self.meanwhile:
            self.meanwhile.pop()()
        super().publish(name, data, exclusive=exclusive)


def test_two_nodes_that_start_at_once_share_one_run():
    node, other = Places(), Places()
    other.durable = node.durable

    def begin():
        with other.open() as ckpt:
            ckpt.save(make_state(1), 1).result(300)

    with node.open(durable=Overtaken(node.other(), begin)) as ckpt:
        assert ckpt.save(make_state(2), 2).result(300).tiers == ("fast", "durable")
    for one in (node, other):
        with one.open() as ckpt:
            assert ckpt.latest() == 2
    assert len({read_root(b).run for b in (node.fast, other.fast, node.durable)}) == 1


class Elsewhere(WrapperBackend):
    """The same root by another way that its URL does not show."""

    @property
    def url(self):
        return "nfs://host/export"


def test_one_root_via_the_network_cannot_be_two_tiers():
    places = Places()
    same_place = Elsewhere(MemoryBackend(MemoryConfig(name=places.fast._name)))
    with places.open(durable=same_place, options={"keep_fast": 0}) as ckpt:
        with pytest.raises(ConfigError, match="the same place"):
            ckpt.save(make_state(1), 1)
        assert ckpt.steps() == []


def test_a_manual_copy_of_a_tier_is_refused_until_it_has_its_own_identity(folders):
    shutil.rmtree(folders.durable)
    shutil.copytree(folders.fast, folders.durable)
    with pytest.raises(ConfigError, match=f"one place.*delete {ROOT_NAME}"):
        opened(folders)
    (folders.durable / ROOT_NAME).unlink()
    save(folders, 2, roots="accept")
    assert save(folders, 3).tiers == ("fast", "durable")


def test_a_malformed_record_is_refused():
    record = RootRecord("0" * 32, "1" * 32, 2, (("1" * 32, 2),))
    assert decode_root(encode_root(record)) == record
    for change in (
        {"penstock": 2},
        {"run": "x" * 32},
        {"root": None},
        {"opened": -1},
        {"opened": True},
        {"tiers": [["0" * 32]]},
        {"tiers": 3},
    ):
        with pytest.raises(FormatError, match="cannot be read"):
            decode_root(json.dumps(json.loads(encode_root(record)) | change).encode())


def test_a_damaged_record_is_rewritten(folders, caplog):
    (folders.durable / ROOT_NAME).write_bytes(b"nonsense")
    assert save(folders, 2).tiers == ("fast", "durable")
    assert f"{ROOT_NAME} cannot be read" in caplog.text
    assert root_of(folders.fast).slower() == [root_of(folders.durable).root]


def test_an_absent_tier_is_not_forgotten():
    before = [("fast", 3), ("middle", 5), ("durable", 9)]
    assert merged_order(before, [("middle", 6)]) == (("fast", 3), ("middle", 6), ("durable", 9))
    now = [("fast", 4), ("new", 1), ("durable", 10)]
    assert merged_order(before, now) == (
        ("fast", 4),
        ("new", 1),
        ("middle", 5),
        ("durable", 10),
    )
    assert merged_order(before, [("other node", 1), ("middle", 6)])[0] == ("other node", 1)
