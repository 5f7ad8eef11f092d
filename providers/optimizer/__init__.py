"""The provider of `torch.optim.Optimizer`: its state by parameter name.

Here: names, matching, placing with the load hooks, rebuilding. Not here: modules, and tensors as
bytes.
"""

from penstock.providers.optimizer.provider import OptimizerProvider

__all__ = ["OptimizerProvider"]
