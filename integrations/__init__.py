"""The ways between Penstock and other tools: files in their formats, and sinks for events.

An integration imports the public face of `penstock` only, as a user's program does, and nothing of
the product imports an integration. It imports its host when it is called, never before.
"""
