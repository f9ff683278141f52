"""``python -m devsample``: the command line."""

import sys

from devsample.cli import main

if __name__ == "__main__":
    sys.exit(main())
