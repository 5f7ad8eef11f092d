"""Writes a checkpoint as one file of `torch.save` that `weights_only` loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock import Progress, UnsupportedStateError
from penstock.integrations.files.options import ExportReport
from penstock.integrations.files.output import published
from penstock.integrations.files.tree_export import load_tree, tensors_of

if TYPE_CHECKING:
    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions


def export(view: Checkpoint, options: ExportOptions) -> ExportReport:
    """Write the selected tree; see `export_checkpoint`. One state dict alone is not wrapped."""
    tree = load_tree(view, options)
    tensors = tensors_of(tree)
    total = sum(tensor.nbytes for tensor in tensors)
    inner = next(iter(tree.values())) if len(tree) == 1 else None
    with published(options.out, is_folder=False, overwrite=options.overwrite) as partial:
        options.progress(Progress(0, total, "write"))
        torch.save(inner if isinstance(inner, dict) else tree, partial)
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(partial)
        if refused:
            msg = (
                f"step {view.step} has values of {', '.join(sorted(refused))}, which "
                "`torch.load(weights_only=True)` would refuse: leave them out by exclude "
                "(--exclude)"
            )
            raise UnsupportedStateError(msg)
    options.progress(Progress(total, total, "done"))
    return ExportReport(view.step, str(options.out), (options.out.name,), len(tensors), total, {})
