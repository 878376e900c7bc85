"""Real counterfactuals: leave out what a method calls most helpful, retrain, and see what becomes of the query.

    python -m bench.counterfactual                                       # the embedded task: removal curves
    python -m bench.counterfactual --methods ekfac gradsim --shares 0.01 0.1 --replicates 5
    python -m bench.counterfactual --brittleness                         # and how little flips each prediction
    python -m bench.counterfactual --task cifar10 --protocol scratch --data-dir DIR

For every query, method and size k, the k examples of the most negative score are left out of the attributed ones and a
model is retrained on the rest, `--replicates` times. The change is the query's loss then, less its loss with nothing
removed (`--reference` models). Two controls are removed alike: random examples, and random ones of the query's own
class; a method that cannot beat the second has found the class and no more. Retrains are units of the store: kept,
resumed, spread over a cluster, and shared by methods that name the same examples.

Brittleness is the smallest share that flips a query's prediction (its mean margin over replicates turns negative),
found by bisection on a grid of sizes; queries that are wrong with nothing removed do not count.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called."""
    from bench.counterfactual.command import main as run_command

    return run_command(argv)
