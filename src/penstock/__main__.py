"""`python -m penstock` runs the command `penstock`."""

import os
import sys

# Python puts the working directory first: the command would import modules from a downloaded run
# that a user inspects in place. PYTHONPATH can still name the directory.
if not sys.flags.safe_path and sys.path and sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109
    del sys.path[0]

from penstock.core.cli.main import main

if __name__ == "__main__":
    main()
