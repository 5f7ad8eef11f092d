"""Signals and forks during a save, in separate processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from subprocess import PIPE

import pytest
from tests.integration.faults.test_real_faults import make
from tests.integration.support import run_python, same, start_python
from tests.integration.training import Held, held_checkpointer, wait_until_in

from penstock import BusyError, Checkpointer

SERVER = """
import json, os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
from penstock.core.plugins.registry import default_registry
from tests.integration.faults.test_real_faults import OPTIONS, make
default_registry().listing()  # imports every plugin, so no child has to
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        for number, path in enumerate(["/dev/null", request["out"], request["out"] + ".err"]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        break
    print(pid, flush=True)
else:
    sys.exit()
sys.argv[1:] = [request["url"]]
exec(request["body"])
"""
PROGRAM = """
from penstock import Checkpointer, SaverClosedError
from penstock.core.storage.open import open_backend
from penstock.testing.faults import FaultyBackend

signal.alarm(300)
store = FaultyBackend(open_backend(sys.argv[1]))
gate = threading.Event()

def say(*words):
    print(*words, flush=True)

def held_save(ckpt, step):
    store.clear()
    gate.clear()
    fault = store.block("seal", gate)
    handle = ckpt.save(make(step), step)
    fault.reached.wait()
    return handle

ckpt = Checkpointer(store, **OPTIONS)
ckpt.save(make(1), 1).result()
"""


@pytest.fixture
def url(kind, tmp_path):
    return f"{kind}://{tmp_path}/run"


class Server:
    """Forks a process for each program, so torch is imported only once."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0
        self.process = start_python("-c", SERVER, stdin=PIPE, stdout=PIPE)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, url, body):
        self.count += 1
        out = self.folder / f"{self.count}.out"
        out.touch()
        return self.ask(body=PROGRAM + body, url=url, out=str(out)), out

    def finish(self, pid, out):
        """Its lines, its stderr, and its exit status."""
        status = self.ask(wait=pid)
        return out.read_text().splitlines(), out.with_suffix(".out.err").read_text(), status


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("programs"))
    yield server
    server.process.communicate()


@pytest.fixture
def run(server, url):
    """Run a program; with a signal, send it that once it prints `ready`."""

    def run(body, number=None):
        pid, out = server.start(url, body)
        if number is not None:
            while out.read_text() != "ready\n":
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    pytest.fail(f"it never got ready: {server.finish(pid, out)}")
                time.sleep(0.005)
            os.kill(pid, number)
        lines, errors, status = server.finish(pid, out)
        return lines[number is not None :], errors, status

    return run


@pytest.fixture
def run_fresh(url):
    """Run a program in a new interpreter: its fork is then the first."""

    def run_fresh(body):
        imports = SERVER.partition("for line in")[0]
        done = run_python("-c", imports + PROGRAM + body, url, timeout=300)
        return done.stdout.splitlines(), done.stderr, done.returncode

    return run_fresh


def holds(url, *steps):
    """Exactly these steps exist, whole, and the run continues."""
    with Checkpointer("posix://" + url.partition("://")[2]) as ckpt:
        assert ckpt.steps() == list(steps)
        for step in steps:
            assert same(ckpt.load(step), make(step))
            assert ckpt.verify(step).ok
        ckpt.save(make(99), 99, mode="blocking")
        assert same(ckpt.load(), make(99))


def test_default_sigterm_loses_only_the_pending_save(run, url):
    body = """
handle = held_save(ckpt, 2)
assert not handle.durable.wait(0.3)  # it cannot exist yet
say("ready")
time.sleep(300)
"""
    lines, errors, status = run(body, signal.SIGTERM)
    assert (lines, status) == ([], -signal.SIGTERM), errors
    holds(url, 1)


@pytest.mark.parametrize("managed", [True, False], ids=["with", "bare"])
def test_a_sigterm_handler_that_exits_lets_the_pending_save_end(managed, run, url):
    body = """
def leave(number, frame):
    gate.set()
    sys.exit(7)

signal.signal(signal.SIGTERM, leave)
held_save(ckpt, 2)
say("ready")
"""
    body += "with ckpt:\n    time.sleep(300)\n" if managed else "time.sleep(300)\n"
    lines, errors, status = run(body, signal.SIGTERM)
    assert (lines, status) == ([], 7), errors
    assert "Traceback" not in errors
    holds(url, 1, 2)


def test_a_sigterm_handler_may_save(run, url):
    """As schedulers do: a notice, then some seconds, then the end."""
    body = """
def leave(number, frame):
    gate.set()
    ckpt.save(make(3), 3, mode="blocking")
    say("saved")
    raise SystemExit(0)

signal.signal(signal.SIGTERM, leave)
held_save(ckpt, 2)
say("ready")
with ckpt:
    time.sleep(300)
"""
    lines, errors, status = run(body, signal.SIGTERM)
    assert (lines, status) == (["saved"], 0), errors
    holds(url, 1, 2, 3)


