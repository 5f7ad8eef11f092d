"""Each sink against the real library that it writes to, or the one that reads what it writes."""

import subprocess
import sys

import pytest
import torch

import penstock
from penstock.integrations import events

IN_DEV = "needs {}, which `pip install .[dev]` brings"


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


@pytest.mark.process
def test_hosts_are_not_imported_before_their_sinks_are_made():
    code = (
        "import sys, penstock.integrations.events\n"
        "hosts = {'wandb', 'opentelemetry', 'tensorboard', 'torch', 'prometheus_client'}\n"
        "assert not hosts & {*sys.modules}, hosts & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
