"""Markers that users put into a state tree; providers describe what they stand for."""

from __future__ import annotations

from typing import Any


class Rng:
    """The random state of this process: Python, numpy, torch, and every CUDA device in use.

    Captured at `save`, set at `restore` (after everything else is in place).
    """

    __slots__ = ("__weakref__",)

    def __repr__(self) -> str:
        return "penstock.Rng()"


class Grads:
    """The `.grad` of every parameter of `model`, for a save in the middle of accumulation.

    On restore, parameters that had no gradient get None.
    """

    __slots__ = ("__weakref__", "model")

    def __init__(self, model: Any) -> None:
        self.model = model

    def __repr__(self) -> str:
        return f"penstock.Grads({type(self.model).__name__})"
