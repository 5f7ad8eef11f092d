"""Hosts are killed, stopped, cut off or full at chosen moments: no replicated step is lost."""

import json
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from tests import interpreters
from tests.integration.ranks.test_host_kills import HOST
from tests.integration.ranks.test_processes import end

from penstock import Checkpointer
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.core.catalog.survey import read_commit
from penstock.core.format.records import parse_commit_name

LIMIT_S = 16  # a host is given up after a quarter of it, longer than a busy machine delays it

PROGRAM = (
    HOST
    + """
import json, signal
from penstock.backends.hosts import HostsBackend, HostsConfig
from penstock.backends.posix import PosixBackend, PosixConfig
from penstock.backends.tiered import TieredBackend, TieredConfig
from penstock.core.abc import DelegatingBackend

options = json.loads(sys.argv[6])

class Struck(DelegatingBackend):
    def __init__(self, path, operation="", match="", left=0, number=0):
        super().__init__(PosixBackend(PosixConfig(path=path)))
        self.hit, self.match, self.left, self.number = operation, match, left, number

    def around(self, operation, names, call):
        if operation != self.hit or not any(self.match in name for name in names):
            return call()
        self.left -= 1
        if self.left:
            return call()
        say("struck")
        signal.pthread_kill(threading.get_ident(), self.number)  # stops this thread at once
        try:
            return call()
        finally:
            say("continued")

def place(kind, path):
    strike = options.get("strike", {})
    return Struck(path, **strike.get(kind, {}) if rank == strike.get("rank") else {})

hosts = HostsConfig(path="", copies=1, copy_bytes_per_s=1 << 20)
store = HostsBackend(hosts, root=place("root", f"{root}/{host}"))
if options.get("tiered"):
    config = TieredConfig(fast="memory://", durable="memory://", drain_in="thread")
    store = TieredBackend(config, fast=store, durable=place("durable", f"{root}/durable"))
limits = {"rank_timeout_s": options.get("limit_s", 60), "rank_network": options.get("network")}
with penstock.Checkpointer(store, retention={"keep_last": 2}, **limits) as ckpt:
    for step in range(resume(ckpt), options["steps"]):
        handle = ckpt.save(state_of(step), step)
        say("committed", handle.committed.result(60).step)
        if step not in options.get("alone", []):
            say("replicated", step, handle.replicated.result(60))
        if options.get("asks"):
            sys.stdin.readline()
say("closed")
"""
)


class Job:
    """One rank on each of these hosts."""

    def __init__(self, root, hosts="ab", program=PROGRAM, **options):
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        words = len(hosts), self._store.port, root
        with (root.parent / "log").open("a") as log:
            self.ranks = [
                interpreters.start(
                    "-c", program, rank, *words, host, json.dumps(options),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )
                for rank, host in enumerate(hosts)
            ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.ranks:
            process.stdin.close()
        end(self.ranks)

    def read(self, *words):
        """Read the reports of each rank up to the one that begins with these words."""
        return [until(process, *words) for process in self.ranks]

    def ask(self):
        """Let each rank save the next step."""
        for process in self.ranks:
            process.stdin.write("\n")
            process.stdin.flush()

    def end(self):
        """Return the restored step, which was whole, after the job has ended."""
        found = {tuple(words) for words in self.read("restored")}
        self.read("closed")
        ((step, whole),) = found
        assert whole == "True"
        return int(step)


def until(process, *words):
    for line in process.stdout:
        if line.split()[: len(words)] == [*words]:
            return line.split()[len(words) :]
    raise AssertionError(f"no {words}: the process ended with {process.wait()}")


def wake(process):
    """Continue a process once it has stopped."""
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)


def check_replicas(root, *steps):
    """Check that the run has these steps, and that the two hosts have equal files for them."""
    hosts = {host: PosixBackend(PosixConfig(path=str(root / host))) for host in "ab"}
    records = [[info.name for info in host.list("commits/")] for host in hosts.values()]
    assert [[parse_commit_name(name)[0] for name in names] for names in records] == [[*steps]] * 2
    for uid in [read_commit(hosts["a"], name).uid for name in records[0]]:
        files = [(root / host / "data" / uid).rglob("*.*") for host in "ab"]
        found = [
            {p.name: p.read_bytes() for p in paths if p.name != "intent.json"} for paths in files
        ]
        assert found[0] == found[1]
        assert len(found[0]) == 4  # two blobs and two parts


