"""`python -m banach`: the command line, also where nothing is installed."""

import sys

from banach.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
