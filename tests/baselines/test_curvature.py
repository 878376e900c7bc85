"""The Kronecker-factored localiser: known curvature, coordinates that are what they say, and shrinkage that judges."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from baselines.bif.covariance import Agreement
from baselines.bif.engine import Workbench
from baselines.bif.method import BIF, Fitted
from baselines.bif.sampler import SAMPLERS, Position
from baselines.support.curvature import Block, GradientsInMetric, Metric, fit_curvature
from baselines.support.gradients import PerExampleGradients
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.losses import CrossEntropy, SquaredError
from tests.baselines.test_methods import make_problem, run
from tests.helpers.planted import Planted

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Every kind of parameter: an embedding, a convolution, a normalisation, linear layers on vectors and positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.linear = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.head = nn.Linear(3 * 4 * 8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.linear(self.embedding(tokens))))  # (batch, 4, 8)
        return self.head(torch.tanh(self.convolution(hidden[:, None])).flatten(1))


def mixed() -> tuple[PerExampleGradients, Examples]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(high, (60, *shape), generator=generator) for high, shape in ((11, (4,)), (5, ())))
    return PerExampleGradients(Mixed().eval(), CrossEntropy().per_example), Examples(tokens, labels)


def test_a_linear_models_curvature_is_its_second_moment() -> None:
    """One layer, squared error: the Fisher of the weight is E[x x^T], of the bias 1, whatever the labels."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).eval()
    inputs = torch.randn(20_000, 3) @ torch.tensor([[2.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.2]])
    gradients = PerExampleGradients(model, SquaredError().per_example)
    weight, bias = fit_curvature(gradients, SquaredError(), Examples(inputs, torch.zeros(len(inputs))), 5000, CPU)
    assert weight.right is not None
    fitted = weight.right * weight.eigenvalues[0] @ weight.right.T
    torch.testing.assert_close(fitted, inputs.T @ inputs / len(inputs), rtol=0.05, atol=0.05)
    assert bias.eigenvalues.item() == pytest.approx(1.0, rel=0.05)


def test_the_tokens_of_a_sequence_count_as_its_mean_loss_has_them() -> None:
    """The trace of the fitted curvature is that of the exact Gauss-Newton matrix of mean-over-token losses."""
    torch.manual_seed(0)
    model, tokens = nn.Linear(4, 3, bias=False).eval(), 5
    inputs = torch.randn(3000, tokens, 4)
    examples = Examples(inputs, torch.zeros(len(inputs), tokens, dtype=torch.long))
    (weight,) = fit_curvature(
        PerExampleGradients(model, CrossEntropy().per_example), CrossEntropy(), examples, 500, CPU
    )
    probabilities = model(inputs).softmax(-1).detach()
    # d^2 loss / d logits^2 = diag(p) - p p^T, and each logit is linear in x
    exact = ((probabilities * (1 - probabilities)).sum(-1) * inputs.square().sum(-1)).mean()
    assert float(weight.eigenvalues.sum()) == pytest.approx(float(exact), rel=0.05)


