"""Where several ranks leave their posts and their decisions: the implementations of `Coordination`.

Here: the store of a torch.distributed job, records of the root, and memory for threads that are
ranks. Not here: what is posted and decided, which `ranks` has. `ranks` imports it.
"""
