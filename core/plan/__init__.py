"""Pure arithmetic: where bytes go in a save, and where they come from in a restore.

Here: chunks, slabs, regions, the order of reads. Not here: I/O, threads, torch. `save`, `restore`
and `pipeline` import it.
"""
