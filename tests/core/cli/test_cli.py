import fcntl
import json
import logging
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from tests import interpreters
from tests.core.cli.command import caller

import penstock as penstock_package
from penstock.backends.posix import PosixBackend
from penstock.core.cli.app import log_visibly
from penstock.core.cli.output.render import (
    Cell,
    Column,
    print_line,
    print_table,
    visible_lines,
)
from penstock.core.format.commit_record import encode_commit
from penstock.core.format.records import (
    CommitRecord,
    IndexEntry,
    PartEntry,
    commit_name,
    index_name,
    part_name,
)

ROOT = Path(__file__).resolve().parents[3]
MAIN = "from penstock.core.cli.main import main; main()"
EVIL = "\x1b[31mred\x07 [bold]not bold[/] \u202egnorw"


@pytest.fixture
def environment(plugin_site):
    """The environment of a process that finds Penstock's plugins and those of the test."""
    plugin_site.add_penstock()
    path = [str(plugin_site.folder), str(ROOT / "src"), *filter(None, sys.path)]
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "FORCE_COLOR"}}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "TERM": "xterm"}


@pytest.fixture
def penstock(environment, capsys, monkeypatch):
    """Runs the command with its output in pipes.

    In this process, unless something in it must be new: installed packages, replacements (`before`
    runs first), logging; in a new interpreter if `fresh`.
    """
    call = caller(capsys, monkeypatch)

    def run(*arguments, before="", fresh=False):
        if not before and not {"plugins", "--debug"} & {*map(str, arguments)}:
            done = call(*arguments)
            return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)
        code = f"import sys\n{before}\n{MAIN}"
        if not fresh:
            server = interpreters.server("penstock.core.cli.main")
            return server.run("-c", code, *arguments, env=environment)
        return subprocess.run(  # it checks the imports
            [sys.executable, "-c", code, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    return run


@pytest.fixture
def terminal(environment):
    """Runs the command in a terminal of some width; gives its lines without colors."""

    def run(*arguments, width=120, variables=None):
        main_fd, terminal_fd = pty.openpty()
        fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        process = interpreters.server("penstock.core.cli.main").start(
            "-c", MAIN, *arguments,
            env=environment | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=terminal_fd,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        output = b""
        ended = False
        while True:
            ready, _, _ = select.select([main_fd], [], [], 0.02)
            if ready:
                output += os.read(main_fd, 65536)
            elif ended:  # and nothing has arrived since
                break
            ended = process.poll() is not None
        os.close(terminal_fd)  # only now: unread terminal output may be lost with its last user
        os.close(main_fd)
        assert process.wait(60) == 0
        return output.decode()

    return run


def _lines(output):
    return re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()


def _record(step, *, generation=0, created=None, **changes):
    uid = f"{step:032x}"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 7300))
    return CommitRecord(
        uid=uid,
        step=step,
        generation=generation,
        created=created or now,
        world_size=1,
        index=IndexEntry(index_name(uid), 16 * 13, 16 * 13, "0" * 64),
        parts=(PartEntry(part_name(uid, 0), 10, 5, "0" * 64),),
        objects=12,
        bytes_raw=3 << 30,
        bytes_stored=2 << 30,
        **changes,
    )


@pytest.fixture
def run_folder(tmp_path):
    """A run that `ls` can read completely."""
    root = tmp_path / "run"
    backend = PosixBackend(PosixBackend.Config(path=str(root)))
    for record in (
        _record(5, metadata={"loss": 2.5, "note": "ok"}),
        _record(100, metadata={"note": EVIL}),
        _record(100, generation=1, metadata={"note": EVIL, "lr": [0.1, None]}),
    ):
        name = commit_name(record.step, record.generation)
        backend.publish(name, encode_commit(record))
    backend.publish(commit_name(70, 0), b"nonsense\n")
    backend.close()
    return root


# -- ls -----------------------------------------------------------------------------------------


def test_ls_lists_every_step_with_its_newest_generation_and_state(penstock, run_folder):
    done = penstock("ls", run_folder)
    assert (done.returncode, done.stderr) == (0, "")
    header, five, seventy, hundred, *rest = done.stdout.splitlines()
    titles = ["STEP", "GEN", "AGE", "OBJECTS", "RAW", "STORED", "RATIO", "STATE", "METADATA"]
    assert header.split() == titles
    assert five.split(maxsplit=11)[:2] == ["5", "0"]
    assert "2 h" in five
    assert re.search(r"12  3\.0 GiB  2\.0 GiB  1\.50x  ok +loss=2\.5 note=ok$", five)
    assert seventy.split() == ["70", *"-" * 6, "damaged"]
    assert hundred.split()[:2] == ["100", "1"]
    assert "lr=[0.1, null]" in hundred
    assert len(rest) == 1
    assert rest[0].startswith("step 70: ")
    assert "is not a record of Penstock" in rest[0] or "commits/00000070-0.json" in rest[0]


def test_ls_reports_an_empty_run(penstock, tmp_path):
    (tmp_path / "run").mkdir()
    done = penstock("ls", tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, f"no checkpoints under file://{tmp_path}/run\n")
    assert json.loads(penstock("ls", tmp_path / "run", "--json").stdout)["checkpoints"] == []


def test_a_wrong_option_is_shown_with_the_valid_forms(penstock, run_folder):
    for arguments, words in [
        (
            ("show", "--step", "abc"),
            "'abc' is not a step: give a whole number of at least 0, or `latest`",
        ),
        (("verify", "--step", "-3"), "'-3' is not a step: give a whole number of at least 0"),
        (("diff", "--step-a", "new"), "'new' is not a step: give a whole number of at least 0"),
        (("delete", "1.5"), "Invalid value for 'STEP': "),
        (
            ("copy", "to", "--step", "x"),
            "'x' is not a step: give a whole number of at least 0, `latest` or `all`",
        ),
        (
            ("copy", "to", "--rate", "fast"),
            "'fast' is not a size: give bytes, or a number with one of",
        ),
        (("doctor", "--probe-size", "big"), "'big' is not a size: give bytes, or a number with"),
        (("show", "--depth", "all"), "Invalid value for '--depth': "),
        (("ls", "--last", "0"), "Invalid value for '--last': "),
        (("drain", "--timeout", "soon"), "'soon' is not a time such as 90s"),
        (("drain", "--timeout", "nan"), "'nan' is not a time such as 90s"),
        (("prune", "--grace", "soon"), "'soon' is not a time such as 90s"),
    ]:
        command, *rest = arguments
        done = penstock(command, run_folder, *rest)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr


def test_a_run_is_not_copied_onto_itself(penstock, tmp_path):
    root = tmp_path / "run"
    with penstock_package.Checkpointer(f"posix://{root}") as ckpt:
        ckpt.save({"epoch": 1}, step=1, mode="blocking")
    (tmp_path / "link").symlink_to(root)
    for target in (root, f"posix://{root}", tmp_path / "link", tmp_path / "x" / ".." / "run"):
        done = penstock("copy", f"posix://{root}", target)
        assert done.returncode == 1
        assert "FROM and TO are the same run, " in done.stderr
        assert ": give another place to copy to" in done.stderr
    anew = penstock("copy", root, root, "--codec", "zstd", "--overwrite")
    assert "step 1, the latest, is encoded again" in anew.stdout
    assert "1 object, " in anew.stdout
    assert penstock("copy", root, tmp_path / "run2").returncode == 0


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_inspecting_a_missing_folder_creates_none(penstock, tmp_path, command):
    done = penstock(command, tmp_path / "absent")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"penstock: there is no folder {tmp_path}/absent\n"
    assert not (tmp_path / "absent").exists()


# -- rendering ----------------------------------------------------------------------------------


@pytest.mark.process
def test_control_characters_and_markup_are_escaped_for_the_terminal(penstock, terminal, run_folder):
    for output in (penstock("ls", run_folder).stdout, terminal("ls", run_folder, width=200)):
        assert r"note=\x1b[31mred\x07 [bold]not bold[/] \u202egnorw" in output
        assert "\x1b[31mred" not in output
        assert "\x07" not in output
        assert "\u202e" not in output


def test_no_output_steers_the_terminal(capsys):
    """Output that was not escaped."""
    print_line(EVIL)
    print_table([Column("A", lambda cell: cell)], [EVIL, Cell(EVIL, "red")])
    assert capsys.readouterr().out.count(r"\x1b[31mred\x07") == 3


def test_a_line_break_in_a_name_is_escaped_in_messages():
    printed = "w: ok\npenstock: everything is fine\u2028step 1 is whole"
    assert visible_lines(f"penstock: {printed} is damaged\n  its blob: a") == [
        r"penstock: w: ok\npenstock: everything is fine\u2028step 1 is whole is damaged",
        "  its blob: a",
    ]


def test_logs_are_escaped_too(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    log_visibly()
    log_visibly(level=logging.DEBUG, form=logging.BASIC_FORMAT)  # as --debug does
    logging.getLogger("somebody").warning("step 1: %s", f"{EVIL}\npenstock: all is well")
    error = ValueError(EVIL)
    logging.getLogger("somebody").error("failed", exc_info=error)
    printed = capsys.readouterr().err
    assert printed.count(r"\x1b[31mred\x07 [bold]not bold[/] \u202egnorw") == 2
    assert not {"\x1b", "\x07", "\u202e"} & {*printed}
    assert "\npenstock" not in printed
    assert printed.count("WARNING:somebody:") == 1  # by one handler


def test_error_messages_are_escaped_too(penstock, tmp_path):
    done = penstock("ls", f"{tmp_path}/\x1b[2Jabsent\u202e")
    assert done.returncode == 1
    assert done.stderr == f"penstock: there is no folder {tmp_path}/\\x1b[2Jabsent\\u202e\n"


@pytest.mark.process
@pytest.mark.parametrize("width", [24, 80])
def test_table_fits_the_terminal_and_keeps_step_and_state(terminal, run_folder, width):
    lines = _lines(terminal("ls", run_folder, width=width))
    table = [line for line in lines if re.match(r"\s*(STEP|5|70|100)\b", line)]
    assert len(table) == 4
    assert all(len(line) <= width for line in table)
    assert "STEP" in table[0]
    assert "STATE" in table[0]
    assert "damaged" in table[2]
    left_out = any("too narrow for" in line for line in lines)
    assert left_out == (width < 80)


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("ls",), ("ls", "--json")])
def test_output_that_cannot_be_written_is_one_message(environment, run_folder, arguments):
    with (
        Path("/dev/full").open("w") as full,
        interpreters.start(
            "-c", MAIN, *arguments, run_folder,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
        ) as process,
    ):  # fmt: skip
        _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err == "penstock: standard output: No space left on device\n"


