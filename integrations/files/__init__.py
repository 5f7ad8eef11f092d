"""Export of checkpoints to the files of other tools, and import from them."""
