"""The provider of `torch.nn.Module`: by bare names, in place, with the module's load hooks.

Here: the state dict, placing, load hooks. Not here: tensors as bytes, and wrappers.
"""

from penstock.providers.module.provider import ModuleProvider

__all__ = ["ModuleProvider"]