def test_coordinates_of_every_kind_of_parameter_are_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients transform as the adjoint of displacements, row by row as all at once, and products are damped ones."""
    monkeypatch.setattr("baselines.support.pieces.LARGEST_DENSE", 7)  # norms and biases stay in their axes
    monkeypatch.setattr("baselines.support.pieces.LARGEST_SIDE", 50)  # and so does the head's input side
    gradients, examples = mixed()
    blocks = fit_curvature(gradients, CrossEntropy(), examples, 25, CPU)
    kinds = {name: (b.left is not None, b.right is not None) for name, b in zip(gradients.names, blocks, strict=True)}
    assert kinds["embedding.weight"] == (False, True)
    assert kinds["norm.weight"] == kinds["linear.bias"] == (False, False)
    assert kinds["linear.weight"] == kinds["convolution.weight"] == (True, True)
    assert kinds["head.weight"] == (True, False)
    assert kinds["head.bias"] == (True, False)
    assert all((block.eigenvalues >= 0).all() for block in blocks)

    metric = Metric(blocks, damping=0.01)
    parameters = [gradients.model.get_parameter(name).data for name in gradients.names]
    displacement = [torch.randn_like(parameter) for parameter in parameters]
    gradient = [torch.randn_like(parameter) for parameter in parameters]
    moved, seen = metric.to_weights(displacement), metric.of_gradient(gradient)
    assert [m.shape for m in moved] == [p.shape for p in parameters]
    torch.testing.assert_close(_dot(moved, gradient), _dot(displacement, seen), rtol=1e-4, atol=1e-4)

    rows = torch.stack([torch.cat([g.flatten() for g in gradient]), torch.randn(gradients.dimension)])
    torch.testing.assert_close(metric.of_rows(rows.clone())[0], torch.cat([s.flatten() for s in seen]))
    matrix = torch.block_diag(*[_matrix(block) for block in blocks])
    damped = torch.linalg.inv(torch.eye(len(matrix)) + matrix / 0.01)
    by_metric = metric.of_rows(rows.clone())
    torch.testing.assert_close(by_metric @ by_metric.T, rows @ damped @ rows.T, rtol=1e-3, atol=1e-3)


def _dot(one: list[torch.Tensor], two: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).sum()


def _matrix(block: Block) -> torch.Tensor:
    """The block's curvature, whole, over the parameter's flattened numbers."""
    rows, columns = block.eigenvalues.shape
    left = torch.eye(rows) if block.left is None else block.left
    right = torch.eye(columns) if block.right is None else block.right
    basis = torch.kron(left.contiguous(), right.contiguous())
    return basis * block.eigenvalues.flatten() @ basis.T


def test_a_prior_alone_has_the_localisers_covariance() -> None:
    """Without a loss the weights' covariance is (gamma (1 + H / damping))^-1, by every sampler."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 3)).Q
    block = Block(torch.Size((3,)), torch.tensor([[0.0], [1.0], [20.0]]), left=basis)
    gamma, damping = 4.0, 2.0
    expected = basis @ torch.diag(1 / (gamma * (1 + torch.tensor([0.0, 1.0, 20.0]) / damping))) @ basis.T
    for sampler, step_size in (("sgld", 0.04), ("sghmc", 0.02)):
        parameters = [torch.zeros(3)]
        position = Position(parameters, [torch.zeros(3)], metric=Metric([block], damping))
        generator = torch.Generator().manual_seed(1)
        draws = []
        for _ in range(10_000):
            SAMPLERS[sampler](position, [torch.zeros(3)], gamma, step_size, generator)
            draws.append(parameters[0].clone())
        found = torch.cov(torch.stack(draws).T)
        torch.testing.assert_close(found, expected, rtol=0.2, atol=0.012)


def test_gradients_reach_the_chain_in_the_metrics_coordinates(tmp_path: Path) -> None:
    """With the loss, the posterior of a linear model has precision n_beta H + gamma (1 + H' / damping)."""
    task = Planted(num_train=100, num_queries=5, dimension=2)
    problem = make_problem(task, tmp_path)
    method = BIF(
        chains=1, draws=3000, step_size=0.004, n_beta=60.0, gamma=30.0, damping=1.0, minibatch=100,
        localiser="kronecker", gradient="difference",
    )  # fmt: skip
    torch.manual_seed(0)
    metric = method.fit(problem).metric
    assert metric is not None
    workbench = Workbench(method, task, problem.model, problem.train, problem.queries, metric)
    weights = []
    for _ in workbench.draws(3, 0):
        weights.append(torch.cat([parameter.detach().flatten() for parameter in workbench.sampled.values()]))
    found = torch.cov(torch.stack(weights).T)
    inputs = torch.cat([task.train_data.inputs, torch.ones(100, 1)], dim=1)
    fitted = torch.block_diag(*[_matrix(block) for block in metric.blocks])
    precision = 60.0 * inputs.T @ inputs / 100 + 30.0 * (torch.eye(3) + fitted)
    torch.testing.assert_close(found @ precision, torch.eye(3), rtol=0, atol=0.25)


