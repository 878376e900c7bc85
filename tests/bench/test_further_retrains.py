"""A method that retrains by itself: in the store, never on what is reported, counted in its seconds, resumed."""

import time
from pathlib import Path

import numpy as np
import pytest

from baselines.kfac import KFAC
from baselines.method import Problem, load_method
from baselines.support.nested import nested_method
from bench import Execution, Experiment, read_experiment, run
from bench.ground_truth import RecentlyRead, base_model, seconds_of
from bench.methods import build_variants
from bench.runner import Session, dry_run
from bench.scoring import problem_of
from retrain.errors import UsageError
from retrain.store import Store
from retrain.tasks import load_task
from retrain.units import Plan, retrain_units
from tests.helpers.planted import Planted

PLANTED = "tests.helpers.planted:Planted"
PRIOR = "datamodel@prior=gradsim,retrains=30"


def small(**changes: object) -> Experiment:
    asked = {"task": PLANTED, "alpha": 0.5, "subsets": 12, "replicates": 1, "methods": ["datamodel@retrains=30", PRIOR]}
    return Experiment(**{**asked, **changes})  # type: ignore[arg-type]


def stored(execution: Execution) -> list[np.ndarray]:
    session = Session(small(), execution)
    found = [session.scorer(one, *session.blocks[0]).stored_scores() for one in session.active]
    return [attribution.scores.numpy() for attribution in found if attribution is not None]


def units(alpha: float, count: int, stream: str) -> list:
    plan = Plan(alpha=alpha, alpha_attribution=1.0, seed=1, num_subsets=count, stream=stream)  # type: ignore[arg-type]
    return retrain_units(load_task(PLANTED), plan, "cpu")


def test_a_run_has_rows_of_it_and_its_record_is_the_same_run_again(execution: Execution, tmp_path: Path) -> None:
    asked = small(methods=["datamodel@retrains=30", PRIOR, "gradsim"])
    assert "further retrains that methods ask for: 0 of 30 cached" in dry_run(asked, execution)
    result = run(asked, execution)
    assert result.problems == []
    lds = result.frame().set_index(["label", "normalised"])["lds"]
    assert lds[PRIOR, False] > lds["datamodel@retrains=30", False]
    assert "prior=gradsim" in str(result)
    again = run(read_experiment(result.save(tmp_path / "runs")), execution)
    assert again.run_id == result.run_id
    store, shared = Store(execution.cache), units(0.5, 31, "learn")
    assert [store.has(unit.kind, unit.config) for unit in shared] == [True] * 30 + [False], "a stream of their own"
    text = dry_run(small(task="digits", methods=["datamodel@retrains=30"]), execution)
    assert "retrain 42 models, 30 of them for datamodel@retrains=30 alone" in text


