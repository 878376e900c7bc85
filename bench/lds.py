"""How well does each method predict what really happens when training data is left out?

    python -m bench.lds --alpha 0.1                                  # the embedded task, its usual methods, minutes
    python -m bench.lds --alpha 0.1 --methods ekfac ekfac@damping=1e-4 stiff=ekfac@damping=1
    python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --seeds 1 2 3 4 42 --data-dir DIR
    python -m bench.lds --experiment paper.toml                      # or a run.json: the same run again

Nothing imports this module: imported, it would hide the function `bench.lds`. The command is in bench/cli.py.
"""

import sys

if __name__ == "__main__":
    from bench.cli import lds_main

    sys.exit(lds_main())
