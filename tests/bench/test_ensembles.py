"""--checkpoints: scores averaged over base models, each model's kept by itself."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import scoring
from bench.experiment import Execution, Experiment, read_experiment
from bench.ground_truth import GroundTruth
from bench.methods import build_variants, with_models
from bench.metrics import best_spearman
from bench.metrics.linear import is_known
from bench.rows import LINEAR, linear_numbers
from bench.runner import Session, run
from bench.tables import ceiling_text, divisor, linear_ceiling_of, linear_ceiling_text
from retrain.errors import UsageError
from retrain.subsets import masks as draw
from retrain.tasks import load_task

SMALL = {"epochs": 1, "num_train": 60, "widths": (4, 4, 4)}


def asked(**options) -> Experiment:
    few = {"subsets": 10, "replicates": 1, "queries": 5, "alpha": (0.5,)}
    return Experiment(task="digits", task_options=SMALL, **{"methods": ("gradsim",), **few, **options})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ensembles")


def execution(place: Path) -> Execution:
    return Execution(device="cpu", cache=str(place / "cache"), progress=False)


def test_a_row_for_each_number_of_models_and_each_model_scored_once(place: Path) -> None:
    first = run(asked(), execution(place))
    alone = Session(asked(), execution(place))
    count = len(list(alone.store.entries("scores")))
    assert count == 2, "and the control's"
    result = run(asked(checkpoints=(1, 3)), execution(place))
    frame = result.frame()
    raw = frame[~frame["normalised"] & (frame["method"] == "gradsim")]
    assert list(raw["label"]) == ["gradsim", "gradsim@models=3"]
    assert list(raw["settings"]) == ["", "models=3"]
    assert raw["lds"].iloc[0] == first.frame()["lds"].iloc[0]
    assert raw["fit_seconds"].iloc[1] > 0, "the further models' training counts"
    assert len(list(alone.store.entries("scores"))) == 4, "the first model's scores are not made again"

    session = Session(asked(checkpoints=(1, 2, 3)), execution(place))
    (one, _), (three, _) = (session.scorers(variant, 1, 1.0)[0] for variant in session.variants[:3:2])
    plans = session.plans(1, 1.0)
    members = [member.predictions(plans)[0] for member in three.members]
    mean = three.predictions(plans)[0]
    np.testing.assert_allclose(mean.raw, np.mean([m.raw for m in members], axis=0), rtol=1e-5)
    np.testing.assert_allclose(mean.normalised, np.mean([m.normalised for m in members], axis=0), rtol=1e-5)
    np.testing.assert_array_equal(one.predictions(plans)[0].raw, members[0].raw)
    assert not np.allclose(members[0].raw, members[1].raw)

    again = run(read_experiment(result.save(place / "runs")), execution(place)).frame()
    for column in ("label", "lds"):
        assert list(again[column]) == list(frame[column])
    plain, one = (Session(asked(**options), execution(place)) for options in ({}, {"checkpoints": (1,)}))
    configs = [session.scorer(session.variants[0], 1, 1.0).config for session in (plain, one)]
    assert configs[0] == configs[1]
    assert "checkpoint_number" not in configs[0], "one model is asked for as before"


def test_two_runs_side_by_side_whose_scores_are_too_large_to_keep(tmp_path: Path) -> None:
    """Each keeps what its own subsets get of the scores, and neither stands in the other's way."""
    never = replace(execution(tmp_path), keep_scores="never")
    sessions = [Session(asked(alpha=(alpha,)), never) for alpha in (0.5, 0.3)]
    ours, theirs = (session.scorer(session.active[0], 1, 1.0) for session in sessions)
    (our_plans, their_plans) = (session.plans(1, 1.0) for session in sessions)
    made = ours.make(our_plans)
    assert len(theirs.missing(their_plans)) == 1, "the scores are to be made again, and what is left of them is removed"
    assert ours.missing(our_plans) == []
    ours.forget(our_plans)
    ours.make(our_plans)
    theirs.predictions(their_plans)  # as after waiting for the other run, which made the scores
    np.testing.assert_array_equal(ours.predictions(our_plans)[0].raw, made[0].raw)


def test_labels_origins_and_refusals() -> None:
    variants = build_variants(["ekfac", "ekfac@damping=1e-4"], load_task("digits"), {}, "default")
    found = {variant.label: variant.origin for variant in with_models(variants, (1, 5))}
    labels = ("ekfac", "ekfac@models=5", "ekfac@damping=0.0001", "ekfac@damping=0.0001,models=5")
    assert found == dict(zip(labels, ("default", "as asked", "as asked", "as asked")))
    tuned = with_models([replace(variants[0], origin="tuned")], (1, 2))
    assert [variant.origin for variant in tuned] == ["tuned", "tuned, changed"]
    with pytest.raises(UsageError, match=r"checkpoints\[0\] is 0"):
        asked(checkpoints=(0,))


def test_a_replayed_ground_truth_is_exact(place: Path) -> None:
    """Twice the same bits, a ceiling of one, and magic near it on a training that is smooth."""
    experiment = Experiment(
        task="smooth_digits", task_options={**SMALL, "learning_rate": 0.1}, alpha=(0.9,), subsets=12, queries=5,
        initialisation="replayed", methods=("magic", "random"),
    )  # fmt: skip
    frame = run(experiment, execution(place)).frame()
    assert (frame["ceiling"] == 1.0).all()
    assert (frame["num_replicates"] == 1).all()
    lds = frame[~frame["normalised"]].set_index("label")["lds"]
    assert lds["magic"] > 0.85 > lds["random"]


