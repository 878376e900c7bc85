"""What shows that each method is right: its library, used without us, or an exact small case.

What wraps a library gives its scores. Our own kernels give those of dattri's implementations, at equal labels and
damping. `SHOWN_BY` names the test of every method.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from baselines.bm25 import terms_of
from baselines.method import Problem, available_methods, load_method
from baselines.support.dattri_task import dattri_loader, dattri_task, without_bars
from retrain.losses import CrossEntropy
from retrain.tasks import load_task
from tests.baselines.test_kfac import classification
from tests.helpers.problems import problem_of, run

NUM_TRAIN = 80
SHOWN_BY = {
    "arnoldi": "test_libraries.py::test_what_wraps_a_library_gives_its_scores",
    "astra": "test_curvature.py::test_products_by_gradients_lead_to_the_exact_solve_as_well",
    "bif": "test_bif_exact.py::test_linear_regression",
    "bif_cv": "test_bif.py::test_the_control_variate_is_far_closer_with_few_draws",
    "bif_devinterp": "test_bif_devinterp.py::test_the_steps_are_the_same_to_rounding",
    "bif_gaussian": "test_bif_gaussian.py::test_a_quadratic_loss_in_closed_form",
    "bm25": "test_libraries.py::test_what_wraps_a_library_gives_its_scores",
    "datainf": "test_libraries.py::test_what_wraps_a_library_gives_its_scores",
    "datamodel": "test_datamodel.py::test_it_finds_the_planted_weights",
    "daunce": "test_daunce.py::test_least_squares_in_closed_form",
    "ekfac": "test_libraries.py::test_what_wraps_a_library_gives_its_scores",
    "ekfac_cg": "test_curvature.py::test_iterations_lead_from_kfac_to_the_exact_solve",
    "gradsim": "test_libraries.py::test_our_kernels_give_dattris_scores",
    "if_cg": "test_libraries.py::test_what_wraps_a_library_gives_its_scores",
    "kfac": "test_kfac.py::test_it_is_kronfluences_ekfac",
    "logra": "test_libraries.py::test_our_kernels_give_dattris_scores",
    "magic": "test_magic.py::test_it_is_the_slope_of_the_retrained_loss",
    "random": "test_methods.py::test_random_scores_differ_between_seeds_and_examples",
    "repsim": "test_controls.py::test_it_is_the_cosine_of_what_the_head_reads",
    "same_class": "test_controls.py::test_same_class_knows_the_labels_and_nothing_else",
    "shampoo": "test_kfac.py::test_linear_regression_is_exact",
    "source": "test_source.py::test_it_is_its_formula_in_dense_matrices",
    "tracin": "test_dattri.py::test_tracin_follows_the_training_and_shares_nothing",
    "trackstar": "test_logra.py::test_trackstar_is_the_same_on_gradients_in_units_of_their_size",
    "trak": "test_libraries.py::test_what_wraps_a_library_gives_its_scores",
}


def test_every_method_is_shown_to_be_right_by_a_test() -> None:
    assert set(SHOWN_BY) == set(available_methods())
    for place in SHOWN_BY.values():
        file, name = place.split("::")
        assert f"def {name}(" in Path(__file__).with_name(file).read_text(), f"{place} is gone; name its successor"


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
    made = classification(*layers, tmp_path=tmp_path, num_train=NUM_TRAIN)
    loss = OwnLabels()
    loss.targets = made.train.targets
    made.task.loss_function = loss  # type: ignore[misc]
    return made


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """But for their unit: dattri's mean, traker's size of the kernel."""
    assert spearmanr(found.flatten(), expected.flatten()).statistic > 0.999
    ratio = (found * expected).sum() / expected.square().sum()
    torch.testing.assert_close(found, ratio * expected, rtol=0.02, atol=0.01 * float(found.abs().max()))


# ---- what wraps a library ----
def whole(problem: Problem) -> tuple[Any, Any]:
    return dattri_loader(problem.train, len(problem.train)), dattri_loader(problem.queries, len(problem.queries))


def by_dattri(kind: str, **options: Any) -> Callable[[Problem], Tensor]:
    """Scores of an attributor as dattri's own `cache` and `attribute` give them."""

    def scores(problem: Problem) -> Tensor:
        algorithm = pytest.importorskip("dattri.algorithm")
        attributor = getattr(algorithm, kind)(dattri_task(problem), **options)
        train, queries = whole(problem)
        attributor.cache(train)
        return -attributor.attribute(train, queries).detach().T

    return scores


