"""From ground truth and predictions to rows: LDS with its interval, the ceiling, and the paired differences."""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

import bench.metrics as metrics
from baselines.method import Method
from baselines.support.nested import NONE
from bench.ground_truth import GroundTruth
from bench.methods import Variant
from bench.metrics import LDS, best_spearman, linear_ceiling, unlimited_retrains
from bench.metrics.linear import MINIMUM_SUBSETS_LINEAR
from bench.scoring import Prediction
from bench.tables import RunRows
from retrain.subsets import REPLAYED
from retrain.task import Task
from retrain.units import Plan, groups_of

COLUMNS = [
    "task", "protocol", "method", "label", "settings", "normalised", "alpha", "alpha_attribution", "seed",
    "num_subsets", "num_replicates", "num_queries", "num_undefined", "lds", "ci_low", "ci_high", "lds_across_queries",
    "ceiling", "ceiling_low", "ceiling_high", "linear_ceiling", "linear_low", "linear_high", "lds_within_groups",
    "within_groups_low", "within_groups_high", "ceiling_within_groups", "fit_seconds", "score_seconds",
    "peak_memory_bytes", "device", "note", "run_id",
]  # fmt: skip
PAIR_COLUMNS = [
    "task", "protocol", "label", "against", "normalised", "alpha", "alpha_attribution", "seed", "num_subsets",
    "num_queries", "num_undefined", "difference", "ci_low", "ci_high", "p_value", "difference_within_groups",
    "within_groups_low", "within_groups_high", "p_value_within_groups", "run_id",
]  # fmt: skip
MANY_NUMBERS = 5_000_000  # subsets x queries x metrics from which starting threads pays
LINEAR = ("linear_ceiling", "linear_low", "linear_high", "linear_share", "linear_subsets", "run_over_mean")
AT_UNLIMITED = ("unlimited_ceiling", "unlimited_low", "unlimited_high", "unlimited_share", "unlimited_from")
CHEAPER = 8  # a difference of two that are known than a score

Made = tuple[str, bool]  # label, normalised

# Column -> the attribute of a metric's result that stands in it.
SIZES = {name: name for name in ("num_subsets", "num_queries", "num_undefined")}
LDS_COLUMNS = {**SIZES, "lds": "lds", "ci_low": "ci_low", "ci_high": "ci_high", "lds_across_queries": "across_queries"}
LDS_WITHIN = {"lds_within_groups": "lds", "within_groups_low": "ci_low", "within_groups_high": "ci_high"}
CEILING_OF_ROW = {"ceiling": "ceiling", "ceiling_low": "ci_low", "ceiling_high": "ci_high"}
CEILING_COLUMNS = {name: name for name in ("ceiling", "ci_low", "ci_high", "reliability", "num_subsets_replicated")}
CEILING_WITHIN = {
    "reliability_within_groups": "reliability", "ceiling_within_groups": "ceiling",
    "ceiling_within_groups_low": "ci_low", "ceiling_within_groups_high": "ci_high",
}  # fmt: skip
PAIR_NUMBERS = {**SIZES, **{name: name for name in ("difference", "ci_low", "ci_high", "p_value")}}
PAIR_WITHIN = {
    "difference_within_groups": "difference", "within_groups_low": "ci_low", "within_groups_high": "ci_high",
    "p_value_within_groups": "p_value",
}  # fmt: skip


def columns(result: Any, wanted: Mapping[str, str]) -> dict[str, Any]:
    return {column: getattr(result, attribute) for column, attribute in wanted.items()}


