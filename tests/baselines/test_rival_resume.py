"""A killed fit or scoring goes on where it was, to the bits of one that was left alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baselines.method import Method, Problem, load_method
from bench.scoring import run_stage
from retrain.resume import ResumeState
from retrain.tasks import load_task
from tests.baselines.test_methods import make_problem
from tests.helpers.planted import Planted


class Killed(Exception):
    pass


class Eager(ResumeState):
    """Saves whenever it may, and is killed after so many saves."""

    def __init__(self, folder: Path, saves: int):
        super().__init__(folder)
        self.left = saves

    def due(self) -> bool:
        return True

    def save(self, name: str, arrays: Any, record: Any) -> None:
        super().save(name, arrays, record)
        self.left -= 1
        if self.left == 0:
            raise Killed


METHODS = {
    "ekfac": {"fit_batch_size": 3, "query_batch_size": 1, "train_batch_size": 60},
    "kfac": {"fit_batch_size": 20, "batch_size": 15},
    "trak": {"batch_size": 25},
    "gradsim": {"batch_size": 6},
    "bif_gaussian": {"fit_batch_size": 20, "draws": 500, "curve": True},
}


def attempt(method: Method, task: Planted, folder: Path, work: ResumeState | None) -> torch.Tensor:
    scratch = folder / f"scratch-{len(list(folder.iterdir()))}"
    scratch.mkdir(parents=True)
    problem = make_problem(task, scratch, np.arange(0, 60, 2))
    if work is not None:
        problem = Problem(**{**vars(problem), "work": work})
    torch.manual_seed(problem.seed)
    answer = method.score(problem, method.fit(problem))
    assert answer.train_scale is not None
    return torch.cat([answer.scores.flatten(), answer.train_scale])


@pytest.mark.parametrize("name", METHODS)
def test_killed_again_and_again_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    task, method = Planted(num_train=60, num_queries=12), load_method(name, **METHODS[name])
    expected = attempt(method, task, tmp_path, None)
    kills = 0
    while True:
        try:
            found = attempt(method, task, tmp_path, Eager(tmp_path / "work", saves=1))
            break
        except Killed:
            kills += 1
            assert kills < 50, "no attempt gets further than the one before it"
    assert kills >= 3
    assert torch.equal(found, expected)


def test_a_resumed_stage_is_charged_for_what_it_went_on_from(tmp_path: Path) -> None:
    """And for nothing of what it did not."""
    work = ResumeState(tmp_path / "work")
    ResumeState(tmp_path / "work").save("inner_products", {}, {})
    problem = Problem(**{**vars(make_problem(Planted(num_train=20), tmp_path)), "work": work})
    edit = json.loads((tmp_path / "work" / "inner_products.json").read_text()) | {"seconds": 1000.0}
    (tmp_path / "work" / "inner_products.json").write_text(json.dumps(edit))
    _, resumed = run_stage(load_method("gradsim"), problem, lambda: work.load("inner_products"))
    _, fresh = run_stage(load_method("gradsim"), problem, lambda: work.load("something else"))
    assert 1000.0 <= resumed.seconds < 1100.0
    assert fresh.seconds < 100.0


def test_slow_scoring_saves_within_a_row_and_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EK-FAC's calls are cut by the seconds they take: here to one batch each, of queries and of training examples."""
    options = {"fit_batch_size": 30, "query_batch_size": 5, "train_batch_size": 7}
    task, method = Planted(num_train=60, num_queries=12), load_method("ekfac", **options)
    expected = attempt(method, task, tmp_path, None)
    monkeypatch.setattr("baselines.ekfac.SECONDS_TOGETHER", 0.0)
    monkeypatch.setattr("baselines.ekfac.BATCHES_TOGETHER", 1)
    assert torch.equal(attempt(method, task, tmp_path, None), expected)
    kills, states = 0, set[str]()
    while True:
        work = Eager(tmp_path / "work", saves=1)
        try:
            found = attempt(method, task, tmp_path, work)
            break
        except Killed:
            kills += 1
            assert kills < 80, "no attempt gets further than the one before it"
            states |= (work.load("pairwise") or ({}, {}))[0].keys()
    assert states == {"scores", "row", "own"}
    assert kills >= 15, "three batches of queries times five of training examples, and self-influences"
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", METHODS)
def test_damaged_work_counts_as_none(name: str, tmp_path: Path) -> None:
    task, method = Planted(num_train=60, num_queries=12), load_method(name, **METHODS[name])
    expected = attempt(method, task, tmp_path, None)
    with pytest.raises(Killed):
        attempt(method, task, tmp_path, Eager(tmp_path / "work", saves=2))
    for file in (tmp_path / "work").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    assert torch.equal(attempt(method, task, tmp_path, ResumeState(tmp_path / "work")), expected)


def test_on_layers_with_factors(tmp_path: Path) -> None:
    """A network, where the passes of a fit have sides, a basis and sizes to keep."""
    task = load_task("digits", num_train=40, epochs=1, widths=(4, 4))
    model = task.train_base(init_seed=0, order_seed=0, device=torch.device("cpu"))
    for name, options in (("kfac", {"fit_batch_size": 10}), ("ekfac", {"fit_batch_size": 2})):
        method, found = load_method(name, **options), []
        for saves in (1, 3, 6, 10**9):
            problem = Problem(
                task=task, model=model, train=task.train_data, attributed_indices=np.arange(40), seed=1,
                queries=task.query_data.select(range(4)), device=torch.device("cpu"), scratch=tmp_path,
                work=Eager(tmp_path / name / str(saves), saves),
            )  # fmt: skip
            try:
                state = method.fit(problem)
            except Killed:
                state = method.fit(Problem(**{**vars(problem), "work": ResumeState(tmp_path / name / str(saves))}))
            found.append(method.pack_fit(state))
        for other in found[:-1]:
            assert other is not None
            assert found[-1] is not None
            assert other.keys() == found[-1].keys()
            assert all(torch.equal(other[key], found[-1][key]) for key in other)
