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

The interval
------------
Subsets and queries are both draws, and every query sees the same subsets. The interval is for the score that infinitely
many subsets would give, averaged over the population the queries come from. Resampling the (subset, query) table itself
fails three ways: a subset drawn twice ties with itself in truth and prediction alike, which pulls Spearman off; ranks
held fixed under resampling miss a first-order part of Spearman's variance; and resampling both sides counts the
subset-by-query interaction three times. Instead:

1. Leaving out each subset in turn, exactly and with ranks made anew, gives each query's jackknife influence values
   `psi[j, k]` and takes out the bias of a finite number of subsets (E r = (3 tau + (K - 2) rho) / (K + 1): at K = 100
   about -0.005, at K = 10 about -0.05 for rho = 0.5). `lds` stays the plain mean that others report; the interval is
   around `lds_corrected`, which is `lds - bias`.
2. The bootstrap resamples queries and subsets of the linear form `mean_j rho_j + mean_k psi_k`, psi_k being the mean of
   psi over queries. The spread of rho_j over queries already holds the interaction once, so psi_k is shrunk to the
   variance that queries share.
3. The deviations are stretched by the ratio of Student's t to the normal quantile, because few subsets or few queries
   leave the variance itself uncertain, and for a correlation they are applied on Fisher's z scale, where it is closer
   to normal.

Simulated coverage of the 95 % interval (linear queries with known coefficients and noise; 1000 draws, 300 for 500
queries; one standard error is 0.7 %, or 1.3 %):

    regime                                    LDS    K=100 q=60   K=100 q=500   K=30 q=50   K=10 q=20
    alike queries                             0.41      94.6         95.3          93.7        97.8
    heterogeneous queries                     0.37      95.2         94.3          94.5        96.9
    score near zero                           0.02      94.8         95.0          96.0        98.1
    coefficients mostly shared by queries     0.61      94.4         95.7          93.8        94.1
    the same, truth zero                      0.00      95.6         94.7          95.9        94.0
    score near one                            0.97      95.6         95.0          96.5        99.3

So below about 30 subsets it leans wide when queries go their own ways. The table is from before the degrees of freedom
had a least value, which changes nothing at K = 100; with it, 200 draws of five regimes each: 94.5 to 98.5 % at K = 10,
q = 20; 95.5 to 100 % at K = 12, q = 7; 94 to 98.5 % at K = 50, q = 5. Paired differences: 94 to 96 % at K = 100,
q = 60, and 96 % at K = 20, q = 40. At K = 100 and 10,000 queries a score takes
half a second on one core and 150 MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

MINIMUM_SUBSETS = 3
# Small enough for one block's temporaries to stay in cache, which is several times faster than all queries at once.
_QUERIES_PER_BLOCK = 1024
_DRAWS_PER_BLOCK = 1 << 20


# ------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, kw_only=True)
class LDS:
    """A linear datamodelling score with its two-way interval."""

    lds: float  # mean over the defined queries of `per_query`; NaN when none is defined
    ci_low: float  # NaN when fewer than two queries are defined
    ci_high: float
    standard_error: float
    bias: float  # of `lds`, from having finitely many subsets; the interval is centred on lds - bias
    confidence: float
    num_subsets: int
    num_queries: int  # all queries, the undefined ones included
    num_undefined: int
    across_queries: float  # see `lds_across_queries`
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,), NaN where undefined

    @property
    def lds_corrected(self) -> float:
        """The estimate for infinitely many subsets, which the interval is around."""
        return self.lds - self.bias


