"""In each process of a torch test, spawned ones included: our storage in place of DCP's.

Each save adds a line to the file `PENSTOCK_SAVES`. If `PENSTOCK_ON_CPU` is set, a test
that asks for GPUs also runs on a machine without one.
"""

import os
from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem

from penstock.integrations.dcp import Reader, Writer

_OPTIONS = {"allow_pickle": True}  # since DCP pickles all values


class FileSystemWriter(Writer):
    def __init__(self, *words, **options):
        super().__init__(*words, **{**options, **_OPTIONS})

    def write_data(self, plan, planner):
        with Path(os.environ["PENSTOCK_SAVES"]).open("a", encoding="utf-8") as file:
            file.write("saved\n")
        return super().write_data(plan, planner)


class FileSystemReader(Reader):
    def __init__(self, *words, **options):
        super().__init__(*words, **{**options, **_OPTIONS})


for _module in (dcp, filesystem, _storage_utils):
    _module.FileSystemWriter = FileSystemWriter
    _module.FileSystemReader = FileSystemReader

if "PENSTOCK_ON_CPU" in os.environ:
    from torch.testing._internal import common_distributed

    # Set before any test file imports the decorator, from this module or from one that imports it.
    common_distributed.skip_if_lt_x_gpu = partial(
        common_distributed.skip_if_lt_x_gpu, allow_cpu=True
    )