def add_rows(
    out: RunRows,
    task: Task,
    plan: Plan,
    truth: GroundTruth,
    queries: np.ndarray,
    predictions: Sequence[tuple[Variant, Prediction]],
    further: GroundTruth | None = None,
) -> None:
    """Adds the rows of one (seed, alpha): raw and train-normalised, every variant, and the paired differences.

    further: what methods retrained on, at this alpha; the linear ceiling rests on it as well.
    """
    losses = truth.mean()[:, queries]
    where = {"task": task.name, "protocol": task.protocol}
    where |= {name: getattr(plan, name) for name in ("alpha", "alpha_attribution", "seed")}
    made, behind = _values_of(predictions, truth.subsets)
    measured = (truth.losses[:, :, queries], truth.present, losses, made)
    ceiling, results, differences = compute_metrics(*measured)
    groups, within = groups_of(task, plan.attributed(task)), None
    if groups is not None:
        counts = metrics.GroupCounts.of(truth.masks, groups)
        within = compute_metrics(*measured, counts)
    if plan.initialisation == REPLAYED:  # nothing but the data differs: a perfect prediction would reach 1
        one: dict[str, Any] = {"ceiling": 1.0, "ci_low": 1.0, "ci_high": 1.0, "reliability": 1.0}
        ceiling = replace(ceiling, **one)
        within = within and (replace(within[0], **one), *within[1:])
    linear = linear_numbers(truth, further, queries)
    alone = {retrains_alone(behind[key][0].method, plan.alpha): one for key, one in results.items() if not key[1]}
    out.ceilings.append(
        where
        | columns(ceiling, {**CEILING_COLUMNS, "num_undefined": "num_undefined"})
        | linear
        | unlimited_numbers(alone, truth.masks.shape[1], linear)
        | {"num_replicates": plan.replicates, "initialisation": plan.initialisation}
        | {"mean_loss": float(losses.mean())}
        | ({} if within is None else {"group_name": task.group_name, **columns(within[0], CEILING_WITHIN)})
    )
    for (label, normalised), result in results.items():
        variant, prediction = behind[label, normalised]
        values, undefined = made[label, normalised], ~np.isfinite(result.per_query)
        reason = undefined_reason(losses[:, undefined], values[:, undefined]) if undefined.any() else ""
        if within is not None and plan.scheme == "balanced" and not counts.take_out(values).any():
            reason = f"knows the {task.group_name} alone, of which all subsets hold the same"
        elif undefined.all():
            kind, place = "train-normalised LDS" if normalised else "LDS", f"alpha {plan.alpha:g}, seed {plan.seed}"
            out.problems.append(f"{kind} of {label} is undefined for every query at {place}: {reason}")
            reason = ""
        inner = {} if within is None else columns(within[1][label, normalised], LDS_WITHIN)
        inner |= {} if within is None else {"ceiling_within_groups": within[0].ceiling}
        out.rows.append(
            where
            | _row_of_method(variant, label, normalised, prediction.record, result)
            | columns(ceiling, CEILING_OF_ROW)
            | {name: linear[name] for name in ("linear_ceiling", "linear_low", "linear_high")}
            | {"num_replicates": plan.replicates}
            | {"note": "; ".join(filter(None, [*notes_of(prediction.record), reason]))}
            | inner
        )
    for (first, second), pair in differences.items():
        named = {"label": first[0], "against": second[0], "normalised": first[1]}
        inner = {} if within is None else columns(within[2][first, second], PAIR_WITHIN)
        out.pairs.append(where | named | columns(pair, PAIR_NUMBERS) | inner)


def notes_of(record: Mapping[str, Any]) -> list[str]:
    """What a row says of its scores: how many are not finite, and chains that did not mix."""
    count, mixing = record.get("num_scores_not_finite"), (record.get("diagnostics") or {}).get("mixing")
    return [f"{count} scores are not finite" if count else "", str(mixing or "")]


def _row_of_method(
    variant: Variant, label: str, normalised: bool, record: Mapping[str, Any], result: LDS
) -> dict[str, Any]:
    """What a row says of its method, whatever it is held against."""
    defined = result.num_undefined < result.num_queries
    named = {"method": variant.method.name, "label": label, "settings": variant.settings, "origin": variant.origin}
    costs = {name: record[name] for name in ("fit_seconds", "score_seconds", "peak_memory_bytes", "device")}
    spread = float(np.nanstd(result.per_query)) if defined else math.nan
    return named | {"normalised": normalised, "spread": spread} | columns(result, LDS_COLUMNS) | costs


def _values_of(
    predictions: Sequence[tuple[Variant, Prediction]], subsets: np.ndarray
) -> tuple[dict[Made, np.ndarray], dict[Made, tuple[Variant, Prediction]]]:
    """By row: (subsets, queries), raw before train-normalised, a whole before its parts; and what is behind each."""
    made: dict[Made, np.ndarray] = {}
    behind: dict[Made, tuple[Variant, Prediction]] = {}
    for normalised, kind in ((False, "raw"), (True, "normalised")):
        for variant, whole in predictions:
            parts = {f"{variant.label}: {name}": part for name, part in whole.components.items()}
            for label, prediction in {variant.label: whole, **parts}.items():
                values = prediction.normalised if normalised else prediction.raw
                if values is not None and variant.rows in ("both", kind):
                    made[label, normalised] = values[subsets]
                    behind[label, normalised] = variant, prediction
    return made, behind


