"""In each process of a test of torch, those that it spawns too: our storage in place of DCP's own.

Each save adds a line to the file `PENSTOCK_SAVES`.
"""

import os
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem

from penstock.integrations.dcp import Reader, Writer

_OPTIONS = {"allow_pickle": True}  # as DCP pickles all values


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
