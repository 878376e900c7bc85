"""`python -m bench inspect ...` is `tda-bench inspect ...`."""

import sys

from bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
