"""`python -m bench.words`: see bench/words/__init__.py."""

import sys

from bench.words.command import main

if __name__ == "__main__":
    sys.exit(main())
