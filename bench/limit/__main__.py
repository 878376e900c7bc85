"""`python -m bench.limit`."""

import sys

from bench.limit import main

if __name__ == "__main__":
    sys.exit(main())
