"""Each sink against the real library that it writes to, or that reads its output."""

import struct
import subprocess
import sys

import pytest
import torch

import penstock
from penstock.integrations import events

IN_DEV = "needs {}, which `pip install .[dev]` brings"
LARGE = "needs tensorboard, which `make test-hosts` brings"
ALONE = "needs wandb, which no environment has: trainers that find it report to it"


@pytest.fixture
def watched(tmp_path):
    """Saves twice, fails once, restores and verifies, with a sink; returns the last two reports."""

    def run(sink):
        state = {"w": torch.arange(1000.0)}
        with (
            events.Sinks(sink, close_s=100) as sinks,
            penstock.Checkpointer(f"posix://{tmp_path}/run", on_event=sinks) as ckpt,
        ):
            ckpt.save(state, step=10).result()
            saved = ckpt.save(state, step=20).result()
            ckpt.verify(20)
            restored = ckpt.restore(state)
            with pytest.raises(penstock.RestoreMismatchError):
                ckpt.restore({"w": torch.ones(3)})
        assert sinks.failed == (0,)
        assert sinks.dropped == (0,)
        return saved, restored

    return run


def test_prometheus_reads_the_file(tmp_path, watched):
    parser = pytest.importorskip(
        "prometheus_client.parser", reason=IN_DEV.format("prometheus_client")
    )
    path = tmp_path / "penstock.prom"
    saved, restored = watched(events.PrometheusSink(path, {"run": 'a "b"\\\n'}))
    families = {f.name: f for f in parser.text_string_to_metric_families(path.read_text())}
    figures = {
        (s.name, s.labels.get("kind") or s.labels.get("phase")): s.value
        for family in families.values()
        for s in family.samples
    }
    assert {s.labels["run"] for f in families.values() for s in f.samples} == {'a "b"\\\n'}
    assert families["penstock_events"].type == "counter"
    assert families["penstock_save_seconds"].type == "summary"
    assert figures["penstock_events_total", "durable"] == 2
    assert figures["penstock_events_total", "restore_failed"] == 1
    assert figures["penstock_last_durable_step", None] == 20
    assert figures["penstock_raw_bytes_total", None] == 2 * saved.bytes_raw
    assert figures["penstock_stored_bytes_total", None] == 2 * saved.bytes_stored
    assert figures["penstock_read_bytes_total", None] == restored.bytes_read
    assert figures["penstock_save_seconds_count", "blocked"] == 2
    assert figures["penstock_save_seconds_sum", "blocked"] > saved.seconds["blocked"]
    assert figures["penstock_last_verify_damaged", None] == 0
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == [path.name]


def test_prometheus_refuses_unreadable_files(tmp_path):
    with pytest.raises(penstock.ConfigError, match="there is no folder"):
        events.PrometheusSink(tmp_path / "absent" / "x.prom")
    with pytest.raises(penstock.ConfigError, match="'a-b' cannot be a label"):
        events.PrometheusSink(tmp_path / "x.prom", {"a-b": "c"})


def test_opentelemetry_gets_spans_and_metrics(watched):
    pytest.importorskip("opentelemetry.sdk", reason=IN_DEV.format("opentelemetry-sdk"))
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    saved, _ = watched(events.OpenTelemetrySink(tracer_provider=tracers, meter_provider=meters))
    found = spans.get_finished_spans()
    assert [(s.name, s.attributes["penstock.step"]) for s in found] == [
        ("penstock.save", 10), ("penstock.save", 20),
        ("penstock.restore", 20), ("penstock.restore", 20),
    ]  # fmt: skip
    assert found[1].attributes["penstock.uid"] == saved.uid
    assert found[1].end_time > found[1].start_time
    assert [s.status.is_ok for s in found] == [True, True, True, False]
    assert "RestoreMismatchError" in found[3].status.description
    metrics = {
        metric.name: {
            point.attributes.get("kind") or point.attributes.get("phase"): point
            for point in metric.data.data_points
        }
        for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics
        for metric in scope.metrics
    }
    assert metrics["penstock.events"]["durable"].value == 2
    assert metrics["penstock.save.bytes_stored"][None].value == 2 * saved.bytes_stored
    assert metrics["penstock.save.duration"]["blocked"].count == 2


def test_tensorboard_reads_the_curves(tmp_path, watched):
    pytest.importorskip("tensorboard", reason=LARGE)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    saved, _ = watched(events.TensorBoardSink(tmp_path / "tb"))
    curves = EventAccumulator(str(tmp_path / "tb")).Reload()
    blocked = curves.Scalars("penstock/save/blocked_s")
    assert [one.step for one in blocked] == [10, 20]
    assert blocked[1].value == pytest.approx(saved.seconds["blocked"])
    assert {"penstock/save/ratio", "penstock/restore/total_s", "penstock/verify/damaged"} <= {
        *curves.Tags()["scalars"]
    }


def test_wandb_logs_over_its_own_step_and_keeps_the_loops_steps(tmp_path, monkeypatch, watched):
    wandb = pytest.importorskip("wandb", reason=ALONE)
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="penstock") as run:
        run.log({"loss": 2.0}, step=500)
        saved, _ = watched(events.WandbSink())
        run.log({"loss": 1.0}, step=500)  # W&B drops it if its counter has advanced
        run.log({"loss": 0.5}, step=501)
    wandb.teardown()  # its process may write until then
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    rows, defined = history_of(file)
    assert [(row["_step"], row["loss"]) for row in rows] == [("500", "1"), ("501", "0.5")]
    assert rows[0]["penstock/step"] == "20"
    assert float(rows[0]["penstock/save/blocked_s"]) == saved.seconds["blocked"]
    assert ("penstock/*", "penstock/step") in defined


def history_of(file):
    """The rows of an offline run, and the metrics with their step metrics."""
    from wandb.proto import wandb_internal_pb2

    rows, defined = [], set()
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: item.value_json for item in items})
        if record.HasField("metric"):
            defined.add((record.metric.name or record.metric.glob_name, record.metric.step_metric))
    return rows, defined


def records_of(data):
    """The records of a LevelDB log after a header: blocks of 32 KiB with pieces of records."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # padding: no piece begins there
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # the whole record, or its last piece
            yield record
            record = b""


def test_a_missing_host_is_named_with_its_extra(monkeypatch):
    for module, extra, make in [
        ("opentelemetry.trace", "otel", events.OpenTelemetrySink),
        ("torch.utils.tensorboard", "tensorboard", lambda: events.TensorBoardSink("x")),
        ("wandb", "wandb", events.WandbSink),
    ]:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(penstock.ConfigError, match=rf"{module} .*'penstock\[{extra}\]'"):
            make()


@pytest.mark.process
def test_sinks_import_their_host_on_creation():
    code = (
        "import sys, penstock.integrations.events\n"
        "hosts = {'wandb', 'opentelemetry', 'tensorboard', 'torch', 'prometheus_client'}\n"
        "assert not hosts & {*sys.modules}, hosts & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
