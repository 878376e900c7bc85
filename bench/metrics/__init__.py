"""How well predictions rank what really happened: the linear datamodelling score (LDS) and how sure one can be of it.

    from bench.metrics import linear_datamodelling_score
    print(linear_datamodelling_score(truth, masks @ scores.T))

Pure numpy and scipy; the commands of `bench` call it on stored arrays. Two arrays meet here, both (num_subsets,
num_queries):

- `truth[k, j]`: query j's loss after retraining on subset k, averaged over replicates;
- `prediction[k, j]`: the sum of query j's scores over the members of subset k. A score is the predicted change of the
  loss when the example is included, so a method that works correlates positively.

LDS is the mean over queries of the Spearman correlation across subsets. A query whose truth or prediction is constant
or not finite has no correlation: it is left out of the mean and counted in `num_undefined`, which every result carries.
STATISTICS.md, beside this file, derives the intervals and the ceilings and says how well they hold.
"""

from bench.metrics.arrays import ArrayScore, score_arrays
from bench.metrics.ceilings import (
    MANY_SEEDS,
    Ceiling,
    CeilingRatio,
    PooledCeiling,
    ceiling_of_ends,
    lds_over_ceiling,
    mean_and_standard_error,
    noise_ceiling,
    pooled_ceiling,
)
from bench.metrics.intervals import MINIMUM_SUBSETS, average_ranks, mean_over_replicates, spearman_per_column
from bench.metrics.lds import (
    LDS,
    Difference,
    GroupCounts,
    difference_of_samplings,
    lds_across_queries,
    linear_datamodelling_score,
    paired_difference,
    sampled_score,
)
from bench.metrics.linear import (
    AdditiveShare,
    LinearCeiling,
    UnlimitedRetrains,
    best_spearman,
    linear_ceiling,
    unlimited_retrains,
)

__all__ = [
    "LDS",
    "MANY_SEEDS",
    "MINIMUM_SUBSETS",
    "AdditiveShare",
    "ArrayScore",
    "Ceiling",
    "CeilingRatio",
    "Difference",
    "GroupCounts",
    "LinearCeiling",
    "PooledCeiling",
    "UnlimitedRetrains",
    "average_ranks",
    "best_spearman",
    "ceiling_of_ends",
    "difference_of_samplings",
    "lds_across_queries",
    "lds_over_ceiling",
    "linear_ceiling",
    "linear_datamodelling_score",
    "mean_and_standard_error",
    "mean_over_replicates",
    "noise_ceiling",
    "paired_difference",
    "pooled_ceiling",
    "sampled_score",
    "score_arrays",
    "spearman_per_column",
    "unlimited_retrains",
]
