"""Makes several ranks agree, so that they save or restore one checkpoint together.

Covers the thread that drives the rounds of a save and a restore; the job's store, where ranks post;
the comparison of their states; the rank of this process; and the step after which all ranks stop.
The rounds themselves are in `rounds`. `save` writes a rank's bytes, and `catalog` publishes the
commit record. `save`, `restore`, `hosts`, `log` and the facade import this package.
"""
