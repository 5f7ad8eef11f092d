"""The provider of `torch.optim.Optimizer`: its state by parameter name.

Here: names, matching, placing, and the optimizer's load hooks. Not here: modules, and tensors as
bytes.
"""

from penstock.providers.optimizer.provider import OptimizerProvider

__all__ = ["OptimizerProvider"]