# -- show and verify, of a real run -------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    import torch

    import penstock as package

    root = tmp_path_factory.mktemp("saved") / "run"
    weight = torch.arange(3000, dtype=torch.float32).reshape(50, 60)
    state = {
        "model": {"weight": weight, "tied": weight, "half": torch.ones(7, dtype=torch.bfloat16)},
        "zeros": {"a": torch.zeros(40_000), "b": torch.zeros(10), "c": torch.zeros(10)},
        EVIL: torch.zeros(()),
        "epoch": 7,
    }
    rules = [{"match": "zeros", "codecs": ["lz4", "zstd"]}]
    with package.Checkpointer(f"posix://{root}", rules=rules) as ckpt:
        ckpt.save(state, step=3, mode="blocking")
        ckpt.save(state, step=8, mode="blocking", metadata={"loss": 2.5})
    return root


@pytest.fixture
def damaged_run(saved_run, tmp_path):
    """A copy whose newest checkpoint has a flipped bit in every byte of its raw frames."""
    root = shutil.copytree(saved_run, tmp_path / "run")
    newest = max(root.glob("data/*"), key=lambda folder: _step_of(root, folder.name))
    (blob,) = newest.glob("blobs/*.raw")
    data = bytearray(blob.read_bytes())
    for at in range(len(data)):
        data[at] ^= 1
    blob.write_bytes(data)
    return root


