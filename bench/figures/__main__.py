"""`python -m bench.figures`: see bench/figures/command.py."""

import sys

from bench.figures.command import main

if __name__ == "__main__":
    sys.exit(main())
