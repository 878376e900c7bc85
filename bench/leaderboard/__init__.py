"""One leaderboard: task x method x metric, with ranks that respect ties, seconds and memory, from records alone.

    python -m bench.leaderboard                            # prints it, from results/
    python -m bench.leaderboard --task digits --wide       # one task, with settings and records
    python -m bench.leaderboard --csv board.csv            # the same as a tidy table
    python -m bench.leaderboard --write                    # and writes the marked tables of results/README.md

    from bench.leaderboard import rows
    rows(Path("results"))                                  # a list of LeaderboardRow

A column is one question about one ground truth: task with all its settings, subsets, queries, metric, alpha, seeds,
raw or train-normalised scores. Whatever differs in any of it stands in another column; nothing is ranked across.
"""

from collections.abc import Sequence

from bench.leaderboard.ranking import LeaderboardRow, rows

__all__ = ["LeaderboardRow", "main", "rows"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called."""
    from bench.leaderboard.command import main as run_command

    return run_command(argv)
