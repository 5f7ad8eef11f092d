"""Python programs in separate processes, which need not import torch first.

Importing torch costs a new interpreter 1.5 s of CPU, and the suite starts some hundred. A server,
one for all workers of pytest-xdist, imports it once and forks a process per program; for programs
with more imports, it forks a server that has these. A server has one thread and has only imported
modules, so its forks are like new; only options of the interpreter and variables read at its start
(`PYTHON...`, `OMP_NUM_THREADS`) are the server's. Tests of imports need `subprocess`.

As a script, this is the server.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# torch._dynamo: the first optimizer of a process imports it.
IMPORTED = [
    "torch",
    "torch._dynamo",
    "numpy",
    "penstock.core.checkpointer",
    "penstock.testing.faults",
]
_REQUEST_BYTES = 1 << 20
_RUN = "PYTEST_XDIST_TESTRUNUID"


class Server:
    """Forks programs for one interpreter."""

    def __init__(self, python=sys.executable, imports=()):
        """Start it. It ends when this process does.

        Args:
            python: The interpreter, possibly of another environment.
            imports: Modules that it imports beside torch. Such a server is forked from the tests'
                own one.
        """
        sys.audit("tests.interpreters.start", python)  # `--fast` raises here, with nothing open
        if python == sys.executable and not imports and _RUN in os.environ:
            self._socket, self._process = _connected(), None
        else:
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with other:
                self._process = _started(python, other, imports)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
        atexit.register(self.close)

    def close(self):
        atexit.unregister(self.close)
        self._socket.close()
        if self._process is not None:  # a shared server ends with the last worker
            self._process.wait()

    def start(self, *words, cwd=None, env=None, stdin=None, stdout=None, stderr=None):
        """A running `python WORDS...`, as `subprocess.Popen` in text mode."""
        return Process(self._socket, words, cwd, env, (stdin, stdout, stderr))

    def run(self, *words, timeout=300, check=False, **around):
        """`python WORDS...` to its end, with its output, as `subprocess.run`."""
        with self.start(
            *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **around
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(words, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def run_as_torchrun(self, count, *words, timeout=300, cwd=None, env=None):
        """`python WORDS...` on N ranks, with the store and the variables that torchrun gives.

        Returns a `CompletedProcess` for each rank. If one fails, the others are killed.
        """
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            **(os.environ if env is None else env),
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "none",
        }  # fmt: skip
        ranks = []

        def kill_all():
            for process in ranks:
                if process.returncode is None:  # not `kill`: another thread reads the status
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)

        def end(process):
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                if process.returncode != 0:
                    kill_all()
            return subprocess.CompletedProcess(words, process.returncode, out, err)

        with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as stack:
            stack.callback(kill_all)
            for rank in map(str, range(count)):
                process = self.start(
                    *words, cwd=cwd, env={**common, "RANK": rank, "LOCAL_RANK": rank},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                ranks.append(process)
            return [*pool.map(end, ranks)]


def _started(python, requests, imports=()):
    """A running server, which takes its requests from a socket."""
    variables = {**os.environ}
    if python != sys.executable:
        # Kept for our own interpreter: `tools/break_guards.py` tests a copy of the package through
        # it, and a server without it would import the installed, unbroken one.
        variables.pop("PYTHONPATH", None)
    # A fork would lack further threads.
    variables |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    if imports:
        return start(__file__, *imports, env=variables, stdin=requests)
    return subprocess.Popen([python, __file__], env=variables, stdin=requests)


def _connected():
    """A connection to the server of all workers, which the first one starts."""
    # Programs of tests inherit the variable, but may be of another interpreter or package.
    where = zlib.crc32(f"{sys.executable} {__file__} {os.environ.get('PYTHONPATH')}".encode())
    path = Path(tempfile.gettempdir(), f"penstock-{os.environ[_RUN]}-{where:08x}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _only_one():
        if not path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(path))
                listener.listen()
                # No process waits for it: `subprocess` would warn.
                _started(sys.executable, listener).returncode = 0
        connection.connect(str(path))
    return connection


@contextlib.contextmanager
def _only_one():
    """Keep other workers from looking for the server, and the server from ending."""
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def server(*imports):
    """The server of the interpreter that runs the tests, with more modules imported."""
    return Server(imports=imports)


def start(*words, **around):
    """`Server.start` of the interpreter that runs the tests."""
    return server().start(*words, **around)


def run(*words, **around):
    """`Server.run` of the interpreter that runs the tests."""
    return server().run(*words, **around)


def run_as_torchrun(*words, **around):
    """`Server.run_as_torchrun` of the interpreter that runs the tests.

    Returns the output of each rank.

    Raises:
        AssertionError: A rank has failed.
        TimeoutExpired: One has not ended.
    """
    ended = server().run_as_torchrun(*words, **around)
    errors = "".join(rank.stderr[-4000:] for rank in ended if rank.returncode)
    assert not any(rank.returncode for rank in ended), errors
    return [rank.stdout for rank in ended]


class Process:
    """A forked program with the attributes and methods of `subprocess.Popen`."""

    def __init__(self, server, words, cwd, env, streams):
        sys.audit("tests.interpreters.start", *words)
        self.args = words
        self.returncode = None
        with contextlib.ExitStack() as stack:
            ends = [_ends(stream, number, stack) for number, stream in enumerate(streams)]
            self.stdin, self.stdout, self.stderr = (mine for mine, _ in ends)
            # Of packets: a program may end before its pid is read.
            self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(status.close)
            request = {
                "words": [os.fspath(w) if isinstance(w, os.PathLike) else str(w) for w in words],
                "cwd": str(cwd or Path.cwd()),
                "env": {**(os.environ if env is None else env)},
            }
            socket.send_fds(
                server, [json.dumps(request).encode()], [*(its for _, its in ends), status.fileno()]
            )
        try:
            self.pid = int(self._line())
        except BaseException:  # such as a test's timeout
            self._close()
            self._status.close()
            raise

    def poll(self):
        if self.returncode is None:
            self._status.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                self._ended(self._line())
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self._ended(self._line())
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.returncode

    def communicate(self, input=None, timeout=None):  # noqa: A002 - as subprocess calls it
        """Read both outputs to the end, and wait for the process."""
        found = {}
        threads = [
            threading.Thread(target=lambda k=k, s=s: found.update({k: s.read()}), daemon=True)
            for k, s in (("out", self.stdout), ("err", self.stderr))
            if s is not None and not s.closed
        ]
        for thread in threads:
            thread.start()
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or "")
                self.stdin.close()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():  # one of its processes keeps the pipe open
                raise subprocess.TimeoutExpired(self.args, timeout)
        self._close()
        return found.get("out"), found.get("err")

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._close()
        self.wait()

    def _close(self):
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def _line(self):
        """The server's next message on this process: its pid, then its status."""
        data = self._status.recv(64)
        if not data:
            raise RuntimeError(f"the server of interpreters has ended: {self.args}")
        return data

    def _ended(self, line):
        self.returncode = int(line)
        self._status.close()