# The rank that is struck, the place, and the call.
MOMENTS = {
    "capture": (1, "root", "create", "/blobs/", 3),
    "commit": (0, "root", "publish", "commits/", 3),
    "pull": (1, "root", "submit_write", "/pulled/", 8),
    "landing": (1, "root", "rename", "/pulled/", 3),
    "completion": (1, "root", "publish", "/index", 3),
    "deletion of the record": (0, "root", "delete", "commits/", 1),
    "deletion": (0, "root", "delete", "/index", 1),
    "drain": (0, "durable", "submit_write", "/blobs/", 4),
}


def strike(moment, number):
    rank, kind, operation, match, left = MOMENTS[moment]
    call = {"operation": operation, "match": match, "left": left, "number": number}
    return {"rank": rank, kind: call}


def some(fast):
    """All moments; those that are not in `fast` are slow."""
    return [pytest.param(m, marks=[] if m in fast else pytest.mark.slow) for m in MOMENTS]


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("moment", some(["pull", "drain"]))
def test_host_killed_at_a_chosen_moment(tmp_path, moment):
    root, tiered = tmp_path / "run", moment == "drain"
    with Job(root, steps=6, strike=strike(moment, signal.SIGKILL), tiered=tiered) as job:
        victim = job.ranks[MOMENTS[moment][0]]
        until(victim, "struck")
        victim.wait()
    with Job(root, steps=6, tiered=tiered) as job:
        restored = job.end()
    assert restored >= 1  # step 1 was replicated before
    check_replicas(root, *sorted({restored, 4, 5}))
    if tiered:
        with Checkpointer(root / "durable") as ckpt:
            assert ckpt.latest() == 5
            assert ckpt.verify(5).ok


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_host_that_continues_in_the_next_job_changes_nothing(tmp_path, moment):
    root, tiered = tmp_path / "run", moment == "drain"
    with Job(root, steps=6, strike=strike(moment, signal.SIGSTOP), tiered=tiered) as old:
        rank = MOMENTS[moment][0]
        until(old.ranks[rank], "struck")
        old.ranks[1 - rank].kill()
        with Job(root, steps=6, asks=True, tiered=tiered) as job:
            restored = int(job.read("restored")[0][0])
            for step in range(restored + 1, 6):
                assert job.read("replicated", str(step)) == [["True"]] * 2
                if step == restored + 1:
                    wake(old.ranks[rank])
                    until(old.ranks[rank], "continued")
                job.ask()
            job.read("closed")
    check_replicas(root, restored, 4, 5)


@pytest.mark.process
@pytest.mark.multirank
def test_stopped_copy_of_the_last_job_does_not_end_a_copy_of_this_job(tmp_path):
    root = tmp_path / "run"
    call = {"match": "/pulled/", "left": 1, "number": signal.SIGSTOP}
    landed = {"rank": 1, "root": {**call, "operation": "rename"}}
    begun = {"rank": 1, "root": {**call, "operation": "submit_write"}}
    with Job(root, steps=2, strike=landed) as old:
        until(old.ranks[1], "struck")
        old.ranks[0].kill()
        with Job(root, steps=2, strike=begun) as job:
            until(job.ranks[1], "struck")
            wake(old.ranks[1])
            until(old.ranks[1], "continued")
            assert not [*(root / "b").glob("data/*/blobs/00000*")]
            wake(job.ranks[1])
            job.read("closed")
    check_replicas(root, 0, 1)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.multirank
def test_host_that_is_stopped_during_a_commit_gets_its_copies_later(tmp_path):
    root = tmp_path / "run"
    with Job(root, steps=4, limit_s=LIMIT_S, strike=strike("commit", signal.SIGSTOP)) as job:
        until(job.ranks[0], "struck")
        job.ranks[1].send_signal(signal.SIGSTOP)
        wake(job.ranks[0])
        until(job.ranks[0], "committed", "2")
        wake(job.ranks[1])
        assert job.read("replicated", "2") == [["True"]] * 2
        job.read("closed")
    check_replicas(root, 2, 3)
    assert "lacks the record commits/" in (tmp_path / "log").read_text()


