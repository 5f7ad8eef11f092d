"""The log of gradients: entries between two checkpoints, and their replay.

The modules record the steps of optimizers, append entries to segments, find whole entries, and
replay them onto a restored base. Each entry is itself a checkpoint: the code of `save` describes
and encodes it, and the code of `restore` verifies and places it.
"""
