"""Several ranks that save or restore one checkpoint together, and how they agree.

Here: the thread that conducts the rounds of a save and of a restore; the store of the job, where
ranks post; the comparison of their states; the rank of this process; and the step after which all
leave. Not here: the rounds themselves, which `rounds` has, nor the bytes of a rank and the commit
record, which `save` and `catalog` have. `save` and `restore` import it.
"""