def test_a_method_s_own_further_models_cost_their_training_whoever_trained_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = scoring.entry_of_model

    def slow(*args):
        entry = plain(*args)
        return replace(entry, record={**entry.record, "seconds": 1000.0})

    monkeypatch.setattr("bench.scoring.entry_of_model", slow)
    methods = ("trak@checkpoints=3,projection=128", "trak@checkpoints=3,projection=150")
    frame = run(asked(methods=methods), execution(tmp_path)).frame()
    raw = frame[~frame["normalised"] & (frame["method"] == "trak")]
    assert raw["fit_seconds"].between(2000, 2100).all(), "the first to ask and the second alike"
    assert (raw["score_seconds"] < 100).all(), "and once"


EXAMPLES, QUERIES = 300, 60


def truth(count: int, replicates: int, stream: str, additive: float, noise: float) -> GroundTruth:
    """Outcomes of variance 1 a run: an additive part, noise of retraining, and the rest an interaction."""
    weights = np.random.default_rng(3).normal(size=(EXAMPLES, QUERIES))
    kept = draw(1, count, 0.5, EXAMPLES, stream=stream)  # type: ignore[arg-type]
    linear = kept @ weights
    linear = (linear - linear.mean(0)) / linear.std(0)
    generator = np.random.default_rng([count, replicates])
    other = generator.normal(size=linear.shape)  # of the subset, and of no example by itself
    chance = generator.normal(size=(replicates, *linear.shape))
    signal = np.sqrt(additive) * linear + np.sqrt(1 - additive - noise) * other
    return GroundTruth.of_arrays(kept, (signal + np.sqrt(noise) * chance).astype(np.float32))


@pytest.mark.parametrize("additive", [0.3, 0.5, 0.7])
def test_a_planted_share_comes_back_from_reported_and_further_subsets(additive: float) -> None:
    reported, further = (truth(60, 2, "report", additive, 0.2), truth(400, 1, "learn", additive, 0.2))
    found = linear_numbers(reported, further, np.arange(QUERIES))
    expected = additive / (0.8 + 0.2 / 2)  # of the mean of two replicates
    assert found["linear_subsets"] == 460
    assert found["linear_share"] == pytest.approx(expected, abs=0.07)
    assert found["linear_low"] < best_spearman(expected) < found["linear_high"]
    assert is_known(found)
    assert linear_ceiling_of([found]) == pytest.approx(found["linear_ceiling"])
    assert linear_ceiling_text([found])


def test_further_subsets_make_it_sharper_and_too_few_show_none() -> None:
    reported, further = truth(60, 1, "report", 0.5, 0.2), truth(400, 1, "learn", 0.5, 0.2)
    few, many = (linear_numbers(reported, more, np.arange(QUERIES)) for more in (None, further))
    assert many["linear_high"] - many["linear_low"] < 0.7 * (few["linear_high"] - few["linear_low"])
    few = linear_numbers(truth(5, 1, "report", 0.5, 0.2), None, np.arange(QUERIES))
    assert few == dict.fromkeys(LINEAR)
    for numbers in (few, {}, {"linear_low": 0.3, "linear_high": 0.8}, {"linear_low": 0.0, "linear_high": 0.1}):
        assert not is_known(numbers)
        assert linear_ceiling_text([numbers]) == ""


KNOWN = {"linear_ceiling": 0.7, "linear_low": 0.62, "linear_high": 0.78, "linear_share": 0.5, "linear_subsets": 400}
ENDS = {"ci_low": 0.6, "ci_high": 0.8}  # of the noise ceiling


def test_an_end_that_is_cut_and_a_ceiling_above_the_noise_ceiling_are_not_shown() -> None:
    for differs, shown in (
        ({}, True),
        ({"reliability": 0.6}, True),
        ({"reliability": None}, True),  # without replicates no noise ceiling is known
        ({"reliability": 0.4}, False),
        ({"linear_ceiling": 0.96, "linear_low": 0.92, "linear_high": 1.0}, False),  # of which the upper end is cut
        ({"linear_ceiling": 0.96, "linear_low": 0.92, "linear_high": 0.99}, True),
        ({"linear_ceiling": 1.0, "linear_low": 1.0, "linear_high": 1.0}, False),
    ):
        numbers = {**KNOWN, **differs}
        assert is_known(numbers) is (shown or "reliability" in differs)
        assert math.isfinite(linear_ceiling_of([numbers])) is shown
        assert bool(linear_ceiling_text([numbers])) is shown


def test_ceilings_of_all_seeds_count_and_nothing_is_divided_by_one_that_touches_0_or_is_unknown() -> None:
    measured = ((0.5, 0.45), (0.4, 0.6))
    chance = [{**KNOWN, **ENDS, "linear_share": share, "reliability": one} for share, one in measured]
    assert math.isnan(linear_ceiling_of(chance[:1]))
    assert linear_ceiling_of(chance) == pytest.approx(best_spearman(0.45))
    assert math.isnan(linear_ceiling_of([{**one, "ci_low": 0.0} for one in chance]))  # there may be noise alone
    known: dict[str, Any] = {"ceiling": 0.7, "reliability": 0.49, **ENDS}
    assert divisor([known]) == pytest.approx(0.7)
    assert "touches" not in ceiling_text([known])
    noisy = {**known, "ceiling": 0.2, "reliability": 0.04, "ci_low": 0.0}
    assert divisor([noisy]) == divisor([noisy] * 3) == divisor([]) == 0.0
    assert "touches 0: no share" in ceiling_text([noisy])
    assert divisor([known, {**known, "ceiling": math.nan, "reliability": None}]) == 0.0