def _step_of(root, uid):
    names = [p for p in root.glob("commits/*") if uid in p.read_text()]
    return int(names[0].name.split("-")[0])


def test_show_lists_the_objects_of_the_newest_step_in_tree_order(penstock, saved_run):
    done = penstock("show", saved_run)
    assert (done.returncode, done.stderr) == (0, "")
    first, metadata, _, header, *table, _, total = done.stdout.splitlines()
    assert first.startswith("step 8, generation 0, of 20")
    assert metadata == "loss=2.5"
    titles = ["PATH", "TYPE", "SHAPE", "BYTES", "STORED", "RATIO", "CODECS", "ROLE"]
    assert header.split() == titles
    rows = [re.split(r"  +", line) for line in table]
    assert rows[0] == [
        "model/weight", "float32", "50x60", "11.7 KiB", "11.7 KiB", "1.00x", "raw", "other",
    ]  # fmt: skip
    assert rows[1] == [
        "model/tied = model/weight", "float32", "50x60", "0 B", "0 B", "-", "-", "other",
    ]  # fmt: skip
    assert rows[2][:4] == ["model/half", "bfloat16", "7", "14 B"]
    assert (rows[3][0], rows[3][6]) == ("zeros/a", "lz4+zstd")
    assert float(rows[3][5].removesuffix("x")) > 100
    assert rows[-2][0] == r"\x1b[31mred\x07 [bold]not bold[%2F] \u202egnorw"
    assert rows[-1][:2] == ["epoch", "json"]
    assert total.startswith("8 of 8 objects, 168.1 KiB, ")


