"""An Experiment is a value: checked, written into every record, read back from it, and run without a command line."""

import json
from pathlib import Path

import pytest

from bench import Execution, Experiment, load_checkpoint, read_experiment, run, scores
from retrain.errors import UsageError

PLANTED = "tests.helpers.planted:Planted"


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(device="cpu", cache=str(tmp_path / "cache"), progress=False)


def small(**changes: object) -> Experiment:
    asked = {"task": PLANTED, "alpha": 0.5, "subsets": 12, "replicates": 1, "methods": ["gradsim", "random"]}
    return Experiment(**{**asked, **changes})  # type: ignore[arg-type]


def test_a_run_gives_a_frame_and_a_table(execution: Execution) -> None:
    result = run(small(), execution)
    frame = result.frame()
    assert set(frame["method"]) == {"gradsim", "random"}
    assert frame[frame["method"] == "gradsim"]["lds"].min() > 0.3
    assert "gradsim" in str(result)
    assert len(result.pairs()) == 2
    assert frame["run_id"].unique().tolist() == [result.run_id]


def test_a_record_is_the_same_run_again(execution: Execution, tmp_path: Path) -> None:
    first = run(small(methods=["stiff=ekfac@damping=1", "ekfac@damping=1e-4"]), execution)
    path = first.save(tmp_path / "runs", "python -m bench.lds ...")
    again = run(read_experiment(path), execution)
    assert again.run_id == first.run_id
    before = path.read_text()
    again.save(tmp_path / "runs", "another command")
    assert path.read_text() == before, "a cached rerun does not overwrite the first one's command and seconds"
    assert json.loads(before)["commit"] is None or isinstance(json.loads(before)["commit"], str)
    assert len(json.loads(before)["code"]) == 16


def test_other_results_have_other_ids(execution: Execution) -> None:
    ids = {run(small(**changes), execution).run_id for changes in ({}, {"subsets": 13}, {"methods": ["gradsim"]})}
    assert len(ids) == 3


def test_a_toml_file_is_an_experiment(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(
        'task = "digits"\nalpha = [0.1, 0.5]\nseeds = [1, 2]\nmethods = ["ekfac", "stiff=ekfac@damping=1"]\n'
        "[task_options]\nepochs = 2\n[options.ekfac]\nself_influence = false\n"
    )
    assert read_experiment(path) == Experiment(
        task="digits",
        alpha=(0.1, 0.5),
        seeds=(1, 2),
        methods=("ekfac", "stiff=ekfac@damping=1"),
        task_options={"epochs": 2},
        options={"ekfac": {"self_influence": False}},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alhpa = 0.1", 'says "alhpa", which no experiment has'),
        ("alpha = [", "is no TOML"),
        ("alpha = 1.5", "alpha is 1.5; expected a fraction"),
        ('alpha = "x"', "alpha is 'x'"),
        ("seeds = [-1]", "seeds is -1"),
        ("subsets = 2", "at least 3"),
        ("subsets = true", "subsets is true"),
        ('query_split = "test"', "available: tune, report, all"),
        ("methods = []", "at least one method"),
        (f"seeds = [{'9' * 400}]", "seeds is 999"),
        (f"alpha = 0.1{'0' * 400}", ""),
    ],
)
def test_bad_experiments_are_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    if not words:  # absurd numbers are numbers
        assert read_experiment(path).alpha == (0.1,)
        return
    with pytest.raises(UsageError) as error:
        read_experiment(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_scores_and_checkpoints_come_as_arrays_and_models(execution: Execution) -> None:
    found = scores("gradsim", PLANTED, execution=execution)
    assert found.shape == (20, 200)
    assert scores("gradsim", PLANTED, execution=execution, normalised=True).shape == (20, 200)
    model = load_checkpoint(PLANTED, execution=execution)
    assert next(model.parameters()).shape == (1, 4)


def test_fresh_initialisations_are_another_ground_truth(execution: Execution) -> None:
    shared = run(small(task="digits", task_options={"epochs": 1, "num_train": 100}, methods="random"), execution)
    fresh = run(
        small(
            task="digits", task_options={"epochs": 1, "num_train": 100}, methods="random", initialisation="fresh",
            replicates=2,
        ),
        execution,
    )  # fmt: skip
    assert fresh.out.ceilings[0]["initialisation"] == "fresh"
    assert "fresh initialisations" in str(fresh)
    assert shared.out.ceilings[0]["mean_loss"] != fresh.out.ceilings[0]["mean_loss"]
