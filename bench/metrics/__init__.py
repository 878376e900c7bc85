"""How well predictions rank what really happened: the linear datamodelling score (LDS) and how sure one can be of it.

    from bench.metrics import linear_datamodelling_score, score_arrays
    print(score_arrays(masks, losses, scores))
    print(linear_datamodelling_score(truth, masks @ scores.T))

Pure numpy and scipy. Two arrays meet here, both (num_subsets, num_queries):

- `truth[k, j]`: query j's loss after retraining on subset k, averaged over replicates;
- `prediction[k, j]`: the sum of query j's scores over the members of subset k. A score is the predicted change of the
  loss when the example is included, so a method that works correlates positively.

A query whose truth or prediction is constant or not finite has no correlation: it is left out of the mean and counted
in `num_undefined`, which every result carries. STATISTICS.md, beside this file, derives intervals and ceilings.
"""

from bench.metrics.ceilings import (
    MANY_SEEDS,
    Ceiling,
    PooledCeiling,
    mean_and_standard_error,
    noise_ceiling,
    pooled_ceiling,
)
from bench.metrics.intervals import (
    MINIMUM_SUBSETS,
    GroupCounts,
    average_ranks,
    mean_over_replicates,
    spearman_per_column,
)
from bench.metrics.lds import (
    LDS,
    ArrayScore,
    Difference,
    difference_of_samplings,
    lds_across_queries,
    linear_datamodelling_score,
    paired_difference,
    sampled_score,
    score_arrays,
)
from bench.metrics.linear import best_spearman, linear_ceiling, unlimited_retrains

__all__ = [
    "LDS", "MANY_SEEDS", "MINIMUM_SUBSETS", "ArrayScore", "Ceiling", "Difference", "GroupCounts", "PooledCeiling",
    "average_ranks", "best_spearman", "difference_of_samplings", "lds_across_queries", "linear_ceiling",
    "linear_datamodelling_score", "mean_and_standard_error", "mean_over_replicates", "noise_ceiling",
    "paired_difference", "pooled_ceiling", "sampled_score", "score_arrays", "spearman_per_column", "unlimited_retrains",
]  # fmt: skip
