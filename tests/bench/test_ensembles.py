"""--checkpoints: scores averaged over base models, each model's kept by itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.experiment import Execution, Experiment, read_experiment
from bench.methods import build_variants, with_models
from bench.runner import Session, run
from retrain.errors import UsageError
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
    (one, _), (three, _) = (session.scorers(v, 1, 1.0)[0] for v in (session.variants[0], session.variants[2]))
    plans = session.plans(1, 1.0)
    members = [member.predictions(plans)[0] for member in three.members]
    mean = three.predictions(plans)[0]
    np.testing.assert_allclose(mean.raw, np.mean([m.raw for m in members], axis=0), rtol=1e-5)
    np.testing.assert_allclose(mean.normalised, np.mean([m.normalised for m in members], axis=0), rtol=1e-5)
    np.testing.assert_array_equal(one.predictions(plans)[0].raw, members[0].raw)
    assert not np.allclose(members[0].raw, members[1].raw)

    record = result.save(place / "runs")
    again = run(read_experiment(record), execution(place))
    assert list(again.frame()["label"]) == list(frame["label"])
    assert list(again.frame()["lds"]) == list(frame["lds"])


def test_one_model_is_asked_for_as_before(place: Path) -> None:
    plain, one = (Session(asked(**options), execution(place)) for options in ({}, {"checkpoints": (1,)}))
    scorers = [session.scorer(session.variants[0], 1, 1.0) for session in (plain, one)]
    assert scorers[0].config == scorers[1].config
    assert "checkpoint_number" not in scorers[0].config


def test_labels_and_refusals() -> None:
    task = load_task("digits")
    variants = build_variants(["ekfac", "ekfac@damping=1e-4"], task, {}, "default")
    labels = [variant.label for variant in with_models(variants, (1, 5))]
    assert labels == ["ekfac", "ekfac@models=5", "ekfac@damping=0.0001", "ekfac@damping=0.0001,models=5"]
    with pytest.raises(UsageError, match="checkpoints is 0"):
        asked(checkpoints=(0,))


def test_a_replayed_ground_truth_is_exact(place: Path) -> None:
    """Twice the same bits, a ceiling of one, and magic near it on a training that is smooth."""
    options = {
        "task_options": {**SMALL, "learning_rate": 0.1},
        "alpha": (0.9,),
        "initialisation": "replayed",
        "methods": ("magic", "random"),
    }
    experiment = Experiment(task="smooth_digits", subsets=12, queries=5, **options)
    frame = run(experiment, execution(place)).frame()
    assert (frame["ceiling"] == 1.0).all()
    assert (frame["num_replicates"] == 1).all()
    lds = frame[~frame["normalised"]].set_index("label")["lds"]
    assert lds["magic"] > 0.85 > lds["random"]


def test_what_is_asked_for_is_no_default() -> None:
    task = load_task("digits", **SMALL)
    variants = with_models(build_variants(["gradsim", "ekfac@damping=0.1"], task, {}, "default"), (1, 2))
    origins = [variant.origin for variant in variants]
    assert origins == ["default", "as asked", "as asked", "as asked"]
    tuned = with_models([replace(variants[0], origin="tuned")], (1, 2))
    assert [variant.origin for variant in tuned] == ["tuned", "tuned, changed"]


def test_a_method_s_own_further_models_cost_their_training_whoever_trained_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import scoring

    plain = scoring.model_of

    def slow(*args):
        model, entry = plain(*args)
        entry.record["seconds"] = 1000.0
        return model, entry

    monkeypatch.setattr("bench.scoring.model_of", slow)
    methods = ("trak@checkpoints=3,projection=128", "trak@checkpoints=3,projection=150")
    frame = run(asked(methods=methods), execution(tmp_path)).frame()
    raw = frame[~frame["normalised"] & (frame["method"] == "trak")]
    assert raw["fit_seconds"].between(2000, 2100).all(), "the first to ask and the second alike"
    assert (raw["score_seconds"] < 100).all(), "and once"
