"""Every figure and table of the paper that the records allow, a file a kind; `python -m bench.figures` draws them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called."""
    from bench.figures.command import main as run_command

    return run_command(argv)


def draw_figures(source: Any, kind: str = "lds") -> Any:
    """The first figure of a kind that a folder of records, or a result that can be saved as one, allows."""
    from bench.figures.command import first_figure

    if isinstance(source, str | Path):
        return first_figure(Path(source), kind)
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="tda-bench-") as folder:
        source.save(folder)
        return first_figure(Path(folder), kind)