def test_with_the_kronecker_localiser_few_draws_are_damped_influence(tmp_path: Path) -> None:
    task = Planted(num_train=80, num_queries=10, dimension=3)
    problem = make_problem(task, tmp_path)
    method = BIF(
        chains=2, draws=10, step_size=1e-7, gamma=1e7, n_beta=1.0, damping=0.3, minibatch=80,
        localiser="kronecker", control_variate=True, shrinkage=True,
    )  # fmt: skip
    torch.manual_seed(0)
    metric = method.fit(problem).metric
    assert metric is not None
    gradients = PerExampleGradients(problem.model, task.loss_function.per_example)
    train, queries = (gradients((e.inputs, e.targets)) for e in (problem.attributed, problem.queries))
    damped = torch.linalg.inv(torch.eye(4) + torch.block_diag(*[_matrix(block) for block in metric.blocks]) / 0.3)
    answer = method.score(problem, Fitted(method, None, metric))
    exact = -method.prior_variance(2) * queries @ damped @ train.T
    torch.testing.assert_close(answer.scores, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    assert answer.diagnostics["sampled_share"] < 0.01
    assert GradientsInMetric(gradients, metric)((problem.queries.inputs, problem.queries.targets)).shape == (10, 4)


def test_scores_without_a_fit_make_their_own_and_a_pattern_that_finds_nothing_is_said(tmp_path: Path) -> None:
    problem = make_problem(Planted(num_train=30, num_queries=4), tmp_path)
    options = {"localiser": "kronecker", "chains": 2, "draws": 4, "minibatch": 30, "step_size": 1e-5}
    torch.manual_seed(0)
    fitted = BIF(**options).fit(problem)
    with_it = BIF(**options).score(problem, fitted).scores
    torch.manual_seed(0)
    torch.testing.assert_close(BIF(**options).score(problem, None).scores, with_it)
    with pytest.raises(UsageError, match='"nothing", which no trainable'):
        BIF(**options, parameters="nothing").fit(problem)


def test_the_kronecker_localiser_covers_what_ekfac_covers(tmp_path: Path) -> None:
    """The same numbers as kronfluence's EK-FAC at the same damping, up to its bias column and sampled labels."""
    from baselines.ekfac import EKFAC

    task = Planted(num_train=1000, num_queries=20)  # two hundred labels differ too much from two hundred others
    problem = make_problem(task, tmp_path)
    ekfac = run(EKFAC(damping=0.1), problem).scores
    ours = run(
        BIF(
            chains=2, draws=4, step_size=1e-8, gamma=1e8, n_beta=1.0, damping=0.1, minibatch=200,
            localiser="kronecker", control_variate=True, shrinkage=True,
        ),
        problem,
    ).scores  # fmt: skip
    assert torch.corrcoef(torch.stack([ours.flatten(), ekfac.flatten()]))[0, 1] > 0.97


@pytest.mark.parametrize("signal", [0.0, 1.0, 100.0])
def test_agreement_keeps_what_chains_share(signal: float) -> None:
    """With noise of unit variance on four chains, the best factor is s^2 / (s^2 + 1 / 4)."""
    generator = torch.Generator().manual_seed(0)
    shared = signal * torch.randn(3, 4000, generator=generator)
    agreement, zero = Agreement(), torch.zeros(1)
    for _ in range(4):
        noisy = shared + torch.randn(3, 4000, generator=generator)
        agreement.add(noisy, noisy[0], zero, zero)
    of_scores, of_variances = agreement.shares()
    expected = torch.full((3,), signal**2 / (signal**2 + 0.25))
    torch.testing.assert_close(of_scores, expected, rtol=0, atol=0.05)
    torch.testing.assert_close(of_variances, expected[0], rtol=0, atol=0.05)


def test_one_chain_agrees_with_nobody() -> None:
    agreement = Agreement()
    agreement.add(torch.ones(2, 3), torch.ones(3), torch.zeros(2, 3), torch.zeros(3))
    assert not agreement.shares()[0].any()
    with pytest.raises(ValueError, match="at least 2 chains"):
        BIF(control_variate=True, shrinkage=True, chains=1, step_size=1e-5)


def test_shrinkage_is_the_same_from_traces_and_from_running_sums(tmp_path: Path, monkeypatch) -> None:
    task = Planted(num_train=30, num_queries=6)
    problem = make_problem(task, tmp_path)
    options = {
        "chains": 3, "draws": 20, "step_size": 1e-3, "gamma": 500.0, "n_beta": 800.0, "minibatch": 30,
        "control_variate": True, "shrinkage": True,
    }  # fmt: skip
    by_traces = BIF(**options).score(problem, None)
    held = BIF._held
    monkeypatch.setattr(BIF, "_held", lambda *given: replace(held(*given), streaming=True))
    by_sums = BIF(**options).score(problem, None)
    assert 0 < by_traces.diagnostics["kept_difference_median"] <= 1
    torch.testing.assert_close(by_sums.scores, by_traces.scores, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(by_sums.train_scale, by_traces.train_scale, rtol=1e-3, atol=1e-6)
    assert F.cosine_similarity(by_sums.scores.flatten(), by_traces.scores.flatten(), dim=0) > 0.9999
