"""Samplers whose order comes from random numbers that no loader stores."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

_RANDOM_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def samplers_of(loop: Any) -> list[Any]:
    """Return the samplers of all loaders, each once; those of batch samplers too."""
    loaders = loop._combined_loader.flattened
    sources = [*loaders, *(getattr(each, "batch_sampler", None) for each in loaders)]
    found = [getattr(each, "sampler", None) for each in sources]
    return list({id(each): each for each in found if each is not None}.values())


def drawing_samplers(loop: Any) -> list[tuple[Any, Any]]:
    """Return the samplers whose order comes from random numbers that no loader stores.

    They are those of torch, and those that Lightning wraps for several ranks. Each comes with what
    holds it in the wrapper, or None.
    """
    found = []
    for sampler in samplers_of(loop):
        holder: Any = getattr(sampler, "dataset", None)
        if hasattr(holder, "_sampler"):
            found.append((holder, holder._sampler))
        elif isinstance(sampler, _RANDOM_SAMPLERS):
            found.append((None, sampler))
    return found


def order_state(loop: Any) -> dict[str, Any] | None:
    """Return what the order of samples will be drawn from, if it is not in a loader's state."""
    if not drawing_samplers(loop):
        return None
    return {"random": torch.get_rng_state(), "generators": generator_states(loop)}


def generator_states(loop: Any) -> list[Any]:
    """Return the states of the samplers' own generators; None for a sampler without one."""
    own = [getattr(sampler, "generator", None) for _, sampler in drawing_samplers(loop)]
    return [None if each is None else each.get_state() for each in own]


def set_generators(loop: Any, states: list[Any]) -> None:
    """Restore what `generator_states` has returned."""
    for (_, sampler), state in zip(drawing_samplers(loop), states, strict=False):
        if state is not None:
            sampler.generator.set_state(state)
