"""`python -m bench.tune`."""

import sys

from bench.tune import main

if __name__ == "__main__":
    sys.exit(main())
