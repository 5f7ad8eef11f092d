"""Penstock saves and restores the state of PyTorch training jobs.

```python
import penstock

state = {"model": model, "optimizer": optimizer, "rng": penstock.Rng(), "epoch": 0}
with penstock.Checkpointer("runs/gpt") as ckpt:
    ckpt.save(state, step=100)
    ckpt.restore(state, step="latest")
```

Names are imported when they are first used, so that `import penstock` costs next to nothing and
the command line never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.core.distributions import installed_only

if TYPE_CHECKING:
    from penstock import dcp as dcp
    from penstock.core.checkpointer import Checkpointer
    from penstock.core.config.model import CheckpointerConfig
    from penstock.core.config.plugin_choice import BackendConfig
    from penstock.core.errors import (
        BlobExistsError,
        BlobNotFoundError,
        BlobTruncatedError,
        BusyError,
        CapabilityError,
        CheckpointGoneError,
        CheckpointNotFoundError,
        CodecError,
        CommitUnknownError,
        ConfigError,
        CoordinationError,
        DamagedError,
        FenceTimeoutError,
        FormatError,
        LostRaceError,
        NotDrainedError,
        PenstockError,
        PluginError,
        RankError,
        RestoreError,
        RestoreMismatchError,
        SaveAbortedError,
        SaveError,
        SaverClosedError,
        SaveSkippedError,
        SelectionError,
        StepExistsError,
        StorageError,
        StorageFullError,
        StorageTimeoutError,
        TornSnapshotError,
        UnsupportedStateError,
        UnsyncedError,
        WrongPlaceError,
    )
    from penstock.core.markers import Grads, Leaves, PerRank, Rng, Shard, Shards, Streamed
    from penstock.core.ranks.preemption import Preemption
    from penstock.core.reporting.events import (
        DeleteEvent,
        PruneEvent,
        RestoreEvent,
        SaveEvent,
        VerifyEvent,
    )
    from penstock.core.reporting.progress_bar import ProgressBar
    from penstock.core.reporting.reports import (
        CheckpointInfo,
        CheckReport,
        Progress,
        RestoreReport,
        SaveHandle,
        SaveReport,
        VerifyReport,
    )
    from penstock.core.restore.checkpoint import Checkpoint
    from penstock.core.restore.specs import ObjectSpec
    from penstock.core.tree.select import Rename, Selection
    from penstock.core.types import Region
    from penstock.integrations.files.exporter import export_checkpoint
    from penstock.integrations.files.importer import import_checkpoint
    from penstock.integrations.files.options import ExportReport

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendConfig",
    "BlobExistsError",
    "BlobNotFoundError",
    "BlobTruncatedError",
    "BusyError",
    "CapabilityError",
    "CheckReport",
    "Checkpoint",
    "CheckpointGoneError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CheckpointerConfig",
    "CodecError",
    "CommitUnknownError",
    "ConfigError",
    "CoordinationError",
    "DamagedError",
    "DeleteEvent",
    "ExportReport",
    "FenceTimeoutError",
    "FormatError",
    "Grads",
    "Leaves",
    "LostRaceError",
    "NotDrainedError",
    "ObjectSpec",
    "PenstockError",
    "PerRank",
    "PluginError",
    "Preemption",
    "Progress",
    "ProgressBar",
    "PruneEvent",
    "RankError",
    "Region",
    "Rename",
    "RestoreError",
    "RestoreEvent",
    "RestoreMismatchError",
    "RestoreReport",
    "Rng",
    "SaveAbortedError",
    "SaveError",
    "SaveEvent",
    "SaveHandle",
    "SaveReport",
    "SaveSkippedError",
    "SaverClosedError",
    "Selection",
    "SelectionError",
    "Shard",
    "Shards",
    "StepExistsError",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "Streamed",
    "TornSnapshotError",
    "UnsupportedStateError",
    "UnsyncedError",
    "VerifyEvent",
    "VerifyReport",
    "WrongPlaceError",
    "export_checkpoint",
    "import_checkpoint",
]

_HOME = {
    "BackendConfig": "penstock.core.config.plugin_choice",
    "CheckReport": "penstock.core.reporting.reports",
    "Checkpoint": "penstock.core.restore.checkpoint",
    "CheckpointInfo": "penstock.core.reporting.reports",
    "Checkpointer": "penstock.core.checkpointer",
    "CheckpointerConfig": "penstock.core.config.model",
    "DeleteEvent": "penstock.core.reporting.events",
    "ExportReport": "penstock.integrations.files.options",
    "Grads": "penstock.core.markers",
    "Leaves": "penstock.core.markers",
    "ObjectSpec": "penstock.core.restore.specs",
    "Preemption": "penstock.core.ranks.preemption",
    "Progress": "penstock.core.reporting.reports",
    "ProgressBar": "penstock.core.reporting.progress_bar",
    "PruneEvent": "penstock.core.reporting.events",
    "Region": "penstock.core.types",
    "Rename": "penstock.core.tree.select",
    "RestoreEvent": "penstock.core.reporting.events",
    "RestoreReport": "penstock.core.reporting.reports",
    "PerRank": "penstock.core.markers",
    "Rng": "penstock.core.markers",
    "Selection": "penstock.core.tree.select",
    "Shard": "penstock.core.markers",
    "Shards": "penstock.core.markers",
    "Streamed": "penstock.core.markers",
    "SaveEvent": "penstock.core.reporting.events",
    "SaveHandle": "penstock.core.reporting.reports",
    "SaveReport": "penstock.core.reporting.reports",
    "VerifyEvent": "penstock.core.reporting.events",
    "VerifyReport": "penstock.core.reporting.reports",
    "export_checkpoint": "penstock.integrations.files.exporter",
    "import_checkpoint": "penstock.integrations.files.importer",
}
"""Where each public name lives; the others are errors."""


def __getattr__(name: str) -> object:
    if name == "dcp":  # not of `__all__`: `import *` would import torch
        return importlib.import_module("penstock.dcp")
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    with installed_only():
        home = importlib.import_module(_HOME.get(name, "penstock.core.errors"))
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
