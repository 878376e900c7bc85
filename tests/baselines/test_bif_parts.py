"""Chains are parts: made anywhere, in any order, killed and taken up again, they give an undisturbed run's bits."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.bif.method import BIF, EXACT_PART
from baselines.bif.saving import Saver
from baselines.method import Attribution, Problem
from retrain.errors import UsageError
from retrain.resume import ResumeState
from tests.helpers.planted import Planted

BASE: dict = {
    "chains": 3, "draws": 9, "burn_in": 2, "thinning": 2, "minibatch": 10, "n_beta": 50.0, "gamma": 5.0,
    "step_size": 0.01,
}  # fmt: skip
VARIANTS: dict[str, dict] = {
    "traces": {},
    "sums": {"draws": 80},
    "sghmc": {"sampler": "sghmc"},
    "rmsprop_sgld": {"sampler": "rmsprop_sgld"},
    "difference": {"gradient": "difference", "centring": "chain"},
    "bfloat16": {"displacement": "bfloat16"},
    "control_variate": {"control_variate": True, "shrinkage": True},
    "control_variate, sums": {"draws": 80, "control_variate": True, "shrinkage": True},
    "kronecker": {"localiser": "kronecker", "control_variate": True},
    "in backward": {},
}


def problem_for(folder: Path) -> Problem:
    task, cpu = Planted(num_train=30, num_queries=20), torch.device("cpu")
    return Problem(
        task=task,
        model=task.train_base(init_seed=0, order_seed=0, device=cpu),
        train=task.train_data,
        attributed_indices=np.arange(25)[::-1].copy(),
        queries=task.query_data,
        seed=3,
        device=cpu,
        scratch=folder,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are those of one number of threads; and on tensors this small one is faster than two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=VARIANTS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BIF:
    if request.param == "in backward":
        monkeypatch.setattr("baselines.bif.engine.STEP_IN_BACKWARD_BYTES", 0)
    return BIF(**{**BASE, **VARIANTS[request.param]})


def assert_equal(one: Attribution, other: Attribution) -> None:
    """To the bit."""
    assert torch.equal(one.scores, other.scores)
    assert one.train_scale is not None
    assert other.train_scale is not None
    assert torch.equal(one.train_scale, other.train_scale)
    assert torch.equal(one.arrays["mean_loss_trace"], other.arrays["mean_loss_trace"])
    assert one.diagnostics == other.diagnostics
    assert one.components.keys() == other.components.keys()


def test_parts_made_apart_give_the_bits_of_one_run(method: BIF, tmp_path: Path) -> None:
    whole = method.score(problem_for(tmp_path), None)
    parts = {}
    for number in reversed(range(method.num_parts())):  # another problem each, and none beside another
        problem = problem_for(tmp_path)
        packed = method.pack_fit(method.fit(problem))
        state = method.fit(problem) if packed is None else method.unpack_fit(problem, packed)
        parts[number] = method.score_part(problem, state, number)
        assert all(value.device.type == "cpu" for value in parts[number].values())
    merged = method.merge(problem_for(tmp_path), None, [parts[number] for number in range(method.num_parts())])
    assert_equal(merged, whole)
    assert whole.diagnostics["streaming"] == (method.draws == 80)


class Killed(Exception):
    pass


class Impatient(ResumeState):
    """Saves every so many draws, and dies after a while: as a kill does, a few draws after the last save."""

    def __init__(self, folder: Path, lives: int, every: int = 1):
        super().__init__(folder)
        self.lives, self.every = lives, every

    def due(self) -> bool:
        self.lives -= 1
        if self.lives == 0:
            raise Killed
        return self.lives % self.every == 1 % self.every


def test_a_killed_chain_goes_on_where_it_was(method: BIF, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where a finished chain is kept too; then, for some, each chain in its own."""
    monkeypatch.setattr("baselines.bif.saving.SAVE_SECONDS", 0.0)  # finished chains are worth saving too
    monkeypatch.setattr("baselines.bif.saving.SHARE_OF_TIME", 1e9)
    undisturbed = method.score(problem_for(tmp_path), None)
    lives, every = (8, 3) if method.draws < 80 else (60, 25)
    kills = 0

    def attempt(number: int | None) -> Attribution | dict:
        nonlocal kills
        while True:
            work = Impatient(tmp_path / f"work-{number}", lives, every)
            problem = replace(problem_for(tmp_path), work=work)
            try:
                return method.score(problem, None) if number is None else method.score_part(problem, None, number)
            except Killed:
                kills += 1
                assert kills < 100, "it never gets further"

    assert_equal(attempt(None), undisturbed)  # type: ignore[arg-type]
    assert kills >= method.chains, "every chain was hit"
    if method.sampler == "sghmc" or method.shrinkage:
        parts = [attempt(number) for number in range(method.num_parts())]
        assert_equal(method.merge(problem_for(tmp_path), None, parts), undisturbed)  # type: ignore[arg-type]


