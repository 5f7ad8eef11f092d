"""The rounds in which ranks agree on one save or one restore, sans-IO.

Covers the posts of a rank, the tables of phases, the round that walks them, and the operations that
it requests. The thread that carries them out and the job's store are in `ranks`.
"""
