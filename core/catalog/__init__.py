"""The checkpoints of a run: the commit protocol, retention, prune.

Here: commit records and intents in a store, and how they are published, listed and deleted. Not
here: the bytes of a checkpoint. `save`, `restore` and all higher packages import this one.
"""
