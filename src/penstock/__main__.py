"""`python -m penstock` is the command `penstock`."""

import os
import sys

# Python puts the working directory first: the command would import modules that lie in a run that
# somebody downloaded, and looks at. Whoever wants it there names it in PYTHONPATH.
if not sys.flags.safe_path and sys.path and sys.path[0] in {"", os.getcwd()}:  # noqa: PTH109
    del sys.path[0]

from penstock.core.cli.main import main

if __name__ == "__main__":
    main()