@pytest.mark.parametrize(
    "place",
    [
        "handle.result()",
        pytest.param("ckpt.wait()", marks=pytest.mark.slow),
        pytest.param("time.sleep(300)", marks=pytest.mark.slow),
        pytest.param("handle.durable.result()", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_anywhere_in_training_lets_the_pending_save_end(place, run, url):
    body = f"""
handle = held_save(ckpt, 2)
try:
    say("ready")
    {place}
except KeyboardInterrupt:
    say("interrupted")
gate.set()
ckpt.wait()
ckpt.save(make(3), 3).result()
ckpt.close()
assert ckpt._saver.memory.staging._used == 0
say("closed")
"""
    lines, errors, status = run(body, signal.SIGINT)
    assert (lines, status) == (["interrupted", "closed"], 0), errors
    holds(url, 1, 2, 3)


def test_signals_that_only_count_interrupt_nothing(run, url):
    """A profiler's or a scheduler's: they may interrupt every system call."""
    body = """
count = 0
def tick(number, frame):
    global count
    count += 1

signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for step in range(2, 8):
    ckpt.save(make(step), step, mode=("async", "blocking")[step % 2]).result()
    ckpt.load(step)
signal.setitimer(signal.ITIMER_REAL, 0)
ckpt.close()
say(count > 10)
"""
    lines, errors, status = run(body)
    assert (lines, status) == (["True"], 0), errors
    holds(url, *range(1, 8))


ENDS = {
    "os._exit": ("os._exit(0)", 0),
    "sys.exit": ("sys.exit(0)", 0),
    "an error": ("raise KeyError('of the child')", 1),
}


@pytest.mark.parametrize(
    ("end", "uses"),
    [
        ("os._exit", True),
        ("sys.exit", False),
        pytest.param("an error", True, marks=pytest.mark.slow),
    ],
)
def test_a_fork_during_a_save_is_harmless(uses, end, run, run_fresh, url):
    if end == "an error":
        run = run_fresh
    ending, status_of_child = ENDS[end]
    use = """
    for call in (lambda: ckpt.save(make(3), 3), ckpt.wait, ckpt.load):
        try:
            call()
            say("it worked")
        except SaverClosedError as error:
            assert "forked child" in str(error)
    ckpt.close()
"""
    body = f"""
handle = held_save(ckpt, 2)
child = os.fork()
if child == 0:
    pass
{use if uses else ""}
    {ending}
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {status_of_child}
gate.set()
handle.result()
ckpt.save(make(3), 3).result()
ckpt.close()
say("closed")
"""
    lines, errors, status = run(body)
    assert (lines, status) == (["closed"], 0), errors
    assert ("of the child" in errors) is (end == "an error"), errors
    holds(url, 1, 2, 3)


def test_a_forked_child_may_reopen_the_run(run, url):
    body = """
handle = held_save(ckpt, 2)
child = os.fork()
if child == 0:
    with Checkpointer(sys.argv[1], **OPTIONS) as mine:
        say(mine.steps(), mine.load(1)["number"])
        mine.save(make(5), 5).result()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
gate.set()
handle.result()
ckpt.close()
"""
    lines, errors, status = run(body)
    assert (lines, status) == (["[1] 1"], 0), errors
    holds(url, 1, 2, 5)


# -- a handler that saves, wherever it interrupts a save -------------------------------------------


class Interrupted:
    """State that sends this process a signal when requested, `times` times."""

    def __init__(self, times=1):
        self.times = times

    def state_dict(self):
        if self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGUSR1)
        return {"number": 7}

    def load_state_dict(self, state):
        pass


@pytest.fixture
def on_signal():
    """Calls a handler at SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, lambda *_: handler())
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("use", "mode"),
    [
        ("save", "blocking"), ("save", "async"), ("save", "lazy"),
        ("wait", "async"), ("fence", "lazy"), ("close", "blocking"),
    ],
)  # fmt: skip
def test_a_handler_that_interrupts_the_planning_of_a_save_is_refused(mode, use, on_signal):
    refused = []

    def handler():
        with pytest.raises(BusyError, match="Set a flag in the handler") as raised:
            ckpt.save({"last": 1}, 9) if use == "save" else getattr(ckpt, use)()
        refused.append(raised.value)

    on_signal(handler)
    with Checkpointer("memory://", mode=mode) as ckpt:
        ckpt.save({"a": Interrupted()}, 1).result()
        assert len(refused) == 1
        assert ckpt.steps() == [1]
        assert ckpt.load(1)["a"] == {"number": 7}


@pytest.mark.parametrize("mode", ["blocking", "async", "lazy"])
def test_a_save_survives_an_error_from_such_a_handler(mode, on_signal):
    on_signal(lambda: ckpt.save({"last": 1}, 9))
    with Checkpointer("memory://", mode=mode) as ckpt:
        with pytest.raises(BusyError) as raised:
            ckpt.save({"a": Interrupted(2)}, 1)
        assert "save of step 1, which the handler interrupted" in raised.value.__notes__[0]
        ckpt.wait()
        assert ckpt.steps() == [1]
        ckpt.save({"a": 2}, 2).result()


def test_a_handler_is_refused_before_the_capture_has_a_thread(monkeypatch, on_signal):
    """The save thread does not exist yet: a wait for it would never end."""
    refused = []

    def handler():
        with pytest.raises(BusyError):
            ckpt.save({"last": 1}, 9)
        refused.append(True)

    def start(thread):
        if thread.name == "penstock-capture":
            signal.raise_signal(signal.SIGUSR1)
        begin(thread)

    begin = threading.Thread.start
    on_signal(handler)
    with Checkpointer("memory://") as ckpt:
        monkeypatch.setattr(threading.Thread, "start", start)
        ckpt.save({"a": 1}, 1).result()
        assert refused
        assert ckpt.steps() == [1]


class SignallingStep:
    """A number that sends this process a signal when requested."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        signal.raise_signal(signal.SIGUSR1)
        return self.number


def test_a_handler_is_refused_during_argument_checks_of_save(on_signal):
    refused = []

    def handler():
        with pytest.raises(BusyError):
            ckpt.save({"last": 1}, 9)
        refused.append(True)

    on_signal(handler)
    with Checkpointer("memory://") as ckpt:
        ckpt.save({"a": 1}, SignallingStep(1)).result()
        assert refused
        assert ckpt.steps() == [1]


@pytest.mark.parametrize("caught", [True, False], ids=["caught", "let out"])
@pytest.mark.parametrize("use", ["save", "close"])
def test_a_handler_that_interrupts_the_wait_for_another_save_is_refused(
    use, caught, store, gate, on_signal
):
    """Its save would be newer than the state of the interrupted save."""
    refused = []

    def handler():
        gate.set()
        try:
            ckpt.save({"last": 1}, 9, mode="blocking") if use == "save" else ckpt.close()
        except BusyError as error:
            refused.append(error)
            if not caught:
                raise

    on_signal(handler)
    main = threading.current_thread()

    def interrupt():
        wait_until_in(("penstock.core.save.pending", "take_turn"), main)
        signal.pthread_kill(main.ident, signal.SIGUSR1)

    with Checkpointer(store) as ckpt:
        store.block("seal", gate)
        ckpt.save({"a": 1}, 1)
        pest = threading.Thread(target=interrupt)
        pest.start()
        if caught:
            ckpt.save({"a": 2}, 2).result()
        else:
            with pytest.raises(BusyError, match="Set a flag in the handler") as raised:
                ckpt.save({"a": 2}, 2)
            assert raised.value is refused[0]
        pest.join()
        ckpt.wait()
        assert len(refused) == 1
        assert ckpt.steps() == [1, 2]
        ckpt.save({"last": 1}, 9).result()


def test_an_error_from_a_handler_does_not_harm_the_awaited_save(on_signal):
    hold = Held()

    def handler():
        hold.let_go.set()
        ckpt.save({"last": 1}, 9)

    on_signal(handler)
    main = threading.current_thread()

    def interrupt():
        wait_until_in(("penstock.core.save.capture", "fence"), main)
        signal.pthread_kill(main.ident, signal.SIGUSR1)

    with held_checkpointer("memory://", mode="lazy") as ckpt:
        first = ckpt.save({"hold": hold}, 1)
        pest = threading.Thread(target=interrupt)
        pest.start()
        with pytest.raises(BusyError, match="Set a flag in the handler"):
            ckpt.save({"a": 2}, 2)
        pest.join()
        assert first.result().step == 1
        ckpt.wait()
        assert ckpt.steps() == [1, 2]


def test_a_handler_that_interrupts_the_wait_for_a_capture_saves(on_signal):
    hold = Held()

    def handler():
        hold.let_go.set()
        ckpt.save({"last": 1}, 9, mode="blocking")

    on_signal(handler)
    with held_checkpointer("memory://", defer=()) as ckpt:
        waits = ("penstock.core.save.job", "capture_now")
        main = threading.current_thread()

        def interrupt():
            hold.reached.wait()
            wait_until_in(waits, main)
            signal.pthread_kill(main.ident, signal.SIGUSR1)

        pest = threading.Thread(target=interrupt)
        pest.start()
        ckpt.save({"hold": hold}, 1).result()
        pest.join()
        assert ckpt.steps() == [1, 9]


def test_a_handler_may_choose_to_skip(on_signal):
    handles = []
    on_signal(lambda: handles.append(ckpt.save({"last": 1}, 9)))
    with Checkpointer("memory://", on_busy="skip") as ckpt:
        ckpt.save({"a": Interrupted()}, 1).result()
        assert handles[0].skipped
        assert ckpt.steps() == [1]


def test_no_saving_handler_interrupts_provider_loading():
    code = """
import torch
from penstock import Checkpointer
from penstock.core.plugins.registry import default_registry
with Checkpointer("memory:"):
    found = default_registry().listing(load=False)
print({one.state for one in found if one.kind == "provider"})
"""
    done = run_python("-c", code, timeout=100)
    assert done.stdout.strip() == "{'ok'}", done.stderr