@dataclass(frozen=True, kw_only=True)
class Difference:
    """LDS of method a minus LDS of method b, over the queries that both define."""

    difference: float
    ci_low: float
    ci_high: float
    standard_error: float
    p_value: float  # two-sided, Student's t on the jackknife standard error; 1 when the two are the same
    bias: float
    confidence: float
    num_subsets: int
    num_queries: int
    num_undefined: int  # queries undefined for a or for b
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,)


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The score a perfect prediction could be expected to reach, given the noise of retraining."""

    ceiling: float  # sqrt(reliability); 0.0 when the reliability is not positive, NaN when it is unknown
    ci_low: float
    ci_high: float
    reliability: float  # of the truth averaged over all replicates
    split_half: float  # mean correlation between the halves, before the step-up
    confidence: float
    num_subsets: int  # all subsets
    num_subsets_replicated: int  # those with two or more replicates, which the estimate rests on
    num_replicates: float  # harmonic mean over subsets
    num_splits: int
    num_queries: int
    num_undefined: int
    per_query: FloatArray = field(repr=False, compare=False)  # (num_queries,) split-half correlation
    sampling: _Sampling | None = field(repr=False, compare=False)  # what `lds_over_ceiling` needs
    step_up: _StepUp | None = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class CeilingRatio:
    """LDS divided by the noise ceiling, over the queries that both define."""

    ratio: float  # NaN when the ceiling is zero or unknown
    ci_low: float
    ci_high: float
    standard_error: float
    confidence: float
    lds: float
    ceiling: float
    num_subsets: int
    num_queries: int
    num_undefined: int


# -------------------------------------------------------------------------------------------------- checks and ranking


def _as_table(values: ArrayLike, name: str) -> FloatArray:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(
            f"{name} has shape {table.shape}; expected two dimensions, (num_subsets, num_queries). "
            "Reshape it, or average over replicates first."
        )
    return table


def _check_pair(truth: ArrayLike, prediction: ArrayLike, name: str = "prediction") -> tuple[FloatArray, FloatArray]:
    truth, prediction = _as_table(truth, "truth"), _as_table(prediction, name)
    if truth.shape != prediction.shape:
        hint = (
            f"{name} looks transposed: pass masks @ scores.T"
            if truth.shape == prediction.shape[::-1]
            else "use the same subsets and the same queries, in the same order, for both"
        )
        raise ValueError(
            f"truth has shape {truth.shape} and {name} has shape {prediction.shape}; "
            f"expected the same (num_subsets, num_queries); {hint}."
        )
    return truth, prediction


def _check_num_subsets(num_subsets: int) -> None:
    if num_subsets < MINIMUM_SUBSETS:
        raise ValueError(
            f"got {num_subsets} subsets (rows); a rank correlation across subsets needs at least {MINIMUM_SUBSETS}. "
            "Retrain on more subsets, or transpose if rows are queries."
        )


def _check_confidence(confidence: float, num_bootstrap: int) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; expected a fraction between 0 and 1, such as 0.95.")
    if num_bootstrap < 1:
        raise ValueError(f"num_bootstrap is {num_bootstrap}; expected at least 1, and 1000 for steady interval ends.")


@dataclass(frozen=True)
class _Ranking:
    """The rows of a (num_rows, n) array in order: everything that ranks and leave-one-out ranks are made from."""

    order: IntArray  # (num_rows, n) position -> index
    first: IntArray | None  # (num_rows, n) position -> first position of its tie group; None when nothing ties
    last: IntArray | None  # (num_rows, n) position -> last position of its tie group
    ranks: FloatArray  # (num_rows, n) index -> average rank, from 1

    def scatter(self, by_position: NDArray) -> NDArray:
        """From sorted positions back to the original index."""
        by_index = np.empty_like(by_position)
        np.put_along_axis(by_index, self.order, by_position, axis=1)
        return by_index

    def sum_above(self, values: FloatArray) -> FloatArray:
        """For each index k, the sum of values[i] over i ranked above k, with weight one half where i ties with k (or is
        k).

        That weight is by how much i's average rank falls when k is left out.
        """
        running = np.zeros((values.shape[0], values.shape[1] + 1))
        np.cumsum(np.take_along_axis(values, self.order, axis=1), axis=1, out=running[:, 1:])
        if self.first is None or self.last is None:
            below = 0.5 * (running[:, 1:] + running[:, :-1])
        else:
            upto_last = np.take_along_axis(running, self.last + 1, axis=1)
            before_first = np.take_along_axis(running, self.first, axis=1)
            below = 0.5 * (upto_last + before_first)
        return self.scatter(running[:, -1:] - below)


def _rank_rows(values: FloatArray) -> _Ranking:
    """values: (num_rows, n)."""
    num_rows, n = values.shape
    order = np.argsort(values, axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    ties = ordered[:, 1:] == ordered[:, :-1]
    positions = np.broadcast_to(np.arange(n), (num_rows, n))
    first = last = None
    rank_at = positions + 1.0
    if ties.any():
        first, last = positions.copy(), positions.copy()
        first[:, 1:][ties] = 0
        first = np.maximum.accumulate(first, axis=1)
        last[:, :-1][ties] = n - 1
        last = np.minimum.accumulate(last[:, ::-1], axis=1)[:, ::-1]
        rank_at = 0.5 * (first + last) + 1.0
    ranks = np.empty((num_rows, n))
    np.put_along_axis(ranks, order, rank_at, axis=1)
    return _Ranking(order, first, last, ranks)


def average_ranks(values: ArrayLike) -> FloatArray:
    """Ranks from 1 down each column of a (num_subsets, num_queries) array; ties share their average rank.

    NaN sorts last and gets a rank like any other value: the caller decides what a column with NaN means.
    """
    return np.ascontiguousarray(_rank_rows(np.ascontiguousarray(_as_table(values, "values").T)).ranks.T)


def _defined_columns(*tables: FloatArray) -> BoolArray:
    """(num_queries,): the columns that are finite and not constant in every table."""
    defined = np.ones(tables[0].shape[1], dtype=bool)
    for table in tables:
        with np.errstate(invalid="ignore"):
            defined &= np.isfinite(table).all(axis=0) & (table != table[:1]).any(axis=0)
    return defined


def _blocks(indices: IntArray) -> Iterator[IntArray]:
    for start in range(0, len(indices), _QUERIES_PER_BLOCK):
        yield indices[start : start + _QUERIES_PER_BLOCK]


def _correlate_ranks(ranks_a: FloatArray, ranks_b: FloatArray) -> FloatArray:
    """Pearson correlation of each row's ranks, (num_rows,). Both inputs: (num_rows, n)."""
    middle = 0.5 * (ranks_a.shape[1] + 1)
    a, b = ranks_a - middle, ranks_b - middle
    numerator = np.einsum("jk,jk->j", a, b)
    return numerator / np.sqrt(np.einsum("jk,jk->j", a, a) * np.einsum("jk,jk->j", b, b))


