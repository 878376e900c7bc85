"""`python -m bench.ledger`: see bench/ledger/__init__.py."""

import sys

from bench.ledger.command import main

if __name__ == "__main__":
    sys.exit(main())
