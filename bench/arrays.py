"""LDS on plain arrays: for scores and ground truth that come from anywhere."""

from numpy.typing import ArrayLike

from bench.metrics import ArrayScore, score_arrays


def lds(masks: ArrayLike, losses: ArrayLike, scores: ArrayLike, groups: ArrayLike | None = None) -> ArrayScore:
    """The linear datamodelling score of `scores`, with its 95 % interval and, given replicates, the noise ceiling.

    masks: (subsets, training examples), True where an example was kept.
    losses: (subsets, queries), or (replicates, subsets, queries); larger is worse.
    scores: (queries, training examples), the predicted change of the query's loss when the example is included.
    groups: (training examples,), the label or source of each; with it, LDS within groups and its ceiling.
    """
    return score_arrays(masks, losses, scores, groups=groups)