def _spearman_columns(truth: FloatArray, prediction: FloatArray) -> FloatArray:
    correlation = np.full(truth.shape[1], np.nan)
    defined = np.flatnonzero(_defined_columns(truth, prediction))
    # A block holds about as many numbers whatever the column length, so that long columns stay in cache as well.
    size = max(1, _QUERIES_PER_BLOCK * 100 // max(1, truth.shape[0]))
    for start in range(0, len(defined), size):
        block = defined[start : start + size]
        ranks = [_rank_rows(np.ascontiguousarray(table[:, block].T)).ranks for table in (truth, prediction)]
        correlation[block] = _correlate_ranks(ranks[0], ranks[1])
    return correlation


def spearman_per_column(truth: ArrayLike, prediction: ArrayLike) -> FloatArray:
    """Spearman correlation down each column, with average ranks for ties.

    truth, prediction: (num_subsets, num_queries). Returns (num_queries,): NaN where either column is constant or holds
    a value that is not finite.
    """
    truth, prediction = _check_pair(truth, prediction)
    _check_num_subsets(truth.shape[0])
    return _spearman_columns(truth, prediction)


def lds_across_queries(truth: ArrayLike, prediction: ArrayLike) -> float:
    """For each subset, Spearman across queries; then the mean over subsets: what the paper's equation literally prints.

    It mostly rewards knowing which queries are hard, which needs no attribution; LDS proper correlates across subsets.
    Queries with a value that is not finite are left out, as they are from LDS, where they are counted. Subsets for
    which the correlation is undefined are left out; NaN when all are, or with fewer than two queries.
    """
    truth, prediction = _check_pair(truth, prediction)
    finite = np.isfinite(truth).all(axis=0) & np.isfinite(prediction).all(axis=0)
    if finite.sum() < 2:
        return math.nan
    return _mean_of_defined(_spearman_columns(truth[:, finite].T, prediction[:, finite].T))


def _mean_of_defined(values: FloatArray) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan


# ------------------------------------------------------------------------------------------------- exact leave-one-out


def _concordance(a: _Ranking, b: _Ranking) -> FloatArray:
    """For each index k, the sum over i of (weight of i above k in a) * (the same in b); weight one half for a tie or i
    = k.

    Returns (num_rows, n). Quadratic in n, but in bytes and without branches, which beats a tree up to thousands of
    subsets.
    """
    num_rows, n = a.ranks.shape
    dtype = np.uint8 if n < 1 << 8 else np.uint16 if n < 1 << 16 else np.uint32
    above = np.empty((n, num_rows), dtype=dtype)
    if a.first is None and b.first is None:
        # Along a's order only later positions are above, so half the comparisons suffice.
        b_along_a = np.ascontiguousarray(np.take_along_axis(b.ranks, a.order, axis=1).T).astype(dtype)
        for position in range(n):
            is_above = b_along_a[position + 1 :] > b_along_a[position]
            np.add.reduce(is_above.view(np.uint8), axis=0, dtype=dtype, out=above[position])
        return a.scatter(np.ascontiguousarray(above.T)) + 0.25
    doubled = [np.ascontiguousarray((2.0 * ranking.ranks).T).astype(np.uint32) for ranking in (a, b)]
    total = np.empty((n, num_rows))
    for index in range(n):
        weight_a, weight_b = (
            (ranks > ranks[index]).view(np.uint8) + (ranks >= ranks[index]).view(np.uint8) for ranks in doubled
        )
        total[index] = np.add.reduce(weight_a * weight_b, axis=0, dtype=np.uint32)
    return np.ascontiguousarray(0.25 * total.T)


def _leave_one_out_spread(ranking: _Ranking) -> FloatArray | float:
    """The sum of squared centred ranks that is left without each k: a number when nothing ties, else (num_rows, n)."""
    n = ranking.ranks.shape[1]
    if ranking.first is None or ranking.last is None:
        return (n - 1) * ((n - 1) ** 2 - 1) / 12.0
    squares = np.einsum("jk,jk->j", ranking.ranks, ranking.ranks)[:, None] - ranking.ranks**2
    cross = ranking.sum_above(ranking.ranks) - 0.5 * ranking.ranks
    weights = ranking.scatter((n - 1.0 - ranking.last) + 0.25 * (ranking.last - ranking.first))
    return squares - 2.0 * cross + weights - (n - 1) * (0.5 * n) ** 2


def _leave_one_out(truth: FloatArray, prediction: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Spearman of each row, (num_rows,), and the same without each subset in turn, (num_rows, num_subsets).

    truth, prediction: (num_rows, num_subsets), finite, no row constant. Where leaving a subset out makes a row
    constant, the whole association rests on that subset, and zero is what remains.
    """
    a, b = _rank_rows(truth), _rank_rows(prediction)
    n = truth.shape[1]
    products = a.ranks * b.ranks
    remaining = products.sum(axis=1, keepdims=True) - products
    remaining -= a.sum_above(b.ranks) - 0.5 * b.ranks
    remaining -= b.sum_above(a.ranks) - 0.5 * a.ranks
    remaining += _concordance(a, b) - 0.25
    remaining -= (n - 1) * (0.5 * n) ** 2
    spread = np.sqrt(np.asarray(_leave_one_out_spread(a) * _leave_one_out_spread(b)))
    without = np.divide(remaining, spread, out=np.zeros_like(remaining), where=spread > 1e-9)
    return _correlate_ranks(a.ranks, b.ranks), without


# ----------------------------------------------------------------------------------------------- sampling and interval


@dataclass(frozen=True)
class _Sampling:
    """How a mean over queries varies with the draw of queries and of subsets. Rows of undefined queries are NaN.

    plain: (num_queries,) the statistic; corrected: (num_queries,) less its jackknife bias; influence: (num_queries,
    num_subsets) jackknife influence values, each row summing to zero. Sums and multiples of samplings are samplings,
    which is how differences and ratios get their intervals from the very same resamples.
    """

    plain: FloatArray
    corrected: FloatArray
    influence: FloatArray

    def combine(self, weight: float, other: _Sampling, other_weight: float) -> _Sampling:
        return _Sampling(
            weight * self.plain + other_weight * other.plain,
            weight * self.corrected + other_weight * other.corrected,
            weight * self.influence + other_weight * other.influence,
        )

    @property
    def num_undefined(self) -> int:
        return int(np.isnan(self.plain).sum())


@dataclass(frozen=True)
class _Interval:
    mean: float
    bias: float
    low: float
    high: float
    standard_error: float
    degrees_of_freedom: float


def _sample(truth: FloatArray, prediction: FloatArray) -> _Sampling:
    """truth, prediction: (num_subsets, num_queries)."""
    n, num_queries = truth.shape
    plain = np.full(num_queries, np.nan)
    corrected = np.full(num_queries, np.nan)
    influence = np.full((num_queries, n), np.nan)
    for block in _blocks(np.flatnonzero(_defined_columns(truth, prediction))):
        columns = (np.ascontiguousarray(table[:, block].T) for table in (truth, prediction))
        plain[block], without = _leave_one_out(*columns)
        mean_without = without.mean(axis=1)
        corrected[block] = n * plain[block] - (n - 1) * mean_without
        influence[block] = (n - 1) * (mean_without[:, None] - without)
    return _Sampling(plain, corrected, influence)


def _resampled_means(values: FloatArray, num_bootstrap: int, rng: np.random.Generator) -> FloatArray:
    """(num_bootstrap,): means of `values`, (n,), drawn with replacement."""
    n = len(values)
    means = np.empty(num_bootstrap)
    step = max(1, _DRAWS_PER_BLOCK // n)
    for start in range(0, num_bootstrap, step):
        stop = min(start + step, num_bootstrap)
        draws = rng.integers(0, n, size=(stop - start, n))
        means[start:stop] = values[draws].mean(axis=1)
    return means


def _interval(sampling: _Sampling, *, seed: int, num_bootstrap: int, confidence: float, correlation: bool) -> _Interval:
    """The two-way bootstrap interval that the module's opening describes; `correlation` asks for Fisher's z scale."""
    defined = ~np.isnan(sampling.plain)
    num_queries, num_subsets = int(defined.sum()), sampling.influence.shape[1]
    if num_queries == 0:
        return _Interval(*[math.nan] * 6)
    corrected, influence = sampling.corrected[defined], sampling.influence[defined]
    mean, centre = float(sampling.plain[defined].mean()), float(corrected.mean())
    if num_queries == 1:
        # One query says nothing about how queries differ.
        return _Interval(mean, mean - centre, math.nan, math.nan, math.nan, math.nan)

    by_subset = influence.mean(axis=0)
    squares = float(by_subset @ by_subset)
    all_squares = float(np.einsum("jk,jk->", influence, influence))
    interaction = max(0.0, all_squares - num_queries * squares) / ((num_queries - 1) * (num_subsets - 1))
    unshared = interaction / num_queries
    observed = squares / (num_subsets - 1)
    shared = max(0.0, observed - unshared)
    from_queries = float(corrected.var(ddof=1)) / num_queries
    from_subsets = shared / num_subsets
    variance = from_queries + from_subsets
    if variance <= 1e-30:
        return _Interval(mean, mean - centre, centre, centre, 0.0, math.inf)
    # Welch and Satterthwaite. The shared variance is a difference; its uncertainty is that of the larger, observed
    # term. Where little is shared that overstates it without limit, and Student's t at less than one degree of freedom
    # makes an interval from -1 to 1: half of what the scarcer of the two samples has is the least.
    degrees_of_freedom = max(
        variance**2 / (from_queries**2 / (num_queries - 1) + (observed / num_subsets) ** 2 / (num_subsets - 1)),
        0.5 * (min(num_queries, num_subsets) - 1),
    )

    query_rng, subset_rng = (np.random.default_rng([seed, side]) for side in (0, 1))
    deviation = _resampled_means(corrected - centre, num_bootstrap, query_rng)
    deviation *= math.sqrt(num_queries / (num_queries - 1))
    if shared > 0.0:
        scale = math.sqrt(shared / observed * num_subsets / (num_subsets - 1))
        deviation += scale * _resampled_means(by_subset, num_bootstrap, subset_rng)
    tail = 0.5 * (1.0 - confidence)
    stretch = float(stats.t.ppf(1.0 - tail, degrees_of_freedom) / stats.norm.ppf(1.0 - tail))
    low, high = (stretch * float(end) for end in np.quantile(deviation, [tail, 1.0 - tail]))
    if correlation:
        # Taking out the bias can step over 1; halfway from the plain mean to 1 keeps z finite there.
        limit = min(0.5 * (1.0 + abs(mean)), 1.0 - 1e-12)
        inside = min(max(centre, -limit), limit)
        low, high = (math.tanh(math.atanh(inside) + end / (1.0 - inside**2)) for end in (low, high))
    else:
        low, high = centre + low, centre + high
    return _Interval(mean, mean - centre, low, high, math.sqrt(variance), degrees_of_freedom)


# ---------------------------------------------------------------------------------------------- scores and differences


def linear_datamodelling_score(
    truth: ArrayLike, prediction: ArrayLike, *, seed: int = 0, num_bootstrap: int = 1000, confidence: float = 0.95
) -> LDS:
    """LDS of one method, with its interval over subsets and queries.

    truth, prediction: (num_subsets, num_queries); see the module's opening for both and for the interval. The interval
    is for infinitely many subsets, so where the bias exceeds the error (few subsets, or very many queries that
    share little) `lds` can lie below `ci_low`; `lds_corrected` lies inside.
    """
    truth, prediction = _check_pair(truth, prediction)
    _check_num_subsets(truth.shape[0])
    _check_confidence(confidence, num_bootstrap)
    sampling = _sample(truth, prediction)
    interval = _interval(sampling, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=True)
    return LDS(
        lds=interval.mean,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        bias=interval.bias,
        confidence=confidence,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=sampling.num_undefined,
        across_queries=lds_across_queries(truth, prediction),
        per_query=sampling.plain,
    )


def paired_difference(
    truth: ArrayLike,
    prediction_a: ArrayLike,
    prediction_b: ArrayLike,
    *,
    seed: int = 0,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
) -> Difference:
    """LDS of method a minus LDS of method b on the same truth: positive when a predicts better.

    All three: (num_subsets, num_queries). Both methods see the same resampled queries and subsets, so what they share
    cancels; this is sharper than comparing two intervals. Queries undefined for either are left out of both and
    counted.
    """
    truth, prediction_a = _check_pair(truth, prediction_a, "prediction_a")
    truth, prediction_b = _check_pair(truth, prediction_b, "prediction_b")
    _check_num_subsets(truth.shape[0])
    _check_confidence(confidence, num_bootstrap)
    sampling = _sample(truth, prediction_a).combine(1.0, _sample(truth, prediction_b), -1.0)
    interval = _interval(sampling, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=False)
    centre = interval.mean - interval.bias
    if interval.standard_error > 0.0:
        p_value = float(2.0 * stats.t.sf(abs(centre) / interval.standard_error, interval.degrees_of_freedom))
    elif interval.standard_error == 0.0:
        p_value = 1.0 if centre == 0.0 else 0.0
    else:
        p_value = math.nan
    return Difference(
        difference=interval.mean,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        p_value=p_value,
        bias=interval.bias,
        confidence=confidence,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
    )


# ------------------------------------------------------------------------------------------------------- noise ceiling


@dataclass(frozen=True)
class _StepUp:
    """From the correlation between two halves of the replicates to the reliability of their mean over all of them.

    With one replicate's noise variance `noise` in units of the signal's, the halves correlate by
    1 / sqrt((1 + noise * half_a) (1 + noise * half_b)) and the whole has reliability 1 / (1 + noise * whole), where
    each field is the mean over subsets of one over the number of replicates. For R even and the same everywhere this is
    Spearman and Brown's 2c / (1 + c); the longer form also holds for odd and for unequal numbers.
    """

    half_a: float
    half_b: float
    whole: float

    def reliability(self, split_half: float) -> float:
        if split_half == 0.0 or math.isnan(split_half):
            return split_half
        # A negative correlation is chance; mirroring it keeps the step-up monotone and the sign visible.
        total, product = self.half_a + self.half_b, self.half_a * self.half_b
        root = math.sqrt(total**2 + 4.0 * product * (1.0 / split_half**2 - 1.0))
        noise = (root - total) / (2.0 * product)
        return math.copysign(1.0 / (1.0 + noise * self.whole), split_half)

    def ceiling(self, split_half: float) -> float:
        reliability = self.reliability(split_half)
        return math.nan if math.isnan(reliability) else math.sqrt(max(0.0, reliability))


def _as_replicates(
    replicates: ArrayLike | Sequence[ArrayLike], present: ArrayLike | None
) -> tuple[FloatArray, BoolArray]:
    """(R, K, q) losses and (R, K) which of them exist."""
    if isinstance(replicates, Sequence):
        if present is not None:
            raise ValueError("got `present` with a list of replicates; the lengths already say it: drop `present`.")
        tables = [_as_table(table, f"replicates[{k}]") for k, table in enumerate(replicates)]
        shapes = [table.shape for table in tables]
        if not tables or len({shape[1] for shape in shapes}) != 1 or min(shape[0] for shape in shapes) < 1:
            raise ValueError(
                f"replicates is a list with shapes {shapes[:5]}{'...' if len(shapes) > 5 else ''}; expected one "
                "(num_replicates, num_queries) array a subset, one replicate or more each, all with the same queries."
            )
        values = np.full((max(shape[0] for shape in shapes), len(tables), shapes[0][1]), np.nan)
        exists = np.zeros(values.shape[:2], dtype=bool)
        for k, table in enumerate(tables):
            values[: len(table), k] = table
            exists[: len(table), k] = True
        return values, exists
    values = np.asarray(replicates, dtype=np.float64)
    if values.ndim != 3:
        raise ValueError(
            f"replicates has shape {values.shape}; expected (num_replicates, num_subsets, num_queries), or a list with "
            "one (num_replicates, num_queries) array a subset. Stack the replicates along a new first axis."
        )
    exists = np.ones(values.shape[:2], dtype=bool) if present is None else np.asarray(present, dtype=bool)
    if exists.shape != values.shape[:2] or not exists.any(axis=0).all():
        raise ValueError(
            f"present has shape {exists.shape} and leaves {int((~exists.any(axis=0)).sum())} subsets without any; "
            f"expected {values.shape[:2]}, (num_replicates, num_subsets), with one True or more a subset."
        )
    return values, exists


def _replicate_orders(num_replicates: int, num_splits: int, seed: int) -> Iterator[IntArray]:
    """Orders of the replicates; taken alternately they fall into two halves, the first one larger when the number is
    odd.

    All the splits there are when that is no more than `num_splits`, else that many at random.
    """
    larger = (num_replicates + 1) // 2
    even = num_replicates % 2 == 0
    if math.comb(num_replicates, larger) // (2 if even else 1) <= num_splits:
        for chosen in combinations(range(num_replicates), larger):
            if even and 0 not in chosen:
                continue  # the same split with the halves swapped
            order = np.empty(num_replicates, dtype=np.int64)
            order[0::2] = chosen
            order[1::2] = [r for r in range(num_replicates) if r not in chosen]
            yield order
    else:
        rng = np.random.default_rng([seed, 2])
        for _ in range(num_splits):
            yield rng.permutation(num_replicates)


def noise_ceiling(
    replicates: ArrayLike | Sequence[ArrayLike],
    *,
    present: ArrayLike | None = None,
    num_splits: int = 20,
    seed: int = 0,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
) -> Ceiling:
    """What LDS a perfect prediction could be expected to reach, from how well replicates agree with each other.

    replicates: (num_replicates, num_subsets, num_queries) retrained losses. Where subsets differ in their number of
    replicates, give either a list with one (num_replicates_k, num_queries) array a subset, or the array with anything
    in the missing blocks and `present`, (num_replicates, num_subsets), False for them. NaN alone does not mark a
    replicate as missing: a run that diverged makes its queries undefined, and they are counted.

    For each split of the replicates into halves (the same split for every subset, since replicates may share seeds
    across subsets), each query's half-means are correlated by Spearman across the subsets that have two replicates or
    more. The mean over splits and queries is stepped up to the replicates that the truth averages, over all subsets
    (see `_StepUp`; odd and unequal numbers included), and the ceiling is the square root of that reliability. Step-up
    and square root are concave, so where queries differ much in reliability the ceiling is too high and a score divided
    by it too low: never flattering. So is another approximation: the step-up holds for Pearson's correlation, and with
    Spearman's of Gaussian losses it is high by 1.4 % at a ceiling of 0.56 and by 0.4 % at 0.80.

    NaN when fewer than three subsets have two replicates. A reliability that is not positive gives ceiling 0.0.
    """
    values, exists = _as_replicates(replicates, present)
    _check_num_subsets(values.shape[1])
    _check_confidence(confidence, num_bootstrap)
    if num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}; expected at least 1.")
    num_subsets, num_queries = values.shape[1:]
    counts = exists.sum(axis=0)
    replicated = np.flatnonzero(counts >= 2)
    whole = float((1.0 / counts).mean())
    nothing = np.full(num_queries, np.nan)
    if len(replicated) < MINIMUM_SUBSETS:
        return Ceiling(
            ceiling=math.nan,
            ci_low=math.nan,
            ci_high=math.nan,
            reliability=math.nan,
            split_half=math.nan,
            confidence=confidence,
            num_subsets=num_subsets,
            num_subsets_replicated=len(replicated),
            num_replicates=1.0 / whole,
            num_splits=0,
            num_queries=num_queries,
            num_undefined=num_queries,
            per_query=nothing,
            sampling=None,
            step_up=None,
        )
    larger = (counts[replicated] + 1) // 2
    step_up = _StepUp(float((1.0 / larger).mean()), float((1.0 / (counts[replicated] - larger)).mean()), whole)

    splits_done = 0
    total: _Sampling | None = None
    for order in _replicate_orders(values.shape[0], num_splits, seed):
        ordered = exists[order][:, replicated]
        turn = np.cumsum(ordered, axis=0) % 2 == 1
        halves = []
        for chosen in (ordered & turn, ordered & ~turn):
            half = np.zeros((len(replicated), num_queries))
            for slot, replicate in enumerate(order):
                half[chosen[slot]] += values[replicate, replicated[chosen[slot]]]
            halves.append(half / chosen.sum(axis=0)[:, None])
        sampling = _sample(halves[0], halves[1])
        total = sampling if total is None else total.combine(1.0, sampling, 1.0)
        splits_done += 1
    assert total is not None
    sampling = total.combine(1.0 / splits_done, total, 0.0)
    interval = _interval(sampling, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=True)

    # Subsets without a second replicate say nothing here; the others count for more, so that the mean stays the same.
    influence = np.zeros((num_queries, num_subsets))
    influence[:, replicated] = sampling.influence * (num_subsets / len(replicated))
    return Ceiling(
        ceiling=step_up.ceiling(interval.mean),
        ci_low=step_up.ceiling(interval.low),
        ci_high=step_up.ceiling(interval.high),
        reliability=step_up.reliability(interval.mean),
        split_half=interval.mean,
        confidence=confidence,
        num_subsets=num_subsets,
        num_subsets_replicated=len(replicated),
        num_replicates=1.0 / whole,
        num_splits=splits_done,
        num_queries=num_queries,
        num_undefined=sampling.num_undefined,
        per_query=sampling.plain,
        sampling=_Sampling(sampling.plain, sampling.corrected, influence),
        step_up=step_up,
    )


def lds_over_ceiling(
    truth: ArrayLike,
    prediction: ArrayLike,
    ceiling: Ceiling,
    *,
    seed: int = 0,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
) -> CeilingRatio:
    """LDS divided by the noise ceiling of the same truth: 1 for a prediction that is as good as the noise lets it be.

    truth, prediction: (num_subsets, num_queries), truth being the mean of the replicates that `ceiling` was made from,
    in the same order. The interval moves numerator and denominator together, by the same resamples of the linearised
    ratio; it can reach beyond 1. Ratio and interval are NaN when the ceiling is zero or unknown.
    """
    truth, prediction = _check_pair(truth, prediction)
    _check_num_subsets(truth.shape[0])
    _check_confidence(confidence, num_bootstrap)
    if truth.shape != (ceiling.num_subsets, ceiling.num_queries):
        raise ValueError(
            f"truth has shape {truth.shape}, but the ceiling was made from {ceiling.num_subsets} subsets and "
            f"{ceiling.num_queries} queries; make both from the same replicates."
        )
    score = _sample(truth, prediction)
    lds, height = _mean_of_defined(score.plain), ceiling.ceiling
    num_undefined = score.num_undefined
    interval = _Interval(*[math.nan] * 6)
    if ceiling.sampling is not None and ceiling.step_up is not None:
        both = ~np.isnan(score.plain) & ~np.isnan(ceiling.sampling.plain)
        num_undefined = int((~both).sum())
        lds = float(score.plain[both].mean()) if both.any() else math.nan
        split_half = float(ceiling.sampling.plain[both].mean()) if both.any() else math.nan
        height = ceiling.step_up.ceiling(split_half)
        if height > 0.0:
            step = min(1e-5, 0.5 * split_half, max(0.5 * (1.0 - split_half), 1e-12))
            ends = [ceiling.step_up.ceiling(split_half + side * step) for side in (-1, 1)]
            slope = (ends[1] - ends[0]) / (2.0 * step)
            linearised = score.combine(1.0 / height, ceiling.sampling, -lds * slope / height**2)
            interval = _interval(
                linearised, seed=seed, num_bootstrap=num_bootstrap, confidence=confidence, correlation=False
            )
            # The linear form gives the deviations; its own mean lacks a constant.
            offset = lds / height - interval.mean
            interval = replace(interval, low=interval.low + offset, high=interval.high + offset)
    return CeilingRatio(
        ratio=lds / height if height > 0.0 else math.nan,
        ci_low=interval.low,
        ci_high=interval.high,
        standard_error=interval.standard_error,
        confidence=confidence,
        lds=lds,
        ceiling=height,
        num_subsets=truth.shape[0],
        num_queries=truth.shape[1],
        num_undefined=num_undefined,
    )


# -------------------------------------------------------------------------------------------------------- across seeds


def mean_and_standard_error(values: ArrayLike) -> tuple[float, float]:
    """The mean over seeds and its standard error, NaN for a single value. A NaN among the values stays visible."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"values has shape {array.shape}; expected (num_seeds,), one number or more.")
    error = float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else math.nan
    return float(array.mean()), error
