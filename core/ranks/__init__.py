"""Agreement of several ranks that save or restore one checkpoint together.

Here: the thread that drives the rounds of a save and a restore; the job's store, where ranks post;
the comparison of their states; the rank of this process; and the step after which all ranks stop.
Not here: the rounds themselves, which are in `rounds`; a rank's bytes and the commit record, which
are in `save` and `catalog`. `save` and `restore` import it.
"""
