"""`python -m bench.counterfactual`: see bench/counterfactual/__init__.py."""

import sys

from bench.counterfactual.command import main

if __name__ == "__main__":
    sys.exit(main())
