"""A save without a checkpointer: one job, with a store in memory."""

import numpy as np

from penstock.backends.memory import MemoryBackend, MemoryConfig
from penstock.core.concurrency.workers import Workers
from penstock.core.config.model import load_config
from penstock.core.plugins.registry import default_registry
from penstock.core.save.job import SaveJob
from penstock.core.save.manifest import ManifestWriter
from penstock.core.save.prepare import plan_state, staging_for
from penstock.core.save.request import Destination, SaveSurroundings
from penstock.core.save.rules import ChainTable
from penstock.core.tree.describe import describe_tree

PATIENCE_S = 100.0
STATE = {"w": np.arange(20_000, dtype=np.float32), "step": 3}
WORKERS = Workers(1)


def memory(name):
    return MemoryBackend(MemoryConfig(name=name))


def request_of(config, mode="blocking", state=STATE):
    """The planned save of step 3."""
    registry = default_registry()
    return plan_state(
        describe_tree(state, providers=registry.providers, allow_pickle=False),
        config=config,
        table=ChainTable(config, registry),
        step=3,
        generation=0,
        mode=mode,
        share=False,
        derive=False,
    )


def job_of(backend, *, mode="blocking", surroundings=None, onward=None, state=STATE, **options):
    """A job that has not started."""
    config = load_config({"backend": backend, "chunk_bytes": 4096, **options})
    request = request_of(config, mode, state)
    return SaveJob(
        request,
        manifest=ManifestWriter(request, {}, shipper=default_registry().shipper),
        destination=Destination(backend, onward),
        staging=staging_for(request.staging_bytes, None, config),
        workers=WORKERS,
        surroundings=surroundings or SaveSurroundings(),
        log_failure=False,
    )


def run(job):
    """Run the job; return the error, or None."""
    job.begin_capture()
    job.capture_now()
    assert job.finished(PATIENCE_S)
    assert job.released.wait(PATIENCE_S)
    return job.ending.error


def stored(backend):
    """The names of all stored data."""
    return sorted(info.name for info in backend.list(""))
