"""Runs the command line: ``python -m snapcap``."""

import sys

from snapcap.service.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
