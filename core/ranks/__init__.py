"""Agreement of several ranks that save or restore one checkpoint together.

Covers the thread that drives the rounds of a save and a restore; the job's store, where ranks post;
the comparison of their states; the rank of this process; and the step after which all ranks stop.
The rounds themselves are in `rounds`; a rank's bytes and the commit record are in `save` and
`catalog`. `save` and `restore` import this package.
"""
