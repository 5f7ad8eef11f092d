"""Ranks that read a checkpoint together: what several need is read by one of them.

Here: which ranks are on which host, who of them reads which bytes, and the shared memory and the
sockets through which they hand them on, on one host and between hosts. Not here: how bytes are read
and verified, which `pipeline` has, nor what a rank needs, which `restore` plans. `restore` imports
it.
"""
