"""kfac and shampoo: exact where their factors decide the Fisher; kfac is kronfluence's EK-FAC at equal settings."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from baselines.gradsim import GradSim
from baselines.kfac import KFAC
from baselines.method import Problem, load_method
from baselines.support.damping import damped
from baselines.support.gradients import PerExampleGradients
from baselines.support.inner_products import inner_products
from baselines.support.pieces import Outer, Piece, Scattered, Whole
from retrain.backends import switched
from retrain.examples import Examples
from retrain.losses import CrossEntropy, SquaredError
from retrain.tasks import load_task
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import CPU, correlation, problem_of, refused, run


def influence(model: nn.Module, function: Any, curvature: torch.Tensor, damping: float, problem: Problem) -> Any:
    """(scores, scale) from the dense matrix, over the weight's numbers and then the bias's."""
    gradients = PerExampleGradients(model, function)
    query, train = (gradients((e.inputs, e.targets)).double() for e in (problem.queries, problem.attributed))
    inverse = torch.linalg.inv(curvature.double() + damping * torch.eye(len(curvature)))
    return -(query @ inverse @ train.T).float(), (train @ inverse * train).sum(1).sqrt().float()


def assert_influence(name: str, problem: Problem, loss: Any, curvature: torch.Tensor, damping: float) -> None:
    expected, scale = influence(problem.model, loss.per_example, curvature, damping, problem)
    answer = run(load_method(name, damping=damping, labels="exact"), problem)
    torch.testing.assert_close(answer.scores, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(answer.train_scale, scale, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "damping"), [("kfac", 1e-6), ("kfac", 0.3), ("shampoo", 0.3)])
def test_linear_regression_is_exact(tmp_path: Path, name: str, damping: float) -> None:
    """One output: the Fisher is E[x x^T], bias included, and labels=exact leaves nothing to chance."""
    task = Planted(num_train=60, num_queries=7)
    problem = make_problem(task, tmp_path)
    inputs = torch.cat([task.train_data.inputs, torch.ones(60, 1)], dim=1)
    assert_influence(name, problem, SquaredError(), inputs.T @ inputs / 60, damping)


class Classifier(nn.Sequential):
    """A plain task's worth of model; its loss is cross-entropy."""

    loss_function = CrossEntropy()


def classification(*layers: nn.Module, tmp_path: Path, num_train: int = 50) -> Problem:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_train + 8, 5, generator=generator)
    data = Examples(inputs, torch.randint(3, (len(inputs),), generator=generator))
    model = Classifier(*layers)
    train, queries = data.select(range(num_train)), data.select(range(num_train, len(data)))
    return problem_of(model, tmp_path, model.eval(), train=train, queries=queries)


