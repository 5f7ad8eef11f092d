"""Writes a checkpoint as a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from penstock import Progress
from penstock.integrations.files.options import ExportReport
from penstock.integrations.files.output import published
from penstock.integrations.files.tree_export import load_tree, tensors_of

if TYPE_CHECKING:
    from penstock import Checkpoint
    from penstock.integrations.files.options import ExportOptions


def export(view: Checkpoint, options: ExportOptions) -> ExportReport:
    """Write the selected tree; see `export_checkpoint`."""
    tree = load_tree(view, options)
    tensors = tensors_of(tree)
    total = sum(tensor.nbytes for tensor in tensors)
    with published(options.out, is_folder=True, overwrite=options.overwrite) as partial:
        options.progress(Progress(0, total, "write"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it says that this is one process
            save(tree, storage_writer=FileSystemWriter(partial), no_dist=True)
        files = tuple(sorted(path.name for path in partial.iterdir()))
    options.progress(Progress(total, total, "done"))
    return ExportReport(view.step, str(options.out), files, len(tensors), total, {})
