"""--reference: methods look at models like those that are asked about, which saw nothing of what is reported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baselines.gradsim import GradSim
from baselines.method import Problem, load_method
from bench import Execution, Experiment, read_experiment, run
from bench.runner import Session, dry_run
from bench.scoring import problem_of
from retrain import subsets
from retrain.errors import UsageError
from retrain.reference import ATTRIBUTED, STREAM, SUBSET, Reference, train_reference
from retrain.store import Store
from retrain.tasks import load_task
from retrain.units import Plan, retrain_units

EXACT = "retrain.logistic:LogisticDigits"  # its training has no noise, and its order plays no part
METHODS = ("kfac", "trak", "gradsim", "bif@draws=20,chains=2,minibatch=32,gamma=100,step_size=1e-3,n_beta=10")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def execution(tmp_path_factory: pytest.TempPathFactory) -> Execution:
    return Execution(device="cpu", cache=str(tmp_path_factory.mktemp("reference")), progress=False)


def asked(**changes: Any) -> Experiment:
    usual = {"task": EXACT, "alpha": 0.3, "subsets": 30, "replicates": 1, "methods": METHODS}
    return Experiment(**{**usual, **changes})


def scores(experiment: Experiment, execution: Execution) -> dict[str, np.ndarray]:
    session = Session(experiment, execution)
    found = {one.label: session.scorer(one, *session.blocks[0]).stored_scores() for one in session.active}
    return {label: one.scores.numpy() for label, one in found.items() if one is not None}


def test_trained_exactly_on_everything_the_attributed_model_is_the_base_model(execution: Execution) -> None:
    """The same scores from every method, TRAK's kernel of its own examples included."""
    base, same = asked(), asked(reference=ATTRIBUTED)
    for experiment in (base, same):
        assert run(experiment, execution).problems == []
    for label, found in scores(base, execution).items():
        np.testing.assert_allclose(found, scores(same, execution)[label], rtol=1e-4, atol=1e-5 * np.abs(found).max())


def test_a_subset_model_is_looked_at_with_its_own_examples_and_paid_for(execution: Execution, tmp_path: Path) -> None:
    experiment = asked(reference=SUBSET, checkpoints=(1, 3))
    assert "reference models that methods look at: 0 of 3 trained" in dry_run(experiment, execution)
    result = run(experiment, execution)
    assert result.problems == []
    frame = result.frame().set_index(["label", "normalised"])
    assert frame.lds["kfac@models=3", False] > frame.lds["kfac", False] - 0.02
    assert frame.settings["kfac@models=3", False] == "models=3,reference=subset"
    assert frame.settings["same_class", False] == "", "it looks at no model, and pays for none"
    assert "reference=subset" in str(result)
    session = Session(experiment, execution)
    variant = next(one for one in session.active if one.label == "gradsim@models=3")
    ((ensemble, plans),) = session.scorers(variant, *session.blocks[0])
    seconds = [member.checkpoint.record["seconds"] for member in ensemble.members]
    assert ensemble.predictions(plans)[0].record["fit_seconds"] >= sum(seconds) > 0
    # By hand: the model of further subset 2, and GradSim at it.
    member, task = ensemble.members[2], session.task
    kept = subsets.mask(1, 2, 0.3, len(task.train_data), "fixed", STREAM)
    model = task.train(np.flatnonzero(kept), init_seed=1, order_seed=0, device=CPU)
    for name, value in member.model.state_dict().items():
        np.testing.assert_allclose(value, model.state_dict()[name], atol=1e-5)
    problem = problem_of(member.question, model, session.store, "cpu", tmp_path)
    assert len(problem.train) == kept.sum()
    assert np.array_equal(problem.own_examples(), kept)
    found, by_hand = member.stored_scores().scores, GradSim().score(replace(problem, model=model), None).scores
    np.testing.assert_allclose(found, by_hand, rtol=1e-3, atol=1e-3 * float(by_hand.abs().max()))
    again = run(read_experiment(result.save(tmp_path / "runs")), execution)
    assert again.run_id == result.run_id


