"""Penstock saves and restores the state of PyTorch training jobs.

```python
import penstock

state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng(), "epoch": 0}
with penstock.Checkpointer("runs/gpt") as ckpt:
    ckpt.save(state, step=100)
    ckpt.restore(state, step="latest")
```

Names are imported when they are first used. So `import penstock` costs next to nothing, and
commands that do not need torch do not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.core.distributions import installed_only

if TYPE_CHECKING:  # to type checkers, `as X` and `*` are exports
    from penstock import dcp as dcp
    from penstock.core.checkpointer import Checkpointer as Checkpointer
    from penstock.core.config.model import CheckpointerConfig as CheckpointerConfig
    from penstock.core.config.plugin_choice import BackendConfig as BackendConfig
    from penstock.core.errors import *  # noqa: F403
    from penstock.core.markers import Grads as Grads
    from penstock.core.markers import Leaves as Leaves
    from penstock.core.markers import PerRank as PerRank
    from penstock.core.markers import Rng as Rng
    from penstock.core.markers import Shard as Shard
    from penstock.core.markers import Shards as Shards
    from penstock.core.markers import Streamed as Streamed
    from penstock.core.ranks.preemption import Preemption as Preemption
    from penstock.core.reporting.events import DeleteEvent as DeleteEvent
    from penstock.core.reporting.events import PruneEvent as PruneEvent
    from penstock.core.reporting.events import RestoreEvent as RestoreEvent
    from penstock.core.reporting.events import SaveEvent as SaveEvent
    from penstock.core.reporting.events import VerifyEvent as VerifyEvent
    from penstock.core.reporting.progress import ProgressBar as ProgressBar
    from penstock.core.reporting.reports import CheckpointInfo as CheckpointInfo
    from penstock.core.reporting.reports import CheckReport as CheckReport
    from penstock.core.reporting.reports import Progress as Progress
    from penstock.core.reporting.reports import RestoreReport as RestoreReport
    from penstock.core.reporting.reports import SaveHandle as SaveHandle
    from penstock.core.reporting.reports import SaveReport as SaveReport
    from penstock.core.reporting.reports import VerifyReport as VerifyReport
    from penstock.core.restore.checkpoint import Checkpoint as Checkpoint
    from penstock.core.restore.specs import ObjectSpec as ObjectSpec
    from penstock.core.tree.select import Rename as Rename
    from penstock.core.tree.select import Selection as Selection
    from penstock.core.types import Region as Region
    from penstock.integrations.files.exporter import export_checkpoint as export_checkpoint
    from penstock.integrations.files.importer import import_checkpoint as import_checkpoint
    from penstock.integrations.files.options import ExportReport as ExportReport

__version__ = "0.1.0"

_HOME = {
    name: home
    for home, names in {
        "penstock.core.checkpointer": "Checkpointer",
        "penstock.core.config.model": "CheckpointerConfig",
        "penstock.core.config.plugin_choice": "BackendConfig",
        "penstock.core.errors": (
            "BlobExistsError BlobNotFoundError BlobTruncatedError BusyError CapabilityError "
            "CheckpointGoneError CheckpointNotFoundError CodecError CommitUnknownError "
            "ConfigError CoordinationError DamagedError FenceTimeoutError FormatError "
            "LostRaceError NotDrainedError PenstockError PluginError RankError RestoreError "
            "RestoreMismatchError SaveAbortedError SaveError SaveSkippedError SaverClosedError "
            "SelectionError StepExistsError StorageError StorageFullError StorageTimeoutError "
            "TornSnapshotError UnsupportedStateError UnsyncedError WrongPlaceError"
        ),
        "penstock.core.markers": "Grads Leaves PerRank Rng Shard Shards Streamed",
        "penstock.core.ranks.preemption": "Preemption",
        "penstock.core.reporting.events": (
            "DeleteEvent PruneEvent RestoreEvent SaveEvent VerifyEvent"
        ),
        "penstock.core.reporting.progress": "ProgressBar",
        "penstock.core.reporting.reports": (
            "CheckReport CheckpointInfo Progress RestoreReport SaveHandle SaveReport VerifyReport"
        ),
        "penstock.core.restore.checkpoint": "Checkpoint",
        "penstock.core.restore.specs": "ObjectSpec",
        "penstock.core.tree.select": "Rename Selection",
        "penstock.core.types": "Region",
        "penstock.integrations.files.exporter": "export_checkpoint",
        "penstock.integrations.files.importer": "import_checkpoint",
        "penstock.integrations.files.options": "ExportReport",
    }.items()
    for name in names.split()
}
"""The module of each public name."""

if not TYPE_CHECKING:  # type checkers know the names above, and report others
    __all__ = list(_HOME)

    def __getattr__(name: str) -> object:
        if name == "dcp":  # not in `_HOME`: `import *` would import torch
            return importlib.import_module("penstock.dcp")
        if name not in _HOME:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with installed_only():
            home = importlib.import_module(_HOME[name])
        value: object = getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*_HOME, *(name for name in globals() if name.startswith("__"))])