def _ends(stream, number, stack):
    """The end of a standard stream that is kept here, if any, and the process's descriptor."""
    if stream is None:
        return None, number
    if stream == subprocess.DEVNULL:
        its = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, its)
        return None, its
    if stream != subprocess.PIPE:
        return None, stream if isinstance(stream, int) else stream.fileno()
    reader, writer = os.pipe()
    mine, its = (writer, reader) if number == 0 else (reader, writer)
    stack.callback(os.close, its)
    return os.fdopen(mine, "w" if number == 0 else "r"), its


# -- the server ------------------------------------------------------------------------------------


def serve(source):
    """Fork a process for each request. Returns only in these, with their words.

    Args:
        source: Where requests come from: a connection, or a socket that listens for connections.
    """
    listens = source.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    selector = selectors.PollSelector()
    selector.register(source, selectors.EVENT_READ)
    message = None
    while message is None:
        for key, _ in selector.select():
            if listens and key.fileobj is source:
                selector.register(source.accept()[0], selectors.EVENT_READ)
                continue
            request, descriptors, _, _ = socket.recv_fds(key.fileobj, _REQUEST_BYTES, 4)
            if not request:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                _end_if_unused(selector, source if listens else None)
            elif os.fork() == 0:
                message = request
                break
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
    *streams, status = descriptors
    for key in [*selector.get_map().values()]:
        key.fileobj.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        # This process only waits, and reports the program's exit.
        os.write(status, str(pid).encode())
        for descriptor in (0, 1, 2, *streams):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(status, str(code).encode())
        os._exit(0)
    os.close(status)
    return json.loads(message), streams


def _end_if_unused(selector, listener):
    if listener is None:
        os._exit(0)  # it had one connection
    with _only_one():
        if len(selector.get_map()) == 1 and not selector.select(0):
            Path(listener.getsockname()).unlink()
            os._exit(0)


def become(request, streams):
    """Turn this process into a new interpreter, and return its program."""
    sys.modules["numpy"].random.seed()  # each fork would draw the same numbers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    stream = functools.partial(os.fdopen, closefd=False)  # the replaced one is closed otherwise
    sys.stdin = stream(0)
    sys.stdout = stream(1, "w", 1 if "PYTHONUNBUFFERED" in request["env"] else -1)
    sys.stderr = stream(2, "w", 1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    words = request["words"]
    added = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-W":
        warnings.simplefilter(words[1])
        del words[:2]
    if words[0] == "-c":
        sys.path[:0] = ["", *added]
        sys.argv = ["-c", *words[2:]]
        return main, compile(words[1], "<string>", "exec")
    if words[0] == "-m":
        sys.path[:0] = [request["cwd"], *added]
        spec = importlib.util.find_spec(words[1])
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(words[1] + ".__main__")
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        sys.argv = [spec.origin, *words[2:]]
        return main, spec.loader.get_code(spec.name)
    sys.path[:0] = [str(Path(words[0]).resolve().parent), *added]
    sys.argv = words
    main.__file__ = words[0]
    return main, compile(Path(words[0]).read_bytes(), words[0], "exec")


def main():
    """Return the program of a forked process."""
    del sys.path[0]  # of this script
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    for kind in ("providers", "replayers", "backends", "codecs"):
        for point in importlib.metadata.entry_points(group=f"penstock.{kind}"):
            if point.dist.name == "penstock":
                point.load()
    with contextlib.suppress(ImportError):  # without numba, which takes 0.5 s
        importlib.import_module("penstock.codecs.huffman")
    gc.collect()
    gc.freeze()
    threads = len([*Path("/proc/self/task").iterdir()])
    assert threads == 1, f"{threads} threads: a fork would lose what they hold"
    return become(*serve(socket.socket(fileno=0)))


def end(code):
    """Exit as an interpreter does, but without its teardown of modules.

    That would copy the server's memory, for 0.4 s of CPU. If other threads are alive, this returns:
    tests of exits need the teardown.
    """
    if threading.active_count() == 1 and isinstance(code, int | None):
        threading._shutdown()  # calls what `concurrent.futures` and Penstock have registered
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _module, _code = main()
    try:
        exec(_code, vars(_module))
    except SystemExit as _exit:
        end(_exit.code)
        raise
    end(0)
