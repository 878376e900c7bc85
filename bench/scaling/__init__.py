"""What attribution costs as models grow: `python -m bench.scaling` (see bench/scaling/command.py)."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called: figures and estimates of this package need no torch."""
    from bench.scaling.command import main as run

    return run(argv)
