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

if TYPE_CHECKING:
    from penstock.core.bars import ProgressBar
    from penstock.core.checkpoint import Checkpoint
    from penstock.core.checkpointer import Checkpointer
    from penstock.core.config import BackendConfig, CheckpointerConfig
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
        DamagedError,
        FenceTimeoutError,
        FormatError,
        LostRaceError,
        NotDrainedError,
        PenstockError,
        PluginError,
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
    )
    from penstock.core.events import (
        DeleteEvent,
        PruneEvent,
        RestoreEvent,
        SaveEvent,
        VerifyEvent,
    )
    from penstock.core.markers import Grads, Rng
    from penstock.core.reports import (
        CheckpointInfo,
        Progress,
        RestoreReport,
        SaveHandle,
        SaveReport,
        VerifyReport,
    )
    from penstock.core.types import Region

__version__ = "0.1.0.dev0"

__all__ = [
    "BackendConfig",
    "BlobExistsError",
    "BlobNotFoundError",
    "BlobTruncatedError",
    "BusyError",
    "CapabilityError",
    "Checkpoint",
    "CheckpointGoneError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
    "CheckpointerConfig",
    "CodecError",
    "CommitUnknownError",
    "ConfigError",
    "DamagedError",
    "DeleteEvent",
    "FenceTimeoutError",
    "FormatError",
    "Grads",
    "LostRaceError",
    "NotDrainedError",
    "PenstockError",
    "PluginError",
    "Progress",
    "ProgressBar",
    "PruneEvent",
    "Region",
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
    "SelectionError",
    "StepExistsError",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "TornSnapshotError",
    "UnsupportedStateError",
    "UnsyncedError",
    "VerifyEvent",
    "VerifyReport",
]

_HOME = {
    "BackendConfig": "penstock.core.config",
    "Checkpoint": "penstock.core.checkpoint",
    "CheckpointInfo": "penstock.core.reports",
    "Checkpointer": "penstock.core.checkpointer",
    "CheckpointerConfig": "penstock.core.config",
    "DeleteEvent": "penstock.core.events",
    "Grads": "penstock.core.markers",
    "Progress": "penstock.core.reports",
    "ProgressBar": "penstock.core.bars",
    "PruneEvent": "penstock.core.events",
    "Region": "penstock.core.types",
    "RestoreEvent": "penstock.core.events",
    "RestoreReport": "penstock.core.reports",
    "Rng": "penstock.core.markers",
    "SaveEvent": "penstock.core.events",
    "SaveHandle": "penstock.core.reports",
    "SaveReport": "penstock.core.reports",
    "VerifyEvent": "penstock.core.events",
    "VerifyReport": "penstock.core.reports",
}
"""Where each public name lives; the others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(importlib.import_module(_HOME.get(name, "penstock.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