def undefined_reason(losses: np.ndarray, prediction: np.ndarray) -> str:
    """Of a correlation across subsets; both (subsets, queries)."""
    for name, values in (("the retrained losses", losses), ("its predictions", prediction)):
        finite = np.isfinite(values).all(axis=0)
        if not finite.any():
            return f"{name} are not finite"
        if not (values != values[:1]).any(axis=0)[finite].any():
            return f"{name} are the same for all {len(values)} subsets"
    return "losses or predictions are not finite, or the same for all subsets"


def compute_metrics(
    replicates: np.ndarray,
    present: np.ndarray,
    losses: np.ndarray,
    made: dict[Made, np.ndarray],
    within: metrics.GroupCounts | None = None,
) -> tuple[metrics.Ceiling, dict[Made, metrics.LDS], dict[tuple[Made, Made], metrics.Difference]]:
    """All numbers of one (seed, alpha), every two of one kind compared; on all cores where there is enough to do."""
    pairs = [(a, b) for a, b in itertools.combinations(made, 2) if a[1] == b[1]]
    ceiling = metrics.noise_ceiling(replicates, present=present, within=within)
    with all_cores(losses.size * len(made)) as each:
        score = functools.partial(metrics.sampled_score, losses, within=within)
        scores = dict(zip(made, each(score, made.values()), strict=True))
    with all_cores(losses.size * len(pairs) // CHEAPER) as each:
        samplings = ([scores[pair[side]][1] for pair in pairs] for side in (0, 1))
        differences = dict(zip(pairs, each(metrics.difference_of_samplings, *samplings), strict=True))
    return ceiling, {key: score for key, (score, _) in scores.items()}, differences


@contextlib.contextmanager
def all_cores(num_numbers: int) -> Iterator[Any]:
    """`map`, in threads where there are that many numbers to go through: 10,000 queries take half a second each.

    Sorting and arithmetic on arrays let other threads run meanwhile.
    """
    if num_numbers < MANY_NUMBERS:
        yield map
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield pool.map


# ---- how much is additive ----


def linear_numbers(truth: GroundTruth, further: GroundTruth | None, queries: np.ndarray) -> dict[str, Any]:
    """Of what LDS is measured against: the mean over the reported subsets' replicates."""
    masks, losses, present = truth.masks, truth.losses[:, :, queries], truth.present
    if further is not None:
        once = np.zeros((len(losses), *further.losses[0][:, queries].shape), dtype=losses.dtype)
        once[0] = further.losses[0][:, queries]
        there = np.zeros(once.shape[:2], dtype=bool)
        there[0] = further.present[0]
        masks, losses = np.concatenate([masks, further.masks]), np.concatenate([losses, once], axis=1)
        present = np.concatenate([present, there], axis=1)
    if len(masks) < MINIMUM_SUBSETS_LINEAR:
        return dict.fromkeys(LINEAR)
    found = linear_ceiling(masks, losses, present=present)
    run, signal = found.share_of_run, found.share_of_signal
    larger = 1.0  # a share of a single run's variance is a larger one of the mean's, which has less noise
    if signal is not None and 0 < run.share < signal.share:
        noiseless = run.share / signal.share
        larger = 1 / (noiseless + (1 - noiseless) * float((1 / truth.present.sum(axis=0)).mean()))
    shares = [larger * value for value in (run.share, run.ci_low, run.ci_high)]
    if not math.isfinite(shares[0]):
        return dict.fromkeys(LINEAR)
    return dict(zip(LINEAR, [*map(best_spearman, shares), shares[0], len(masks), larger], strict=True))


def unlimited_numbers(
    scores: Mapping[int, LDS], num_examples: int, linear: Mapping[str, Any]
) -> dict[str, float | int | None]:
    """scores: number of retrains -> LDS of regression on so many without a prior; the most of them say it best."""
    scores = {count: one for count, one in scores.items() if count and math.isfinite(one.lds)}
    if not scores or linear["run_over_mean"] is None:
        return dict.fromkeys(AT_UNLIMITED)
    most = max(scores)
    ends = (scores[most].lds_corrected, scores[most].ci_low, scores[most].ci_high)
    found = unlimited_retrains(ends, most, num_examples, run_over_mean=linear["run_over_mean"])
    return dict(zip(AT_UNLIMITED, [found.ceiling, found.ci_low, found.ci_high, found.share, most], strict=True))


def retrains_alone(method: Method, alpha: float) -> int:
    """On how many subsets, drawn like those that are reported, it rests, and on nothing else; 0: on other things."""
    count, kept = method.extra_retrains()
    return count if getattr(method, "prior", None) == NONE and kept in (0.0, alpha) else 0
