"""Commands on a run with a root on each host: under torchrun, and on one host alone."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import pytest
import torch
import torch.distributed as dist
from tests import interpreters
from tests.core.cli.command import Done, caller
from tests.integration.ranks.test_hosts import Hosts

from penstock.core.abc import HOST_NAME
from penstock.core.cli.output.shares import spreads_of

# A host name for each rank, if this process may change its own.
COMMAND = """
import ctypes, os, socket, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x04000000) == 0:  # CLONE_NEWUTS
    socket.sethostname(sys.argv[1][int(os.environ["RANK"])])
os.environ["HERE"] = sys.argv[1][int(os.environ["RANK"])]
del sys.argv[1]
from penstock.core.cli.main import main
main()
"""


@pytest.fixture
def call(capsys, monkeypatch):
    return caller(capsys, monkeypatch)


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "run.toml").write_text(
        f'[backend]\ntype = "hosts"\npath = "{tmp_path}/${{HERE}}"\ncopies = 1\n'
    )
    return Hosts(tmp_path, copies=1)


@pytest.fixture
def command(tmp_path):
    """A function that runs `penstock ARGUMENTS...` on each of these hosts."""

    def run(hosts, name, *rest):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = {"WORLD_SIZE": str(len(hosts)), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        words = "-c", COMMAND, hosts, name, tmp_path / "run.toml", *rest
        # Not `run_as_torchrun`, which kills the other ranks when the first one fails.
        ranks = [
            interpreters.start(
                *words, env={**os.environ, **job, "RANK": str(rank)}, stdout=PIPE, stderr=PIPE
            )
            for rank in range(len(hosts))
        ]
        try:
            with ThreadPoolExecutor(len(ranks)) as pool:
                outputs = [*pool.map(lambda rank: rank.communicate(timeout=200), ranks)]
        finally:
            for rank in ranks:
                rank.kill()
        return [Done(r.returncode, *out) for r, out in zip(ranks, outputs, strict=True)]

    return run


def damage(root):
    """Change a byte of the largest blob in this root; return the blob's name."""
    blob = max(root.glob("data/*/blobs/*"), key=lambda path: path.stat().st_size)
    data = bytearray(blob.read_bytes())
    data[0] ^= 1
    blob.write_bytes(data)
    return blob.name


@pytest.mark.process
@pytest.mark.multirank
def test_ranks_of_torchrun_show_and_verify_the_run_of_all_hosts(hosts, command):
    hosts.save("abc", 1, 2)
    first, *others = command("abc", "ls", "--json")
    assert [rank.out for rank in others] == ["", ""]
    found = first.json
    for step in found["checkpoints"]:
        assert step["state"] == "ok"
        shares = step["spread"]["shares"]
        assert len(shares) == 3
        assert {share["bytes_only_here"] for share in shares} == {0}
    assert step["spread"]["state"] == "replicated"
    name = damage(hosts.root("b"))
    record = hosts.root("c") / "commits/00000001-0.json"
    record.write_bytes(record.read_bytes().replace(b"1", b"2", 1))
    first, *others = command("abc", "verify", "--all")
    assert [first.code, *(rank.code for rank in others)] == [1, 1, 1]
    assert "of rank 1: " in first.out
    assert name in first.out
    assert "copies on 3 hosts verified, 2 damaged" in first.out
    first, *others = command("abc", "verify", "--all", "--repair")
    assert [first.code, *(rank.code for rank in others)] == [0, 0, 0], first.out + first.err
    assert re.search(f"^host . of rank 1: replaced .*{name}$", first.out, re.MULTILINE)
    assert "copies on 3 hosts verified, 0 damaged" in first.out
    assert command("abc", "verify", "--all")[0].code == 0


@pytest.mark.process
@pytest.mark.multirank
def test_copy_reads_the_files_of_all_hosts(hosts, command, call, tmp_path):
    hosts.save("ab", 1)
    for path in hosts.root("a").glob("data/*/blobs/00001-*"):
        path.unlink()
    first, other = command("ab", "copy", str(tmp_path / "out"))
    assert [first.code, other.code] == [0, 0], first.err
    assert call("verify", str(tmp_path / "out")).code == 0


@pytest.mark.process
@pytest.mark.multirank
def test_drain_copies_the_files_of_all_hosts(hosts, command, call, tmp_path):
    hosts.save("ab", 1, 2)
    config = tmp_path / "run.toml"
    fast = ", ".join(config.read_text().splitlines()[1:])
    config.write_text(
        f'[backend]\ntype = "tiered"\nfast = {{{fast}}}\ndurable = "{tmp_path}/durable"\n'
    )
    (alone,) = command("a", "drain")
    assert alone.code == 1
    assert "run the command under torchrun on all of them" in alone.err
    first, other = command("ab", "drain")
    assert [first.code, other.code, other.out] == [0, 0, ""], first.err
    assert call("verify", str(tmp_path / "durable"), "--all").code == 0
    assert call("ls", str(tmp_path / "durable"), "--json").json["checkpoints"][1]["step"] == 2


@pytest.mark.process
@pytest.mark.multirank
def test_deletions_need_all_hosts_of_the_last_job(hosts, command):
    hosts.save("abc", 1, 2)
    first, *_ = command("ab", "delete", "1", "--yes")
    assert first.code == 1
    assert "nothing was deleted" in first.err
    refused, *_ = command("ab", "prune")
    assert refused.code == 1
    first, *others = command("abc", "delete", "1", "--yes")
    assert [first.code, *(rank.code for rank in others)] == [0, 0, 0], first.err
    assert hosts.run("abc", lambda ckpt, *_: ckpt.steps()) == [[2]] * 3


