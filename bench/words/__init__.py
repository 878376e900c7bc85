"""Words cannot drift from records: marked numbers and tables of a page are written, and checked, from result files.

    python -m bench.words              # rewrites README.md, METHODS.md and the pages of results/
    python -m bench.words --check      # changes nothing; a line for each place where text and record differ, exit 1

Marks are comments, which no renderer shows. Each stands before what it is about, and `end` closes it:

    <!-- value RECORD#PATH FORMAT -->0.512<!-- end -->
    <!-- table KIND ARGUMENTS -->
    <!-- end -->

`bench/words/values.py` says what a value may be, `bench/words/blocks.py` which tables there are. Marks inside code stay
as they are.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called."""
    from bench.words.command import main as run_command

    return run_command(argv)
