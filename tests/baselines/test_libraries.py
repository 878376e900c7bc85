"""Our own kernels against dattri's implementations of the same methods, at equal labels and damping.

kronfluence's EK-FAC is held against kfac in test_kfac.py, traker's dense projections and kernel in test_methods.py.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from baselines.method import Problem, load_method
from baselines.support.dattri_task import dattri_loader, dattri_task, without_bars
from retrain.losses import CrossEntropy
from tests.baselines.test_kfac import classification
from tests.baselines.test_methods import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("dattri") is None, reason="pip install dattri")
NUM_TRAIN = 80


class OwnLabels(CrossEntropy):
    """Draws the training examples' own labels, as dattri's Fisher information has them."""

    targets: Tensor

    def sample_targets(self, outputs: Tensor) -> Tensor:
        assert len(outputs) == len(self.targets), "the whole training set is one batch"
        return self.targets


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    """Without biases: dattri's EK-FAC joins a bias to its weight in another order than its factors have."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 12, bias=False), nn.Tanh(), nn.Linear(12, 3, bias=False)]
    return classification(*layers, tmp_path=tmp_path, num_train=NUM_TRAIN)


def whole(problem: Problem) -> tuple[Any, Any]:
    return dattri_loader(problem.train, NUM_TRAIN), dattri_loader(problem.queries, len(problem.queries))


def by_ekfac(problem: Problem, patch: pytest.MonkeyPatch) -> Tensor:
    """With eigenvectors in rows, as its formulas read them: torch.linalg.eigh gives it columns (dattri 0.3.0)."""
    import dattri.func.fisher as fisher
    from dattri.algorithm.influence_function import IFAttributorEKFAC

    columns = fisher.estimate_eigenvector
    rows = lambda moments: {name: (a.T, s.T) for name, (a, s) in columns(moments).items()}  # noqa: E731
    patch.setattr(fisher, "estimate_eigenvector", rows)
    attributor = IFAttributorEKFAC(dattri_task(problem), damping=0.01)
    train, queries = whole(problem)
    attributor.cache(train)
    return attributor.attribute(train, queries)


def by_tracin(problem: Problem, patch: pytest.MonkeyPatch) -> Tensor:
    from dattri.algorithm import TracInAttributor

    one_step = {"weight_list": torch.tensor([1.0]), "normalized_grad": False}
    attributor = TracInAttributor(dattri_task(problem, single=True), **one_step)
    attributor.projector_kwargs = None
    return attributor.attribute(*whole(problem))


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("kfac", {"damping": 0.01, "fit_batch_size": NUM_TRAIN}, by_ekfac),
        ("gradsim", {}, by_tracin),
    ],
)
def test_scores_are_dattris(
    name: str, options: dict, theirs: Callable, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = OwnLabels()
    loss.targets = problem.train.targets
    problem.task.loss_function = loss  # type: ignore[misc]
    with without_bars():
        expected = -theirs(problem, monkeypatch).detach().T
    found = run(load_method(name, **options), problem).scores
    assert spearmanr(found.flatten(), expected.flatten()).statistic > 0.999
    ratio = (found * expected).sum() / expected.square().sum()
    torch.testing.assert_close(found, ratio * expected, rtol=0.02, atol=0.01 * float(found.abs().max()))