def test_verify_finds_a_run_whole(penstock, saved_run):
    done = penstock("verify", saved_run)
    assert done.returncode == 0
    assert done.stdout.startswith("step 8 is whole: ")
    found = json.loads(penstock("verify", saved_run, "--step", "3", "--json").stdout)
    (report,) = found["reports"]
    assert found["ok"] is True
    assert (report["step"], report["ok"], report["damaged"]) == (3, True, [])
    assert report["deep"] is True
    assert report["bytes_read"] > 12_000


def test_verify_names_damaged_objects_and_exits_with_1(penstock, damaged_run):
    done = penstock("verify", damaged_run)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"^checksum .* does not match\n    \S", done.stdout, re.MULTILINE)
    assert re.search(r"^    model/weight$", done.stdout, re.MULTILINE)
    assert re.search(r"step 8 is damaged: \d+ problems? found", done.stdout)
    found = json.loads(penstock("verify", damaged_run, "--json").stdout)
    (report,) = found["reports"]
    assert (found["ok"], report["ok"]) == (False, False)
    assert "model/weight" in {d["what"] for d in report["damaged"]}
    assert penstock("verify", damaged_run, "--step", "3").returncode == 0


def test_quick_verify_reads_no_frames_but_finds_a_truncated_blob(penstock, damaged_run):
    assert penstock("verify", damaged_run, "--quick").returncode == 0
    for blob in damaged_run.glob("data/*/blobs/*.raw"):
        os.truncate(blob, blob.stat().st_size - 1)
    done = penstock("verify", damaged_run, "--quick")
    assert done.returncode == 1
    assert ".raw" in done.stdout


# -- the whole ----------------------------------------------------------------------------------


def test_version_is_that_of_the_package(penstock):
    import penstock as package

    assert penstock("--version").stdout == f"penstock {package.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [("lss",), ("ls",), ("show", "x", "--step", "-1"), ("show", "x", "--step", "y")]
)
def test_wrong_calls_exit_with_2(penstock, arguments):
    done = penstock(*arguments)
    assert done.returncode == 2
    assert "Usage: penstock" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_unexpected_error_is_one_message_too(penstock, tmp_path):
    broken = (
        "import penstock.core.cli.job as job\n"
        "def run(*_, **__): raise ZeroDivisionError('\x1b[31m')\n"
        "job.open_backend = run"
    )
    done = penstock("ls", tmp_path, before=broken)
    assert done.returncode == 1
    assert done.stderr.startswith("penstock: unexpected ZeroDivisionError: \\x1b[31m; run ")
    assert "Traceback" not in done.stderr
    assert "Traceback" in penstock("--debug", "ls", tmp_path, before=broken).stderr


@pytest.mark.parametrize(
    "arguments", [("ls",), ("ls", "--json"), ("show",), ("verify", "--quick"), ("verify",)]
)
def test_wrong_url_is_one_message_without_traceback(penstock, arguments):
    command, *options = arguments
    done = penstock(command, "s3://user:s3cret@bucket/run", *options)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("penstock: options in s3://bucket/run: 1 problem\n  url: cred")
    assert "s3cret" not in done.stderr
    assert "Traceback" not in done.stderr


# Runs several commands, and reports after each which of the modules are imported.
IMPORTS = """
import json
for command in json.loads(sys.argv.pop()):
    sys.argv[1:] = command
    try:
        from penstock.core.cli.main import main
        main()
    except SystemExit as stop:
        found = sorted({heavy} & {{*sys.modules}})
        print("IMPORTS", command[0], stop.code or 0, *found, file=sys.stderr)
sys.exit()
"""


def imported(penstock, heavy, *commands):
    done = penstock(json.dumps(commands), before=IMPORTS.format(heavy=heavy), fresh=True)
    return [line for line in done.stderr.splitlines() if line.startswith("IMPORTS")]


@pytest.mark.process
def test_read_only_commands_on_a_run_do_not_import_torch(penstock, saved_run):
    run = str(saved_run)
    commands = [
        ("show", run), ("verify", run), ("prune", run), ("delete", run, "8", "--dry-run"),
        ("doctor", run, "--probe-size", "1MiB"),
    ]  # fmt: skip
    assert imported(penstock, {"torch"}, *commands) == [f"IMPORTS {c[0]} 0" for c in commands]


@pytest.mark.process
def test_read_only_commands_import_neither_torch_nor_numpy(penstock, run_folder):
    commands = [
        ("--help",),
        ("ls", str(run_folder)),
        ("ls", str(run_folder), "--json"),
        ("plugins",),
    ]
    # `show`, since none of these runs it.
    heavy = {"torch", "numpy", "liburing", "rich", "penstock.core.cli.commands.show"}
    found = imported(penstock, heavy, *commands)
    assert [line.split()[1] for line in found] == [command[0] for command in commands]
    assert all(len(line.split()) == 3 for line in found)