@pytest.mark.process
@pytest.mark.multirank
def test_doctor_checks_each_host_and_changes_nothing(hosts, command):
    hosts.save("ab", 1, 2)
    before = (hosts.root("a") / HOST_NAME).read_bytes()
    first, *others = command("ab", "doctor", "--no-probe", "--json")
    assert [(rank.code, rank.out) for rank in others] == [(0, "")], first.err
    checks = {check["name"]: check for check in first.json["checks"]}
    assert checks["copies"]["status"] == "ok"
    assert checks["copies"]["found"] == "step 2 is replicated"
    assert checks["hosts"]["found"].startswith("2 in 2 domains, copies = 1")
    there = next(check for name, check in checks.items() if name.startswith("rank 1, "))
    names = [check["name"] for check in there["values"]["checks"]]
    assert {"folder", "space", "write a record"} <= {*names}
    assert (hosts.root("a") / HOST_NAME).read_bytes() == before
    (alone,) = command("a", "doctor", "--no-probe")
    assert "run the command under torchrun on all of them" in alone.out


@pytest.mark.process
@pytest.mark.multirank
def test_doctor_warns_of_absent_hosts_and_lost_copies(hosts, command):
    hosts.save("abc", 1)
    hosts.lose("b")
    first, *_ = command("ac", "doctor", "--no-probe", "--json")
    warned = {c["name"]: c["found"] for c in first.json["checks"] if c["status"] == "warn"}
    assert "absent hosts of the last job: b" in warned["hosts"]
    assert warned["copies"] == "step 1 is whole"


@pytest.mark.process
@pytest.mark.multirank
def test_real_torchrun_runs_the_module(hosts, tmp_path):
    hosts.save("01", 7)
    config = tmp_path / "run.toml"
    config.write_text(config.read_text().replace("HERE", "RANK"))
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    done = subprocess.run(
        [sys.executable, *words, "-m", "penstock", "show", config],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 7") == 1
    assert "ONLY HERE" in done.stdout


def spreads(hosts, names):
    """The spread of each checkpoint, as rank 0 on these hosts sees it."""

    def look(ckpt, rank, _):
        ckpt.steps()
        records = [record for _, record in ckpt._catalog.records()]
        return rank or [*spreads_of(ckpt._backend, records).values()]

    return hosts.run(names, look)[0]


def test_lost_host_leaves_files_without_copies_and_two_leave_it_incomplete(hosts):
    hosts.save("abcd", 1)
    assert [spread.state for spread in spreads(hosts, "abcd")] == ["replicated"]
    hosts.lose("b")
    (spread,) = spreads(hosts, "acd")
    assert spread.state == "whole"
    assert sum(share.bytes_only_here for share in spread.shares) > 0
    hosts.lose("a")
    (spread,) = spreads(hosts, "cd")
    assert spread.state == "incomplete"


def test_step_that_is_in_the_next_tier_only_hides_no_spread(tmp_path):
    tiers = Hosts(tmp_path, durable=str(tmp_path / "durable"), copies=1)
    tiers.save("ab", 1, 2)
    for host in "ab":
        (tiers.root(host) / "commits/00000001-0.json").unlink()
    assert spreads(tiers, "ab")[1].state == "replicated"


def test_host_that_missed_the_last_job_is_marked(hosts):
    hosts.save("ab", 1)
    hosts.save("a", 2)
    (_, newest) = spreads(hosts, "ab")
    assert {share.host: share.current for share in newest.shares} == {"a": True, "b": False}


@pytest.mark.parametrize("url", ["hosts://{}", "{}"])
@pytest.mark.parametrize("name", ["ls", "show"])
def test_one_host_alone_says_which_others_there_are(hosts, call, name, url):
    hosts.save("ab", 1)
    done = call(name, url.format(hosts.root("a")))
    assert "this is the root of host a, one of the 2 hosts of the last job (a, b)" in (
        done.out + done.err
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("verify",), "all checkpoints are incomplete"),
        (("show",), "all checkpoints are incomplete"),
        (("delete", "1"), "the hosts b, c of the last job are absent"),
        (("prune",), "the hosts b, c of the last job are absent"),
    ],
)
def test_one_host_alone_names_the_absent_hosts(hosts, call, words, why):
    hosts.save("abc", 1, 2)
    name, *rest = words
    done = call(name, f"hosts://{hosts.root('a')}", *rest)
    assert done.code == 1
    assert why in done.err
    assert "--force" not in done.err
    assert "older step" not in done.err


def test_verify_all_reports_incomplete_checkpoints(hosts, call):
    hosts.save("abc", 1, 2)
    url = f"hosts://{hosts.root('a')}"
    done = call("verify", url, "--all")
    assert done.code == 1
    assert done.out.endswith("0 checkpoints verified, 0 damaged, 2 incomplete\n")
    found = call("verify", url, "--all", "--json").json
    assert found["ok"] is False
    assert list(found["incomplete"]) == ["1", "2"]


def test_run_without_hosts_has_no_note(call, tmp_path):
    import penstock

    with penstock.Checkpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).result()
    assert "host" not in call("ls", tmp_path).out
    assert "hosts" not in call("ls", tmp_path, "--json").json