def test_a_reference_model_never_saw_a_reported_subset_s_stream(
    execution: Execution, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task, plan = load_task("digits"), Plan(alpha=0.1, alpha_attribution=1.0, seed=1, num_subsets=100, scheme="balanced")
    reference = Reference.like(SUBSET, plan)
    own = [reference.kept(task, number) for number in range(20)]
    for stream in ("report", "tune"):
        judged = {mask.tobytes() for mask in replace(plan, stream=stream).masks(task)}  # type: ignore[arg-type]
        assert not judged & {mask.tobytes() for mask in own}
    learnt = replace(plan, stream="learn").masks(task)
    assert np.array_equal(own, learnt[:20]), "a datamodel's retrains are the same models"
    drawn: list[str] = []
    true_mask = subsets.mask
    monkeypatch.setattr(subsets, "mask", lambda *given: drawn.append(given[5]) or true_mask(*given))
    small = load_task(EXACT)
    for kind in (SUBSET, ATTRIBUTED):
        unit = Reference.like(kind, replace(plan, alpha=0.3)).unit(small, 0, "cpu")
        train_reference(Store(tmp_path / kind), unit)
    assert set(drawn) == {STREAM}


def test_each_alpha_has_its_own_and_full_has_the_keys_it_had(execution: Execution) -> None:
    session = Session(asked(alpha=(0.3, 0.5), reference=SUBSET, methods=("kfac", "random")), execution)
    kfac, random = ([one for one, _ in session.scorers(v, 1, 1.0)] for v in session.active)
    assert [one.question.reference.alpha for one in kfac] == [0.3, 0.5]
    assert [one.question.reference for one in random] == [None]
    of_attributed = Session(asked(alpha=(0.3, 0.5), reference=ATTRIBUTED, methods=("kfac",)), execution)
    assert len(of_attributed.scorers(of_attributed.active[0], 1, 1.0)) == 1
    plain = Session(asked(methods=("kfac",)), execution)
    scorer = plain.scorer(plain.active[0], 1, 1.0)
    for config in (scorer.config, scorer.fit_config, plain.active[0].describe()):
        assert "reference" not in config
    assert "reference" not in run(asked(methods=("gradsim",)), execution).config()


def test_a_datamodel_around_one_of_its_own_retrains_pays_for_it_once(execution: Execution) -> None:
    methods = ("datamodel@retrains=20,prior=gradsim", "datamodel@retrains=20", "gradsim")
    result = run(asked(reference=SUBSET, methods=methods), execution)
    assert result.problems == []
    fits = result.frame().set_index(["label", "normalised"]).fit_seconds[:, False]
    around, alone, _ = (fits[label] for label in methods)
    plan = Plan(alpha=0.3, alpha_attribution=1.0, seed=1, num_subsets=20, stream="learn")
    units, store = retrain_units(load_task(EXACT), plan, "cpu"), Store(execution.cache)
    least = min(store.read(unit.kind, unit.config).record["seconds"] for unit in units)  # type: ignore[union-attr]
    assert around < alone + max(least, 0.05)


def test_trak_s_kernel_is_of_the_model_s_own_examples(tmp_path: Path) -> None:
    """Fewer own examples than projected dimensions, and more: the same formula."""
    task = load_task(EXACT)
    trained = np.arange(0, 300, 3)
    model = task.train(trained, init_seed=1, order_seed=0, device=CPU)
    answers = {}
    for projection in (64, 160):
        problem = Problem(
            task=task, model=model, train=task.train_data.select(trained), attributed_indices=np.arange(300),
            queries=task.query_data.select(range(6)), seed=0, device=CPU, scratch=tmp_path / str(projection),
            pool=task.train_data, trained_on=lambda further: trained,
        )  # fmt: skip
        method = load_method("trak", projection=projection, relative_ridge=0.1)
        state = method.fit(problem)
        state.traker.saver.load_current_store(0)
        store = state.traker.saver.current_store
        grads, features = (np.array(store[name], dtype=np.float64) for name in ("grads", "features"))
        kernel = grads[trained].T @ grads[trained] + state.kernels[0]["ridge"] * np.eye(grads.shape[1])
        expected = grads @ np.linalg.inv(kernel)
        correlation = np.corrcoef(expected.ravel(), features.ravel())[0, 1]
        assert correlation > 0.9999
        answers[projection] = method.score(problem, state).scores
    assert all(one.shape == (6, 300) for one in answers.values())


def test_a_variant_names_its_own_models(execution: Execution) -> None:
    """One run compares models: the rows are those of runs of their own, and the differences are paired."""
    own = ["gradsim", "gradsim@reference=subset,models=3"]
    own += ["datamodel@retrains=20,prior=gradsim,reference=subset,models=3"]
    result = run(asked(methods=own), execution)
    assert result.problems == []
    frame, apart = result.frame().set_index(["label", "normalised"]), {}
    for reference, models in (("full", 1), ("subset", 3)):
        alone = run(asked(methods=("gradsim",), reference=reference, checkpoints=(models,)), execution).frame()
        apart[reference] = alone.set_index("normalised").query("method == 'gradsim'")
    assert frame.lds[own[0], False] == apart["full"].lds[False]
    assert frame.lds[own[1], False] == apart["subset"].lds[False]
    assert frame.settings[own[1], False] == "models=3,reference=subset"
    assert (own[0], own[1]) in set(zip(result.pairs().label, result.pairs().against, strict=True))
    again = run(Experiment(**{**result.experiment.to_json(), "methods": result.config()["methods"]}), execution)
    assert again.frame().lds.tolist() == result.frame().lds.tolist()
    for wrong, words in (("gradsim@reference=all", "reference"), ("gradsim@models=0", "models")):
        with pytest.raises(UsageError, match=words):
            Session(asked(methods=(wrong,)), execution)


def test_a_prior_is_the_mean_of_its_models(execution: Execution, tmp_path: Path) -> None:
    session = Session(asked(reference=SUBSET, methods=("datamodel@retrains=20,prior=gradsim,models=2",)), execution)
    scorer = session.scorer(session.active[0], *session.blocks[0])
    problem = problem_of(scorer.question, scorer.model, session.store, "cpu", tmp_path)
    given, _ = scorer.method._prior(problem)  # type: ignore[attr-defined]
    each = [problem.scores_of(GradSim(), further=number).scores for number in (0, 1)]
    torch.testing.assert_close(given["raw"], (each[0] + each[1]) / 2)
    assert not torch.equal(each[0], each[1])
