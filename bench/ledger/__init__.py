"""Does the paper hold? Every quantitative claim of it, our numbers, and a verdict by a written rule.

    python -m bench.ledger --results results --out results/reproduction.md
    python -m bench.ledger --check            # exit 1 where the page is not what the records say

Claims are data (`bench/ledger/claims.py`): what the paper says, where, and a rule that turns records into readings,
each with its outcome. Verdicts are computed, never typed; a claim whose record is missing is not measured.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called."""
    from bench.ledger.command import main as run_command

    return run_command(argv)