class Namespaces:
    """A shell in a user namespace and others, which ranks enter."""

    def __init__(self, *kinds):
        words = ["unshare", "--user", "--map-root-user", *(f"--{kind}" for kind in kinds), "sh"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._shell = subprocess.Popen(words, text=True, **pipes)
        self.pid = self._shell.pid

    def run(self, command):
        self._shell.stdin.write(f"{command} && echo done\n")
        self._shell.stdin.flush()
        answer = self._shell.stdout.readline()
        if answer != "done\n":
            pytest.skip(f"no namespaces: {answer}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._shell.communicate()


ENTER = """
import ctypes, json, os, subprocess, sys
options, number = json.loads(sys.argv[6]), 1 + int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
for kind in options["enter"] if number >= options["first"] else []:
    with open(f"/proc/{options['pid']}/ns/{kind}") as file:
        assert libc.setns(file.fileno(), 0) == 0
"""

CONNECT = """
assert libc.unshare(0x40000000) == 0  # CLONE_NEWNET

def ip(words, *where):
    subprocess.run([*where, "ip", *words.split()], check=True)

ip("link set lo up")
switch = f"/proc/{options['pid']}/ns/net"
for net in (1, 2):
    ip(f"link add eth{net} type veth peer name port{net}{number} netns {options['pid']}")
    ip(f"addr add 10.{net}.0.{number}/24 dev eth{net}")
    ip(f"link set eth{net} up")
    ip(f"link set port{net}{number} master bridge up", "nsenter", f"--net={switch}")
os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
"""


@pytest.mark.process
@pytest.mark.multirank
def test_full_host_gets_its_copies_once_it_has_room(tmp_path):
    root = tmp_path / "run"
    (root / "b").mkdir(parents=True)
    with Namespaces("mount") as of_b:
        of_b.run(f"cd {root} && mount -t tmpfs -o size=4M tmpfs b")
        options = {"pid": of_b.pid, "enter": ["user", "mnt"], "first": 2}
        with Job(root, program=ENTER + PROGRAM, steps=3, asks=True, alone=[1], **options) as job:
            assert job.read("replicated", "0") == [["True"]] * 2
            of_b.run(
                "head -c $(($(df --output=avail -B1 b | tail -1) - 600000)) /dev/zero > b/full"
            )
            job.ask()
            job.read("committed", "1")
            while "step 1 has too few copies" not in (tmp_path / "log").read_text():
                time.sleep(0.05)
            of_b.run("rm b/full")
            job.ask()
            assert job.read("replicated", "2") == [["True"]] * 2
            job.ask()
            job.read("closed")
    text = (tmp_path / "log").read_text()
    assert "no space left" in text.lower()


@contextmanager
def switched(root, hosts="ab", **options):
    """A job whose store has another network, as training does; yields the switch, too."""
    store = '"10.1.0.1", 29500, is_master=rank == 0, wait_for_workers=False'
    program = ENTER + CONNECT + PROGRAM.replace('"127.0.0.1", port, is_master=False', store)
    with Namespaces("net") as switch:
        switch.run("ip link add bridge type bridge && ip link set bridge up")
        options |= {"pid": switch.pid, "enter": ["user", "net"], "first": 1}
        options |= {"network": "10.2.0.0/24", "limit_s": LIMIT_S}
        with Job(root, hosts, program, **options) as job:
            yield job, switch


# The call of host `a` during which it is cut off.
LOOKS = {
    "join": ("read_record", "tier/host.json"),
    "inventory": ("list", "commits/"),
    "record": ("read_record", "commits/"),
    "data": ("read", "/blobs/"),
}


@pytest.mark.process
@pytest.mark.multirank
@pytest.mark.parametrize("tiered", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "look", [pytest.param(k, marks=[] if k == "data" else pytest.mark.slow) for k in LOOKS]
)
def test_host_cut_off_during_a_restore_lets_no_rank_restore_alone(tmp_path, look, tiered):
    root, order = tmp_path / "run", "cab"  # no host has the rows of its rank
    with Job(root, "abc", steps=2, tiered=tiered) as job:
        job.end()
    operation, match = LOOKS[look]
    call = {"operation": operation, "match": match, "left": 1, "number": signal.SIGSTOP}
    strike = {"rank": 1, "root": call}
    with switched(root, order, steps=2, tiered=tiered, strike=strike) as (job, switch):
        until(job.ranks[1], "struck")
        switch.run("ip link set port22 down")
        wake(job.ranks[1])
        found = [re.findall("restored .*", process.stdout.read()) for process in job.ranks]
    assert found in ([["restored 1 True"]] * 3, [[]] * 3)
    with Job(root, order, steps=2, tiered=tiered) as job:
        assert job.end() == 1


@pytest.mark.process
@pytest.mark.multirank
def test_cut_off_host_does_not_stop_training(tmp_path):
    root = tmp_path / "run"
    options = {"asks": True, "alone": [1, 2], "tiered": True}
    with switched(root, steps=3, **options) as (job, switch):
        assert job.read("replicated", "0") == [["True"]] * 2
        switch.run("ip link set port22 down")
        for step in "12":
            job.ask()
            job.read("committed", step)
    assert "straight to tier durable" in (tmp_path / "log").read_text()
    with Job(root, steps=4, tiered=True) as job:
        assert job.end() == 2
