"""The rounds by which ranks agree on one save or one restore, sans-IO.

Here: what a rank posts, the tables of phases, the round that walks them, and the operations that
it asks for. Not here: who carries the operations out, and where ranks post, which `ranks` has.
`ranks` and `hosts` import it.
"""
