"""Runs the command line: ``python -m snapcap``."""

import sys

from snapcap.service.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
