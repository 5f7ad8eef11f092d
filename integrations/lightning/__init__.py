"""Lightning trainers that save with Penstock: a callback, and a `CheckpointIO` for convenience.

Both work with `lightning` and with `pytorch_lightning`, whichever the program has imported.
"""

from penstock.integrations.lightning.callback import PenstockCallback
from penstock.integrations.lightning.plugin import PenstockIO

__all__ = ["PenstockCallback", "PenstockIO"]
