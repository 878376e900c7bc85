"""`python -m bench.scaling`: see bench/scaling/command.py."""

import sys

from bench.scaling.command import main

if __name__ == "__main__":
    sys.exit(main())
