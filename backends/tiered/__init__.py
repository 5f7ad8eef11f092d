"""The backend `tiered`: a fast backend in front of a durable backend."""

from penstock.backends.tiered.backend import TieredBackend, TieredConfig

__all__ = ["TieredBackend", "TieredConfig"]
