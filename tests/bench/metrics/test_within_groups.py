"""LDS within groups: what groups explain counts for nothing, the rest is found again, and intervals cover it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baselines.method import Attribution, Method, Problem
from bench import Execution, Experiment, lds, run
from bench.metrics import GroupCounts, linear_datamodelling_score, noise_ceiling, paired_difference, score_arrays
from retrain import subsets
from tests.helpers.linear_queries import LinearQueries

GROUPS = np.random.default_rng(5).choice(8, size=240, p=np.arange(1, 9) / 36)
QUERIES = LinearQueries(own_error=1.0, noise=0.52, num_examples=240, num_replicates=2, groups=GROUPS)


def draw(seed: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    return QUERIES.draw(100, 50, np.random.default_rng([seed, 3]))


def test_scores_that_know_only_groups_and_losses_that_depend_on_them_alone_have_nothing() -> None:
    masks, losses, _ = draw(0)
    rng = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        by_group = (1e3 + rng.normal(size=(50, 8))).astype(dtype)[:, GROUPS]
        found = lds(masks, losses, by_group, groups=GROUPS)
        assert math.isfinite(found.lds)
        assert math.isnan(found.lds_within_groups)
        assert found.within_groups.num_undefined == 50
    only_summed_in_float32 = masks.astype(np.float32) @ by_group.astype(np.float32).T
    assert not GroupCounts.of(masks, GROUPS).take_out(only_summed_in_float32).any()
    masks, _, (scores, _) = draw(0)
    rng = np.random.default_rng(2)
    of_groups = (masks @ rng.normal(size=(50, 8))[:, GROUPS].T).astype(np.float32)
    found = lds(masks, np.stack([of_groups, of_groups]), scores, groups=GROUPS)
    assert math.isnan(found.lds_within_groups)
    noisy = of_groups + rng.normal(size=(2, *of_groups.shape))
    found = lds(masks, noisy, scores, groups=GROUPS)
    assert found.ceiling.ceiling > 0.9
    assert found.ceiling_within_groups.touches_zero
    assert found.within_groups.ci_low < 0 < found.within_groups.ci_high


def test_taking_out_nothing_order_and_names_change_nothing() -> None:
    """Balanced subsets: every subset holds the same of each group."""
    rng = np.random.default_rng(3)
    masks = subsets.masks(0, 40, 0.3, len(GROUPS), "balanced", groups=GROUPS)
    counts = GroupCounts.of(masks, GROUPS)
    assert counts.lost == 0
    truth, prediction = rng.normal(size=(2, 40, 12))
    plain, within = (linear_datamodelling_score(truth, prediction, within=one) for one in (None, counts))
    assert (within.lds, within.ci_low, within.ci_high) == pytest.approx((plain.lds, plain.ci_low, plain.ci_high))
    replicates = np.stack([truth, prediction])
    assert noise_ceiling(replicates, within=counts).ceiling == pytest.approx(noise_ceiling(replicates).ceiling)
    masks, losses, (scores, _) = draw(1)
    before = score_arrays(masks, losses, scores, groups=GROUPS)
    order = np.random.default_rng(0).permutation(len(masks))
    after = score_arrays(masks[order], losses[:, order], scores, groups=np.array(list("hgfedcba"))[GROUPS])
    assert after.lds_within_groups == pytest.approx(before.lds_within_groups)
    offset = score_arrays(masks, losses, scores + 1e6, groups=GROUPS)
    assert offset.lds_within_groups == pytest.approx(before.lds_within_groups, abs=1e-6)


def test_balanced_subsets_say_the_same() -> None:
    """LDS of balanced subsets and LDS within groups of others estimate one number."""
    rng = np.random.default_rng(4)
    coefficients = rng.normal(size=(200, len(GROUPS)))
    scores = coefficients + rng.normal(size=coefficients.shape) + 3 * rng.normal(size=(200, 8))[:, GROUPS]
    coefficients += 3 * rng.normal(size=(200, 8))[:, GROUPS]
    found = {}
    for scheme in ("fixed", "balanced"):
        masks = subsets.masks(1, 300, 0.5, len(GROUPS), scheme, groups=GROUPS)  # type: ignore[arg-type]
        found[scheme] = lds(masks, masks @ coefficients.T, scores, groups=GROUPS)
    assert found["fixed"].lds < 0.5
    assert found["fixed"].lds_within_groups == pytest.approx(found["balanced"].lds, abs=0.015)


def test_intervals_cover_and_group_counts_of_others_are_refused() -> None:
    """91 to 99 % of 150 draws; STATISTICS.md has more sizes."""
    limits = QUERIES.limits(20_000)
    covered = covered_difference = 0
    for seed in range(150):
        masks, losses, scores = draw(seed)
        counts, truth = GroupCounts.of(masks, GROUPS), losses.mean(axis=0)
        predictions = [masks @ one.T for one in scores]
        score = linear_datamodelling_score(truth, predictions[0], within=counts)
        covered += score.ci_low <= limits[0] <= score.ci_high
        difference = paired_difference(truth, *predictions, within=counts)
        covered_difference += difference.ci_low <= limits[0] - limits[1] <= difference.ci_high
    assert 0.91 * 150 <= covered <= 0.993 * 150
    assert 0.91 * 150 <= covered_difference <= 0.993 * 150
    with pytest.raises(ValueError, match="groups of 50 subsets; expected those of 100"):
        linear_datamodelling_score(truth, predictions[0], within=counts.rows(np.arange(50)))
    with pytest.raises(ValueError, match=r"groups has shape \(5,\)"):
        GroupCounts.of(masks, GROUPS[:5])


@dataclass(frozen=True, kw_only=True)
class KnowsClasses(Method):
    """A number for each pair of classes, however found."""

    def score(self, problem: Problem, state: Any) -> Attribution:
        numbers = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
        return Attribution(scores=numbers[problem.queries.targets][:, problem.attributed.targets])


def test_a_run_has_the_column_and_the_control(tmp_path: Path) -> None:
    execution = Execution(device="cpu", cache=str(tmp_path), progress=False)
    asked = {
        "task": "retrain.logistic:LogisticDigits", "alpha": 0.3, "subsets": 30, "queries": 20, "replicates": 2,
        "methods": ["gradsim", f"mine={__name__}:KnowsClasses"],
    }  # fmt: skip
    result = run(Experiment(**asked), execution)  # type: ignore[arg-type]
    assert result.problems == []
    rows = result.frame().set_index(["label", "normalised"])
    assert rows.lds_within_groups[["mine", "same_class"]].isna().all()
    assert rows.lds[["mine", "same_class"]].notna().all()
    score = rows.loc["gradsim", False]
    assert score.within_groups_low < score.lds_within_groups < score.within_groups_high
    assert score.ceiling_within_groups == pytest.approx(1), "fitted exactly"
    lines = str(result).splitlines()
    assert "nothing" in next(line for line in lines if line.startswith("same_class"))
    assert max(map(len, lines)) <= 100
    pair = result.pairs().iloc[0]
    assert (pair.label, pair.against) == ("gradsim", "mine")
    balanced = run(Experiment(**asked, scheme="balanced"), execution)  # type: ignore[arg-type]
    assert balanced.problems == [], "a control that knows the classes alone has no LDS there, and nothing is wrong"
    rows = balanced.frame().set_index(["label", "normalised"])
    assert math.isnan(rows.lds["same_class", False])
    assert "knows the class alone" in rows.note["same_class", False]
    assert rows.lds["gradsim", False] == pytest.approx(rows.lds_within_groups["gradsim", False])
