"""The backend `tiered`: a fast place in front of a durable one."""

from penstock.backends.tiered.backend import TieredBackend, TieredConfig

__all__ = ["TieredBackend", "TieredConfig"]