def test_methods_of_a_run_read_a_retrain_once_and_every_change_of_it(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    inner = Store.read
    monkeypatch.setattr(Store, "read", lambda store, *what: read.append(store.key(*what)) or inner(store, *what))
    few, many = units(0.5, 20, "learn"), units(0.5, 30, "learn")
    run(small(methods=["datamodel@retrains=20", "datamodel@retrains=30", PRIOR]), execution)
    assert [read.count(unit.key) for unit in many] == [1] * 30
    assert [unit.key for unit in few] == [unit.key for unit in many[:20]]
    recent, store = RecentlyRead(250), Store(execution.cache)  # room for two: 25 queries, four bytes each
    found = [recent.read(store, unit) for unit in many[:4]]
    assert recent.num_bytes == 200
    assert recent.read(store, many[3]) is found[3]
    assert recent.read(store, many[0]) is not found[0]
    store.remove_key(many[0].kind, many[0].key)
    assert recent.read(store, many[0]) is None
    store.write(many[0].kind, many[0].config, {"losses": np.ones(25, dtype=np.float32)}, {})
    assert recent.read(store, many[0]).arrays["losses"][0] == 1


def test_poisoned_reported_subsets_change_no_score(execution: Execution) -> None:
    """Whatever the reported and tuning subsets had come to, the scores are the same bits."""
    run(small(), execution)
    before = stored(execution)
    store = Store(execution.cache)

    def poison(stream: str, count: int) -> None:
        for unit in units(0.5, count, stream):
            store.remove_key(unit.kind, store.key(unit.kind, unit.config))
            noise = np.random.default_rng(unit.config["subset"]).normal(size=25).astype(np.float32)
            store.write(unit.kind, unit.config, {"losses": noise}, {})

    again = Execution(**{**vars(execution), "rescore": True})
    poison("report", 12)
    poison("tune", 12)
    poisoned = run(small(), again)
    assert all(np.array_equal(*pair) for pair in zip(stored(execution), before, strict=True))
    assert len(before) == 2
    assert abs(poisoned.frame()["lds"]).max() < 0.3, "they were judged on the poison"
    poison("learn", 30)
    run(small(), again)
    assert not any(np.array_equal(*pair) for pair in zip(stored(execution), before)), "its own are what it learns"


def test_its_seconds_are_those_of_its_retrains_and_prior_whether_cached_or_not(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Planted.train

    def slow(task: Planted, *arguments: object, **options: object) -> object:
        time.sleep(0.02)
        return train(task, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Planted, "train", slow)
    first = run(small(methods=[PRIOR]), execution).frame()
    monkeypatch.setattr(Planted, "train", train)
    again = run(small(methods=[PRIOR]), Execution(**{**vars(execution), "rescore": True})).frame()
    store = Store(execution.cache)
    spent = sum(store.read(unit.kind, unit.config).record["seconds"] for unit in units(0.5, 30, "learn"))
    assert spent > 30 * 0.02
    for frame in (first, again):
        assert frame["fit_seconds"].iloc[0] == pytest.approx(spent, abs=0.2)
        assert 0 < frame["score_seconds"].iloc[0] < 5


def test_a_kept_fit_is_paid_for_once(execution: Execution, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A prior is asked about the queries, and about the training examples as queries."""
    fit = KFAC.fit

    def slow(method: KFAC, problem: Problem) -> object:
        time.sleep(1.0)
        return fit(method, problem)

    monkeypatch.setattr(KFAC, "fit", slow)
    question = Session(small(), execution).question(1, 1.0)
    store, method = Store(execution.cache), load_method("kfac")
    model = base_model(question.task, 1, store, "cpu")[0]
    for cached in (False, True):
        problem = problem_of(question, model, store, "cpu", tmp_path)
        start = time.perf_counter()
        answers = [problem.scores_of(method, of_train=of_train) for of_train in (False, True)]
        billed = problem.bill.seconds + time.perf_counter() - start
        assert [tuple(answer.scores.shape) for answer in answers] == [(20, 200), (200, 200)]
        assert 1.0 < billed < 1.9, f"cached: {cached}"


def test_every_alpha_has_scores_of_its_own_unless_one_is_named(execution: Execution) -> None:
    methods = ["datamodel@retrains=30", "named=datamodel@retrains=30,alpha=0.4", "gradsim"]
    asked = small(alpha=[0.3, 0.5], methods=methods)
    session = Session(asked, execution)
    counts = [len(session.scorers(variant, *session.blocks[0])) for variant in session.active]
    assert counts == [2, 1, 1]
    result = run(asked, execution)
    assert result.problems == []
    assert set(result.frame()["alpha"]) == {0.3, 0.5}
    kept = [line["retrain_alpha"] for line in result.out.diagnostics if line["method"] == "datamodel"]
    assert sorted(kept) == [0.3, 0.4, 0.5]
    alone = run(small(alpha=[0.5], methods=["datamodel@retrains=30"]), execution).frame()
    both = result.frame().query("label == 'datamodel@retrains=30' and alpha == 0.5")
    assert alone["lds"].tolist() == both["lds"].tolist()


def test_the_start_of_a_process_is_no_second_of_a_method() -> None:
    first, later = {"seconds": 3.0, "first": True}, [{"seconds": value, "first": False} for value in (0.1, 0.3, 0.2)]
    assert [seconds_of(told) for told in ([first, *later], [first], [{"seconds": 0.1}])] == pytest.approx([0.8, 3, 0.1])


def test_a_prior_has_the_settings_of_a_row_of_its_own_and_says_whose() -> None:
    task = load_task("digits")
    minibatch = task.method_settings["bif"]["minibatch"]
    for asked, origin, options in (
        ("datamodel@prior=kfac", "as asked; prior tuned", {"kfac"}),
        ("datamodel@prior=bif+draws:20", "as asked; prior tuned, changed", {"draws:20", f"minibatch:{minibatch}"}),
        ("datamodel@prior=random", "as asked", {"random"}),
    ):
        (variant,) = build_variants([asked], task, {})
        assert (variant.label, variant.origin) == (asked, origin)
        assert set(variant.method.prior.split("+")) >= options  # type: ignore[attr-defined]


def test_a_prior_that_fails_is_one_line_and_one_that_is_no_method_is_refused(execution: Execution) -> None:
    result = run(small(methods=["datamodel@prior=bif+step_size:1e9+draws:10,retrains=30", "gradsim"]), execution)
    (problem,) = result.problems
    assert "datamodel@prior=bif" in problem
    assert set(result.frame()["method"]) == {"gradsim"}
    for prior in ("", "bif+draws=20"):
        with pytest.raises(UsageError, match=r"ekfac\+damping:1e-4"):
            nested_method(prior)