def by_kronfluence(problem: Problem) -> Tensor:
    """Its Analyzer, with a task as its documentation writes one."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from torch.utils.data import TensorDataset

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            inputs, targets = batch
            return nn.functional.cross_entropy(model(inputs), targets, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    train, queries = (TensorDataset(e.inputs, e.targets) for e in (problem.train, problem.queries))
    task = Classification()
    layers = nn.Sequential(*copy.deepcopy(list(problem.model)))  # type: ignore[call-overload]
    folder = {"output_dir": str(problem.scratch / "analyzer"), "disable_tqdm": True}
    analyzer = Analyzer("direct", prepare_model(layers, task), task, cpu=True, **folder)
    analyzer.fit_all_factors("f", train, per_device_batch_size=NUM_TRAIN, factor_args=FactorArguments("ekfac"))
    asked = {"per_device_query_batch_size": len(queries), "score_args": ScoreArguments(damping_factor=0.01)}
    analyzer.compute_pairwise_scores("s", "f", queries, train, **asked)
    return -analyzer.load_pairwise_scores("s")["all_modules"]


def by_traker(problem: Problem) -> Tensor:
    """TRAKer with its own gradients, kernel and image classification, and a projector of the method's seed."""
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    def projector() -> BasicProjector:
        size = sum(parameter.numel() for parameter in problem.model.parameters())
        return BasicProjector(size, 20, problem.seed, ProjectionType.normal, torch.device("cpu"))

    options = {"device": "cpu", "projector": projector(), "proj_dim": 20, "use_half_precision": False}
    folder = str(problem.scratch / "traker")
    traker = TRAKer(problem.model, "image_classification", NUM_TRAIN, save_dir=folder, **options)
    weights = problem.model.state_dict()
    traker.load_checkpoint(weights, model_id=0)
    traker.featurize((problem.train.inputs, problem.train.targets), num_samples=NUM_TRAIN)
    traker.finalize_features()
    traker.projector = projector()  # it has freed the other one
    queries = (problem.queries.inputs, problem.queries.targets)
    traker.start_scoring_checkpoint("queries", weights, model_id=0, num_targets=len(problem.queries))
    traker.score(queries, num_samples=len(problem.queries))
    slope = 1 - problem.model(queries[0]).softmax(-1).gather(1, queries[1][:, None])  # the loss falls as f rises
    return -slope.detach() * torch.from_numpy(np.array(traker.finalize_scores("queries"))).T


def by_rank_bm25(problem: Problem) -> Tensor:
    """Whole queries at once."""
    rank_bm25 = pytest.importorskip("rank_bm25")
    corpus = rank_bm25.BM25Okapi(terms_of(problem.train, 2))
    return -torch.tensor(np.array([corpus.get_scores(terms) for terms in terms_of(problem.queries, 2)])).float()


@pytest.fixture
def language(tmp_path: Path) -> Problem:
    task: Any = load_task("tinylm", num_train=40, num_queries=6, length=12, hidden=8, layers=1, pretraining_steps=3)
    return problem_of(task, tmp_path, task.build_model(0).eval())


