"""Computes where bytes go in a save, and where they come from in a restore.

Plans chunks, slabs, regions and the order of reads, without I/O, threads or torch.
"""