def dense_fisher(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Mean over examples of the sum over classes of p_c g_c g_c^T."""
    probabilities = model(inputs).softmax(-1).detach()
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    parts = []
    for label in range(3):
        rows = gradients((inputs, torch.full((len(inputs),), label)))
        parts.append((rows * probabilities[:, label, None]).T @ rows)
    return torch.stack(parts).sum(0) / len(inputs)


def test_a_softmax_layer_with_constant_probabilities_is_exact(tmp_path: Path) -> None:
    """Without weights every class is as likely for every input: the Fisher is a Kronecker product."""
    layer = nn.Linear(5, 3, bias=False)
    nn.init.zeros_(layer.weight)
    problem = classification(layer, tmp_path=tmp_path)
    fisher = dense_fisher(problem.model, problem.train.inputs)
    for damping in (1e-3, 1.0):
        assert_influence("kfac", problem, CrossEntropy(), fisher, damping)


def test_a_small_network_is_near_each_layers_dense_damped_influence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    problem = classification(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3), tmp_path=tmp_path)
    fisher = dense_fisher(problem.model, problem.train.inputs)
    layers = torch.cat([torch.full((size,), k) for k, size in enumerate((36, 6, 6, 21))])  # weight and bias together
    fisher *= layers[:, None] == layers
    expected, _ = influence(problem.model, CrossEntropy().per_example, fisher, 0.05, problem)
    answer = run(KFAC(damping=0.05, labels="exact"), problem).scores
    plain = run(load_method("gradsim"), problem).scores
    assert correlation(answer, expected) > 0.95
    assert correlation(plain, expected) < 0.85
    assert 0.8 < answer.norm() / expected.norm() < 1.25, "the damped curvature has the right size too"


def test_sampled_labels_come_near_the_exact_fisher(tmp_path: Path) -> None:
    torch.manual_seed(0)
    problem = classification(nn.Linear(5, 3), tmp_path=tmp_path, num_train=4000)
    exact, sampled = (KFAC(labels=labels).fit(problem)[0].eigenvalues for labels in ("exact", "sampled"))
    torch.testing.assert_close(exact.sum(), sampled.sum(), rtol=0.05, atol=0)
    assert not torch.equal(exact, sampled)


# ---- kronfluence ----
@pytest.fixture(scope="module")
def language() -> tuple[Any, nn.Module]:
    """On a text of its own: with another Python's help a sampled label may fall on the other side of a rounding."""
    letters = np.frombuffer(b"etaoinshrdlucmfwyp      ..,\n", dtype=np.uint8)
    text = np.random.default_rng(0).choice(letters, 100_000).tobytes().decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pydoc_data.topics.topics", {"text": text})
        task: Any = load_task("tinylm", num_train=60, num_queries=10, pretraining_steps=30, layers=1)
        return task, task.build_model(0)


@pytest.fixture(scope="module")
def images() -> tuple[Any, nn.Module]:
    task = load_task("digits", num_train=150, epochs=2)
    return task, task.train_base(init_seed=0, order_seed=0, device=CPU)


@pytest.mark.parametrize("kind", ["images", "language"])
def test_it_is_kronfluences_ekfac(kind: str, request: Any, tmp_path: Path) -> None:
    """At equal damping, layers, fitting set and batches: the same sampled labels, and so the same scores."""
    task, model = request.getfixturevalue(kind)
    problem = problem_of(task, tmp_path, model, queries=range(10))
    theirs, ours = load_method("ekfac", fit_batch_size=40), KFAC(layers="kronfluence", fit_batch_size=40)
    their_fit, our_fit = theirs.fit(problem), ours.fit(problem)
    for settings in ({"damping": 1e-4}, {}, {"relative_damping": 0.02}):
        expected = replace(theirs, **settings).score(problem, their_fit)
        found = replace(ours, **settings).score(problem, our_fit)
        assert spearmanr(expected.scores.flatten(), found.scores.flatten()).statistic > 0.999
        assert (expected.scores - found.scores).norm() < 0.01 * expected.scores.norm()
        torch.testing.assert_close(found.train_scale, expected.train_scale, rtol=0.01, atol=0)


@pytest.mark.cuda
def test_it_is_kronfluences_ekfac_on_a_gpu(images: tuple[Any, nn.Module], tmp_path: Path) -> None:
    task, model = images
    device = torch.device("cuda")
    problem = replace(problem_of(task, tmp_path, copy.deepcopy(model).to(device)), device=device)
    found = [run(load_method("ekfac"), problem), run(KFAC(layers="kronfluence"), problem)]
    assert spearmanr(found[0].scores.flatten(), found[1].scores.flatten()).statistic > 0.98
    assert torch.equal(run(KFAC(layers="kronfluence"), problem).scores, found[1].scores), "deterministic"


def test_a_sequences_curvature_is_that_of_its_mean_loss(language: tuple[Any, nn.Module], tmp_path: Path) -> None:
    """Larger than kronfluence's by the number of tokens, and over every layer."""
    task, model = language
    problem = problem_of(task, tmp_path, model)
    pattern = "query_key_value"
    ours, theirs = (KFAC(parameters=pattern, layers=layers).fit(problem)[0] for layers in ("all", "kronfluence"))
    torch.testing.assert_close(ours.eigenvalues, 32 * theirs.eigenvalues)
    groups = KFAC()._gradients(problem).groups
    assert {name for group in groups for name in group} == {name for name, _ in model.named_parameters()}
    kronfluences = KFAC(layers="kronfluence")._gradients(problem).groups
    assert not any("embed" in name or "norm" in name or "head" in name for group in kronfluences for name in group)


def test_unhookable_models_work(tmp_path: Path) -> None:
    """Gradients by vmap come multiplied out; the layers' sides are then those of the products."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
            self.linear = nn.Linear(5, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.linear(inputs * self.scale)

    torch.manual_seed(0)
    problem = classification(Scaled(), tmp_path=tmp_path)
    answer = run(KFAC(damping=0.01, labels="exact"), problem)
    assert answer.diagnostics["gradients_by"] == "vmap"
    fisher = dense_fisher(problem.model, problem.train.inputs)
    expected, _ = influence(problem.model, CrossEntropy().per_example, fisher, 0.01, problem)
    assert correlation(answer.scores, expected) > 0.9


def test_relative_damping_is_a_share_of_each_layers_mean_and_bad_options_are_said(tmp_path: Path) -> None:
    eigenvalues = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    torch.testing.assert_close(damped(eigenvalues, None, 0.5), eigenvalues + 0.5)
    torch.testing.assert_close(damped(eigenvalues, 1e-3, 0.5), eigenvalues + 1e-3)
    for options, said in (
        ({"damping": -1.0}, "damping is -1.0"),
        ({"damping": "high"}, "expected a number"),
        ({"relative_damping": 0.0}, "damps nothing"),
        ({"layers": "linear"}, "available: all, kronfluence"),
        ({"labels": "true"}, "available: sampled, exact"),
        ({"fit_examples": -1}, "fit_examples is -1"),
    ):
        refused(lambda options=options: load_method("kfac", **options), said)
    problem = classification(nn.Linear(5, 3), tmp_path=tmp_path)
    refused(lambda: KFAC(parameters="nothing").fit(problem), '"nothing", which no trainable')
    refused(lambda: KFAC(parameters="(").fit(problem), "no regular expression")
    sequences = Examples(torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3, dtype=torch.long))
    refused(lambda: KFAC(labels="exact").fit(replace(problem, train=sequences)), "take labels=sampled")


def test_fewer_fitting_examples_are_drawn_at_random(tmp_path: Path) -> None:
    problem = make_problem(Planted(num_train=100), tmp_path)
    some = run(KFAC(fit_examples=40, damping=0.1, labels="exact"), problem)
    everything = run(KFAC(damping=0.1, labels="exact"), problem)
    assert not torch.allclose(some.scores, everything.scores)
    assert correlation(some.scores, everything.scores) > 0.9


@pytest.mark.parametrize("method", [KFAC(damping=0.1, labels="exact"), GradSim()])
def test_gradients_longer_than_one_matrix_product_takes(method: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """cuBLAS sums fewer than 2^31 terms; GradSim at 2.8b has 2.5e9."""
    problem = make_problem(Planted(num_train=20), tmp_path)
    whole = run(method, problem)
    for limit in ("MOST_SUMMED", "SUMMED_AT_ONCE"):
        monkeypatch.setattr(f"baselines.support.inner_products.{limit}", 7)
    in_parts = run(method, problem)
    torch.testing.assert_close(in_parts.scores, whole.scores)
    torch.testing.assert_close(in_parts.train_scale, whole.train_scale)


@pytest.mark.parametrize("method", [KFAC(damping=0.1, labels="exact"), GradSim()])
def test_one_product_of_several_batches(method: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """As a GPU has it: 7 rows are held in batches of 3, and 6 stream past in one product."""
    problem = make_problem(Planted(num_train=20), tmp_path)
    whole = run(method, problem)
    monkeypatch.setattr("baselines.support.inner_products._sizes", lambda *_: (7, 6, 3))
    in_parts = run(method, problem)
    torch.testing.assert_close(in_parts.scores, whole.scores)
    torch.testing.assert_close(in_parts.train_scale, whole.train_scale)


@pytest.mark.cuda
@pytest.mark.parametrize("weights", [torch.ones(9001), torch.rand(9001).exp()], ids=["plain", "weighted"])
def test_rounded_factors_give_the_product_and_the_norms(weights: torch.Tensor, tmp_path: Path) -> None:
    """Rows longer than one program takes, and several batches a product."""
    rows = torch.randn(30, 9001) * torch.logspace(-6, 0, 30)[:, None]
    given: Any = lambda batch, out: out.copy_(rows[batch[1].cpu()])  # noqa: E731
    given.dimension = rows.shape[1]
    numbered = Examples(torch.zeros(30, 1), torch.arange(30))
    problem = replace(make_problem(Planted(), tmp_path, indices=np.arange(30)), queries=numbered, pool=numbered)
    with switched(torch.backends.cuda.matmul, allow_tf32=True):
        found = inner_products(replace(problem, device=torch.device("cuda")), given, 7, "test", weights.cuda())
    exact = rows.double() * weights.double().sqrt()
    norms = exact.norm(dim=1)
    torch.testing.assert_close(found.train_scale, norms.float(), rtol=1e-4, atol=0)
    relative = (found.scores + exact @ exact.T) / (norms[:, None] * norms)
    assert 1e-6 < relative.std() < 2e-4, "eight bits, over nine thousand numbers"


# ---- shampoo: its sides are the gradients' own second moments, and it is exact where these decide the Fisher ----
@pytest.mark.parametrize(
    "piece",
    [
        Outer(torch.randn(6, 2, 5), torch.randn(6, 2, 7)),  # few positions: by their inner products
        Outer(torch.randn(6, 9, 5), torch.randn(6, 9, 7)),  # many: by the gradients themselves
        Outer(torch.randn(6, 1, 5), torch.randn(6, 1, 7)).with_bias(),
        Scattered(torch.randn(6, 9, 5), torch.randint(0, 4, (6, 9)), rows=4),
        Whole(torch.randn(6, 5, 7)),
    ],
    ids=["few positions", "many positions", "bias", "embedding", "whole"],
)
def test_sides_are_the_second_moments_of_the_gradients(piece: Piece) -> None:
    gradients = piece.matrices()
    left, right = piece.gradient_moments()
    if not isinstance(piece, Scattered):  # whose rows keep their own axes
        torch.testing.assert_close(left, torch.einsum("bij,bkj->ik", gradients, gradients), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(right, torch.einsum("bij,bik->jk", gradients, gradients), rtol=1e-4, atol=1e-4)


class Copied(nn.Module):
    """One linear layer at two positions of each example, which read multiples of one input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 3, bias=False).requires_grad_(False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.linear(inputs[:, None] * torch.tensor([[1.0], [0.5]])).sum(1))


def test_positions_that_agree_are_counted_as_one_gradient(tmp_path: Path) -> None:
    """Without weights every class is as likely for every input; both positions' gradients add up in each example."""
    problem = classification(nn.Linear(5, 4, bias=False), Copied(), tmp_path=tmp_path)
    problem.model[0].requires_grad_(False)  # type: ignore[index]
    assert_influence("shampoo", problem, CrossEntropy(), dense_fisher(problem.model, problem.train.inputs), 1e-2)
