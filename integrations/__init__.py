"""The ways between Penstock and other tools: trainers, their files, and sinks for events.

An integration imports the public face of `penstock` only, as a user's program does, and nothing of
the product imports an integration. The adapter of a trainer imports that trainer;
what reads and writes files imports another tool when it is called.
"""
