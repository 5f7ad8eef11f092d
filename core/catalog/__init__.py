"""The checkpoints of a run: the commit protocol, retention, prune.

Here: commit records and intents in a store, how they are published, listed and deleted. Not here:
the bytes of a checkpoint. `save`, `restore` and everything above import it.
"""
