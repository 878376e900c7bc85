"""`python -m bench.regress`."""

import sys

from bench.regress import main

if __name__ == "__main__":
    sys.exit(main())