def test_a_state_of_other_settings_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baselines.bif.saving.SHARE_OF_TIME", 1e9)
    problem = replace(problem_for(tmp_path), work=Impatient(tmp_path / "work", 6))
    with pytest.raises(Killed):
        BIF(**BASE).score(problem, None)
    assert problem.work.load("chain-0") is not None
    other = BIF(**{**BASE, "gamma": 6.0})
    again = replace(problem, work=Impatient(tmp_path / "work", -1))
    assert_equal(other.score(again, None), other.score(problem_for(tmp_path), None))


def test_a_state_that_is_too_large_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baselines.bif.saving.LARGEST_STATE_BYTES", 100)
    problem = replace(problem_for(tmp_path), work=Impatient(tmp_path / "work", -1))
    BIF(**BASE).score(problem, None)
    assert not (tmp_path / "work").exists()


def test_saving_takes_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that took s seconds is not repeated before ten times that has passed, due or not."""
    now, saves = [0.0], []
    monkeypatch.setattr("baselines.bif.saving.time.monotonic", lambda: now[0])

    class Slow(ResumeState):
        def due(self) -> bool:
            now[0] += 1.0  # a draw's second
            return True

        def save(self, name, arrays, record) -> None:  # type: ignore[no-untyped-def]
            saves.append(now[0])
            now[0] += 2.0

    BIF(**{**BASE, "chains": 1, "draws": 100}).score(replace(problem_for(tmp_path), work=Slow(tmp_path)), None)
    gaps = np.diff(saves)
    assert len(gaps) >= 3
    assert (gaps >= 22).all()


def test_what_a_saved_state_comes_after_is_saved_with_it(tmp_path: Path) -> None:
    """Or it would be made again, and its seconds, which the state's include, charged twice."""
    work = ResumeState(tmp_path / "work")
    saver = Saver(work, {})
    saver.finished("chain-0", {"losses": torch.ones(2)}, seconds=5.0)
    assert saver.load("chain-0") is None, "five seconds are not worth a file"
    work.due = lambda: True  # type: ignore[method-assign]
    saver.progress("chain-1", 3, lambda: {"losses": torch.zeros(2)})
    finished, under_way = saver.load("chain-0"), saver.load("chain-1")
    assert finished is not None
    assert under_way is not None
    assert (finished[1], under_way[1]) == (None, 3)


def test_a_chain_in_another_process_is_the_same(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, torch; from safetensors.torch import save_file;"
        "from tests.baselines.test_bif_parts import BASE, BIF, problem_for; torch.set_num_threads(1);"
        "folder = pathlib.Path(sys.argv[1]);"
        "part = BIF(**BASE, control_variate=True).score_part(problem_for(folder), None, 2);"
        "save_file({name: value.contiguous() for name, value in part.items()}, folder / 'part.safetensors')"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=root, env=environment, timeout=600)
    from safetensors.torch import load_file

    method = BIF(**BASE, control_variate=True)
    whole = method.score(problem_for(tmp_path), None)
    parts = [method.score_part(problem_for(tmp_path), None, number) for number in range(4)]
    parts[2] = load_file(tmp_path / "part.safetensors")
    assert_equal(method.merge(problem_for(tmp_path), None, parts), whole)


def test_parts_of_different_numbers_are_not_joined(tmp_path: Path) -> None:
    problem = problem_for(tmp_path)
    one, other = BIF(**BASE), BIF(**{**BASE, "n_beta": 60.0})
    parts = [one.score_part(problem, None, 0), other.score_part(problem, None, 1), one.score_part(problem, None, 2)]
    with pytest.raises(UsageError, match=r"chain 1 ran with .*'n_beta': 60"):
        one.merge(problem, None, parts)
    with pytest.raises(ValueError, match="2 parts came; expected 3"):
        one.merge(problem, None, parts[:2])


def test_the_exact_part_is_shown_beside_the_scores(tmp_path: Path) -> None:
    """It is gradsim's answer: what bif_cv adds to it is what its chains sampled."""
    from baselines.gradsim import GradSim

    problem = problem_for(tmp_path)
    answer = BIF(**BASE, control_variate=True).score(problem, None)
    exact = answer.components[EXACT_PART]
    gradsim = GradSim().score(problem, None)
    torch.testing.assert_close(exact.scores, gradsim.scores)
    torch.testing.assert_close(exact.normalised(), gradsim.normalised())
    assert answer.diagnostics["sampled_share"] > 0
    assert BIF(**BASE).score(problem, None).components == {}
