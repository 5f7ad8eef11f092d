"""The log of gradients: entries between two checkpoints, and their replay.

Covers recording the steps of optimizers, appending entries to segments, finding whole entries, and
replaying them onto a restored base. An entry is a checkpoint of its own, so describing, encoding,
verifying and placing are those of `save` and `restore`.
"""