@pytest.mark.parametrize(
    ("name", "options", "theirs", "asked"),
    [
        ("arnoldi", {"damping": 1.0, "projection": 30, "iterations": 30},
         by_dattri("IFAttributorArnoldi", regularization=1.0, proj_dim=30, max_iter=30, seed=3), "problem"),
        ("bm25", {"ngram": 2}, by_rank_bm25, "language"),
        ("datainf", {"damping": 0.1}, by_dattri("IFAttributorDataInf", regularization=0.1), "problem"),
        ("ekfac", {"damping": 0.01, "fit_batch_size": NUM_TRAIN}, by_kronfluence, "problem"),
        ("if_cg", {"damping": 1.0}, by_dattri("IFAttributorCG", regularization=1.0, max_iter=10), "problem"),
        ("trak", {"projector": "dense", "projection": 20, "ridge": 0.0}, by_traker, "problem"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_wraps_a_library_gives_its_scores(name, options, theirs, asked, request) -> None:
    question: Problem = request.getfixturevalue(asked)
    with without_bars():
        expected = theirs(question)
    assert_alike(run(load_method(name, **options), question).scores, expected)


# ---- our own kernels ----
def by_dattris_ekfac(problem: Problem, patch: pytest.MonkeyPatch) -> Tensor:
    """With eigenvectors in rows, as its formulas read them: torch.linalg.eigh gives it columns (dattri 0.3.0)."""
    import dattri.func.fisher as fisher

    columns = fisher.estimate_eigenvector
    rows = lambda moments: {name: (a.T, s.T) for name, (a, s) in columns(moments).items()}  # noqa: E731
    patch.setattr(fisher, "estimate_eigenvector", rows)
    return by_dattri("IFAttributorEKFAC", damping=0.01)(problem)


def by_dattris_logra(problem: Problem) -> Tensor:
    """With our projections in place of its random ones. Its own set-up takes one flat input for a batch (0.3.0)."""
    from dattri.algorithm.block_projected_if.core.compressor import setup_model_compressors
    from dattri.algorithm.logra import LoGraAttributor
    from dattri.task import AttributionTask

    def mean_loss(model: nn.Module, batch: Any, device: str) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs), targets)

    layers = nn.Sequential(*copy.deepcopy(list(problem.model)))  # type: ignore[call-overload]
    attributor = LoGraAttributor(
        AttributionTask(mean_loss, layers, [layers.state_dict()]), damping=0.1, proj_dim=16, offload="none",
        cache_dir=str(problem.scratch),
    )  # fmt: skip
    train, queries = whole(problem)
    chosen = (attributor.layer_names, attributor.sparsifier_kwargs, attributor.projector_kwargs)
    attributor.compressors = setup_model_compressors(attributor.model, *chosen, (problem.train.inputs,))
    bases = load_method("logra", side=4)._rows(problem).bases  # type: ignore[attr-defined]
    for compressor, basis in zip(attributor.compressors, bases, strict=True):
        compressor.sparsifier.sparsifier_comp = tuple(
            lambda rows, ensemble_id, side=side: rows if side is None else rows @ side for side in basis
        )
        compressor.projector.projector = lambda rows, ensemble_id: rows
    with torch.compiler.set_stance("force_eager"):
        attributor.cache(train)
        return -attributor.attribute(train, queries).T


def test_our_kernels_give_dattris_scores(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = pytest.importorskip("dattri.algorithm")
    one_step = {"weight_list": torch.tensor([1.0]), "normalized_grad": False}
    with without_bars():
        attributor = algorithm.TracInAttributor(dattri_task(problem, single=True), **one_step)
        attributor.projector_kwargs = None
        inner_products = -attributor.attribute(*whole(problem)).T
        logra, ekfac = by_dattris_logra(problem), by_dattris_ekfac(problem, monkeypatch)
    assert_alike(run(load_method("gradsim"), problem).scores, inner_products)
    assert_alike(run(load_method("logra", relative_damping=0.1, side=4), problem).scores, logra)
    assert_alike(run(load_method("kfac", damping=0.01, fit_batch_size=NUM_TRAIN), problem).scores, ekfac)
