"""Ranks that read a checkpoint together: what several need is read by one of them.

Here: which ranks are on which host, who of them reads which bytes, the shared memory through which
they hand them on within a host, and the HTTP by which they do between hosts. Not here: how bytes
are read and verified, which `pipeline` has, nor what a rank needs, which `restore` plans. `restore`
imports it.
"""
