"""`python -m bench.leaderboard`: see bench/leaderboard/__init__.py."""

import sys

from bench.leaderboard.command import main

if __name__ == "__main__":
    sys.exit(main())
