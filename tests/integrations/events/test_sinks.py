"""Sinks on their own threads: slow, hung or failing ones block nothing."""

import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import penstock
from penstock.integrations.events import JsonLinesSink, LogSink, Sink, Sinks


class Kept(Sink):
    """Keeps events; waits in each until `go` is set."""

    def __init__(self, go=None):
        self.events = []
        self.closed = 0
        self.go = go
        self.entered = threading.Event()

    def write(self, event):
        self.entered.set()
        if self.go is not None:
            self.go.wait()
        self.events.append(event)

    def close(self):
        self.closed += 1


class Broken(Sink):
    def write(self, event):
        raise ValueError(event["kind"])


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_hung_or_failing_sink_blocks_nothing(tmp_path, caplog):
    go = threading.Event()
    hanging, kept = Kept(go), Kept()
    late, good = Sinks(hanging, capacity=5), Sinks(Broken(), kept, close_s=100)
    late(penstock.SaveEvent("started", 0))
    hanging.entered.wait()

    def on_event(event):
        late(event)
        good(event)

    with penstock.Checkpointer(f"posix://{tmp_path}/run", on_event=on_event) as ckpt:
        for step in range(1, 4):
            ckpt.save({"w": torch.ones(9)}, step=step).result()
    good.close()
    kinds = ["started", "captured", "committed", "durable"] * 3
    assert [event["kind"] for event in kept.events] == kinds
    assert (good.dropped, good.failed) == ((0, 0), (len(kinds), 0))
    assert late.dropped == (len(kinds) - 5,)
    go.set()
    late.close(timeout_s=100)
    assert [event["step"] for event in hanging.events] == [0, 1, 1, 1, 1, 2]
    assert (kept.closed, hanging.closed) == (1, 1)
    full, raised = sorted(warnings(caplog), key=len)
    assert full == "Kept is late: 5 events wait for it, and more are dropped"
    assert "ValueError: started" in raised


def test_close_delivers_queued_events_and_no_later_ones():
    go = threading.Event()
    kept = Kept(go)
    sinks = Sinks(kept, close_s=60)
    for step in range(20):
        sinks(penstock.SaveEvent("started", step))
    kept.entered.wait()
    threading.Timer(0.0, go.set).start()
    sinks.close()
    sinks.close()
    sinks(penstock.SaveEvent("started", 20))
    assert [event["step"] for event in kept.events] == [*range(20)]
    assert kept.closed == 1
    assert sinks.dropped == (0,)


def test_a_late_sink_warns_if_its_queue_was_never_full(caplog):
    go = threading.Event()
    kept = Kept(go)
    sinks = Sinks(kept)
    for step in range(3):
        sinks(penstock.SaveEvent("started", step))
    kept.entered.wait()
    sinks.close(timeout_s=0)
    go.set()
    assert sinks.dropped == (2,)
    assert warnings(caplog) == [
        "Kept is late: it did not end in time, and 2 waiting events are dropped"
    ]


def test_only_rank_0_delivers_events():
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    kept, every = Kept(), Kept()
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        with Sinks(kept) as one, Sinks(every, every_rank=True) as other:
            one(penstock.SaveEvent("started", 1))
            other(penstock.SaveEvent("started", 1))
    finally:
        dist.destroy_process_group()
    assert (len(kept.events), len(every.events)) == (0, 1)


@pytest.mark.process
def test_forked_child_delivers_nothing_without_waiting():
    go = threading.Event()
    kept = Kept(go)
    sinks = Sinks(kept, capacity=1)
    sinks(penstock.SaveEvent("started", 1))
    kept.entered.wait()
    child = os.fork()
    if child == 0:
        for step in range(2, 5):
            sinks(penstock.SaveEvent("started", step))
        sinks.close()
        os._exit(sum(sinks.dropped))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go.set()
    sinks.close()
    assert [event["step"] for event in kept.events] == [1]


@pytest.mark.process
def test_end_of_the_process_delivers_queued_events(tmp_path):
    code = (
        "import penstock\nfrom penstock.integrations.events import JsonLinesSink, Sinks\n"
        f"sinks = Sinks(JsonLinesSink({str(tmp_path / 'events.jsonl')!r}))\n"
        "for step in range(100):\n    sinks(penstock.SaveEvent('started', step))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(100)]


def test_options_out_of_range_are_refused():
    for options in [{"capacity": 0}, {"close_s": -1.0}]:
        with pytest.raises(penstock.ConfigError, match=r"Sinks: capacity="):
            Sinks(**options)


def test_file_that_cannot_be_opened_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(penstock.ConfigError, match="file/x cannot be opened: "):
        JsonLinesSink(tmp_path / "file" / "x")


def test_log_and_file_have_a_line_of_json_for_each_event(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    state = {"w": torch.ones(9)}
    path = tmp_path / "logs" / "events.jsonl"
    with (
        Sinks(JsonLinesSink(path), LogSink()) as sinks,
        penstock.Checkpointer(f"posix://{tmp_path}/run", on_event=sinks) as ckpt,
    ):
        report = ckpt.save(state, step=1).result()
        ckpt.restore(state)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ["started", "captured", "committed", "durable", "restore_started", "restore_done"]
    assert [line["kind"] for line in lines] == kinds
    assert lines[3]["seconds"] == report.seconds
    logged = [one.getMessage() for one in caplog.records if one.name == "penstock.events"]
    assert [*map(json.loads, logged)] == lines
