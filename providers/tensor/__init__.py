"""The provider of tensors: loose ones, leaves of composites, and tensors that consist of others.

Here: their memory as byte sources and sinks. Not here: modules and optimizers.
"""

from penstock.providers.tensor.provider import TensorProvider

__all__ = ["TensorProvider"]
