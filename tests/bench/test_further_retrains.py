"""A method that retrains by itself: in the store, never on what is reported, counted in its seconds, resumed."""

import re
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
    result = run(small(methods=["datamodel@retrains=30", PRIOR, "gradsim"]), execution)
    assert result.problems == []
    lds = result.frame().set_index(["label", "normalised"])["lds"]
    assert lds[PRIOR, False] > lds["datamodel@retrains=30", False]
    assert "prior=gradsim" in str(result)
    again = run(read_experiment(result.save(tmp_path / "runs")), execution)
    assert again.run_id == result.run_id


def test_retrains_are_shared_and_of_a_stream_of_their_own(execution: Execution) -> None:
    text = dry_run(small(), execution)
    assert "further retrains that methods ask for: 0 of 30 cached" in text
    run(small(), execution)
    store = Store(execution.cache)
    assert all(store.has(unit.kind, unit.config) for unit in units(0.5, 30, "learn"))
    assert not any(store.has(unit.kind, unit.config) for unit in units(0.5, 31, "learn")[30:])


def test_what_takes_long_unasked_is_said_before_it_starts(execution: Execution) -> None:
    text = dry_run(small(task="digits", methods=["datamodel@retrains=30"]), execution)
    assert re.search(r"about .* to retrain 42 models, 30 of them for datamodel@retrains=30 alone, 1 at once", text)


def test_methods_of_a_run_read_a_retrain_once_and_every_change_of_it(
    execution: Execution, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    inner = Store.read
    monkeypatch.setattr(
        Store, "read", lambda store, kind, config: read.append(store.key(kind, config)) or inner(store, kind, config)
    )
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
    again = recent.read(store, many[0])
    assert again is not None
    assert again.arrays["losses"][0] == 1


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
    spent = sum(entry.record["seconds"] for unit in units(0.5, 30, "learn") if (entry := store.read(*key(unit))))
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
        assert problem.scores_of is not None
        start = time.perf_counter()
        answers = [problem.scores_of(method, of_train=of_train) for of_train in (False, True)]
        billed = problem.bill.seconds + time.perf_counter() - start
        assert [tuple(answer.scores.shape) for answer in answers] == [(20, 200), (200, 200)]
        assert 1.0 < billed < 1.9, f"cached: {cached}"


def key(unit: object) -> tuple[str, dict]:
    return unit.kind, unit.config  # type: ignore[attr-defined]


def test_every_alpha_has_scores_of_its_own_unless_one_is_named(execution: Execution) -> None:
    asked = small(
        alpha=[0.3, 0.5], methods=["datamodel@retrains=30", "named=datamodel@retrains=30,alpha=0.4", "gradsim"]
    )
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


def test_a_prior_that_fails_is_one_line(execution: Execution) -> None:
    result = run(small(methods=["datamodel@prior=bif+step_size:1e9+draws:10,retrains=30", "gradsim"]), execution)
    assert len(result.problems) == 1
    assert "datamodel@prior=bif" in result.problems[0]
    assert set(result.frame()["method"]) == {"gradsim"}


@pytest.mark.parametrize(
    ("told", "seconds"),
    [([(3.0, True), (0.1, False), (0.3, False), (0.2, False)], 0.8), ([(3.0, True)], 3.0), ([(0.1, None)], 0.1)],
)
def test_the_start_of_a_process_is_no_second_of_a_method(told: list[tuple[float, bool | None]], seconds: float) -> None:
    records = [{"seconds": value} | ({} if first is None else {"first": first}) for value, first in told]
    assert seconds_of(records) == pytest.approx(seconds)


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


@pytest.mark.parametrize("prior", ["", "bif+draws=20"])
def test_a_prior_that_is_no_method_says_how_one_is_spelled(prior: str) -> None:
    with pytest.raises(UsageError, match=r"expected none, a name, or one with options: ekfac\+damping:1e-4"):
        nested_method(prior)
