"""Storages for `torch.distributed.checkpoint`, under a short name."""

from penstock.integrations.dcp import Reader, Writer

__all__ = ["Reader", "Writer"]
