"""Which examples have like weights, and which queries: what the regression on subsets expects before it sees a loss.

Examples are alike in the scores that they have over queries (P'P), or in a method's own scores between training
examples. Queries are alike in their scores over examples (the cosine of two rows of P): in the eigenvectors of that
likeness to a power they are regressed one by one, and so share what they have in common.

What was tried, by LDS on the tuning subsets and queries of seed 1, 300 retrains, around `kfac` (0.542 by itself on
digits, 0.647 on tinylm): every line has its best power and share of the identity by marginal likelihood.

    covariance of the weights                          digits   tinylm
    the identity                                        0.555
    P'P of kfac, cosines                                0.560    0.681
    scores among training examples: gradsim             0.563
                                    kfac                0.565    0.699
                                    BIF (its draws)     0.566
    one label x cosine of last features                 0.549             dropped: features of a class are all alike
    one label x squared cosine of pixels                0.566             dropped: no other task has such pixels
    ... x cosines of P'P                                0.569             dropped: the same
    BIF's x cosines of P'P                              0.567             dropped: no more than chance
    and queries that share, by their cosines in P       0.570    0.697    kept: likelier by far, at worst level
    ... the residual of the prior mean alone            0.564    0.699    dropped: nothing
    ... in the outcomes' own principal components       0.557             dropped: too few subsets to know them

The order was the same at 100 and 1,000 retrains of digits; at 1,000 BIF's covariance was ahead (0.608; kfac's 0.602,
P'P 0.589). The marginal likelihood of the method's own subsets put these covariances into the same order.
"""

import torch
from torch import Tensor

AS_IT_IS = 0  # a power: the covariance itself, with the examples' own lengths, and no power of cosines
ROWS_AT_ONCE = 1024


def products(scores: Tensor, device: torch.device) -> Tensor:
    """(n, n): of the columns of scores (q, n), of mean diagonal 1."""
    total = torch.zeros(scores.shape[1], scores.shape[1], dtype=torch.float64, device=device)
    for rows in scores.split(ROWS_AT_ONCE):
        wide = rows.to(device, torch.float64)
        total += wide.T @ wide
    return total / total.diagonal().mean().clamp(min=1e-300)


def symmetric(covariance: Tensor, device: torch.device) -> Tensor:
    """(n, n): of mean diagonal 1, what rounding made of the other half taken out."""
    wide = covariance.to(device, torch.float64)
    wide = (wide + wide.T) / 2
    return wide / wide.diagonal().mean().clamp(min=1e-300)


def likeness(covariance: Tensor, power: int) -> Tensor:
    """(n, n): the covariance, or cosines to that power; an example without a length is like itself alone."""
    if power == AS_IT_IS:
        return covariance
    lengths = covariance.diagonal().clamp(min=0).sqrt()
    lengths = torch.where(lengths > 0, lengths, 1.0)
    alike = covariance / lengths[:, None]
    alike /= lengths
    alike.fill_diagonal_(1.0)
    return alike.pow_(power)


def query_basis(scores: Tensor, power: int, device: torch.device) -> Tensor:
    """(q, q), orthogonal: eigenvectors, in columns, of how alike the rows of scores (q, n) are.

    A constant that all examples have in common says nothing about subsets of one size, and does not count.
    """
    num_queries = len(scores)
    alike = torch.empty(num_queries, num_queries, dtype=torch.float64, device=device)
    for start in range(0, num_queries, ROWS_AT_ONCE):
        rows = _centred(scores[start : start + ROWS_AT_ONCE], device)
        for other in range(0, start + 1, ROWS_AT_ONCE):
            block = rows @ _centred(scores[other : other + ROWS_AT_ONCE], device).T
            alike[start : start + ROWS_AT_ONCE, other : other + ROWS_AT_ONCE] = block
            alike[other : other + ROWS_AT_ONCE, start : start + ROWS_AT_ONCE] = block.T
    alike.fill_diagonal_(1.0)
    return torch.linalg.eigh(alike.pow_(power))[1]


def _centred(rows: Tensor, device: torch.device) -> Tensor:
    """Of length 1, about their own mean; 0 where there is nothing."""
    wide = rows.to(device, torch.float64)
    wide = wide - wide.mean(1, keepdim=True)
    lengths = wide.norm(dim=1, keepdim=True)
    return wide / torch.where(lengths > 0, lengths, 1.0)
