"""Several ranks that save or restore one checkpoint together, and how they agree.

Here: the implementations of `Coordination`, and the rounds of a save and of a restore, sans-IO,
with the thread that conducts them; and which rank this process is. Not here: the bytes of a rank,
and the commit record, which `save` and `catalog` have. `save` and `restore` import it.
"""
