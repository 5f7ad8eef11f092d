"""Checkpoints in the files of other tools: export to them, import from them."""