def test_ls_above_runs_names_them(penstock, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "above" / "gpt")
    shutil.copytree(run_folder, tmp_path / "above" / "old" / "bert")
    (tmp_path / "above" / "notes" / "deep" / "er" / "commits").mkdir(parents=True)
    done = penstock("ls", tmp_path / "above")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"no checkpoints under file://{tmp_path}/above",
        "these folders below it hold runs; list one of them:",
        f"  {tmp_path}/above/gpt",
        f"  {tmp_path}/above/notes/deep/er",
        f"  {tmp_path}/above/old/bert",
    ]


@pytest.mark.parametrize("inside", ["commits", "data", "data/00ff/blobs"])
def test_ls_of_a_folder_inside_a_run_names_the_run(penstock, run_folder, inside):
    folder = run_folder / inside
    folder.mkdir(parents=True, exist_ok=True)
    done = penstock("ls", folder)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"no checkpoints under file://{folder}",
        f"this is a folder inside the run {run_folder}: list that run",
    ]


def test_ls_of_an_empty_folder_beside_runs_names_none(penstock, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "gpt")
    (tmp_path / "gpt" / "notes").mkdir()
    done = penstock("ls", tmp_path / "gpt" / "notes")
    assert done.stdout == f"no checkpoints under file://{tmp_path}/gpt/notes\n"


def test_json_may_precede_the_command(penstock, run_folder):
    assert (
        penstock("--json", "ls", run_folder).stdout == penstock("ls", run_folder, "--json").stdout
    )
    assert penstock("--json").returncode == 2


def test_latest_names_the_latest_step(penstock, tmp_path):
    with penstock_package.Checkpointer(f"posix://{tmp_path}/run") as ckpt:
        for step in (1, 2):
            ckpt.save({"epoch": step}, step=step, mode="blocking")
    named = penstock("show", tmp_path / "run", "--step", "latest", "--json").stdout
    assert json.loads(named)["checkpoint"]["step"] == 2


def test_ratios_of_ls_and_show_are_labeled(penstock, tmp_path):
    with penstock_package.Checkpointer(f"posix://{tmp_path}/run") as ckpt:
        state = {f"part{n}": torch.ones(100) for n in range(50)}  # a page for each
        ckpt.save(state, step=1, mode="blocking")
    row = penstock("ls", tmp_path / "run").stdout.splitlines()[1]
    stored, ratio = re.search(r"(\S+ KiB) +(\S+x) +ok", row).groups()
    whole = penstock("show", tmp_path / "run").stdout.splitlines()[-1]
    part = penstock("show", tmp_path / "run", "--include", "part7").stdout.splitlines()[-1]
    assert whole.endswith(
        f"stored (1.00x); its blobs take {stored} ({ratio}), including alignment gaps"
    )
    assert "gaps" not in part


def test_show_takes_patterns(penstock, saved_run):
    done = penstock(
        "show", saved_run, "--include", "model", "--include", "epoch", "--exclude", "**/tied",
        "--json",
    )  # fmt: skip
    paths = [o["path"] for o in json.loads(done.stdout)["objects"]]
    assert paths == ["model/weight", "model/half", "epoch"]
    wrong = penstock("show", saved_run, "--include", "modle/weight")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "matches nothing; nearest: model/weight" in wrong.stderr


@pytest.mark.parametrize("command", ["show", "verify"])
def test_missing_step_lists_the_existing_ones(penstock, saved_run, command):
    done = penstock(command, saved_run, "--step", "4")
    assert (done.returncode, done.stdout) == (1, "")
    assert "steps there: 3, 8" in done.stderr


def test_verify_names_some_objects_of_a_missing_blob_and_all_in_json(penstock, tmp_path):
    import torch

    import penstock as package

    with package.Checkpointer(f"posix://{tmp_path}/run") as ckpt:
        state = {f"weight{n}": torch.full((5000,), float(n)) for n in range(40)}
        ckpt.save(state, step=1, mode="blocking")
    (blob,) = (tmp_path / "run").glob("data/*/blobs/*")
    blob.unlink()
    done = penstock("verify", tmp_path / "run")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) < 12
    assert re.search(r"^    weight\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^    and \d+ more: --json names all$", done.stdout, re.MULTILINE)
    (report,) = json.loads(penstock("verify", tmp_path / "run", "--json").stdout)["reports"]
    assert {d["what"] for d in report["damaged"]} >= {f"weight{n}" for n in range(40)}
