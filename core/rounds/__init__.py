"""The rounds in which ranks agree on one save or one restore, sans-IO.

Here: the posts of a rank, the tables of phases, the round that walks them, and the operations that
it requests. Not here: the thread that carries them out, and the job's store, which are in `ranks`.
`ranks` and `hosts` import it.
"""
