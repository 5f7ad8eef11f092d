"""Sinks for events: logs, Prometheus, OpenTelemetry, TensorBoard and Weights & Biases.

A checkpointer takes `Sinks` as `on_event`. `Sinks` passes events to each sink on that sink's own
thread. A sink imports only its own library, when it is made.
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
