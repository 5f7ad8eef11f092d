"""Sinks for events: logs, Prometheus, OpenTelemetry, TensorBoard and Weights & Biases.

A checkpointer takes `Sinks` as `on_event`. It passes events on to each sink on its own
thread. A sink imports its host when it is made; hosts of other sinks are never imported.
"""

from penstock.integrations.events.libraries import OpenTelemetrySink, TensorBoardSink, WandbSink
from penstock.integrations.events.sinks import Sink, Sinks
from penstock.integrations.events.texts import JsonLinesSink, LogSink, PrometheusSink

__all__ = [
    "JsonLinesSink",
    "LogSink",
    "OpenTelemetrySink",
    "PrometheusSink",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "WandbSink",
]
