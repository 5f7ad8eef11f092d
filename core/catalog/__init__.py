"""The checkpoints of a run: the commit protocol, retention, prune.

Covers commit records and intents in a store, and how they are published, listed and deleted, but
not the bytes of a checkpoint. `save`, `restore` and all higher packages import this one.
"""
