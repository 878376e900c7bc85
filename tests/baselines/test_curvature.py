"""The Kronecker-factored localiser: known curvature, coordinates that are what they say, and shrinkage that judges."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from baselines.bif.covariance import Agreement
from baselines.bif.engine import Workbench
from baselines.bif.method import BIF, Fitted
from baselines.bif.sampler import SAMPLERS, Position
from baselines.ekfac_cg import FisherProduct, GaussNewton
from baselines.method import Method, Problem, load_method
from baselines.support.curvature import Block, GradientsInBasis, GradientsInMetric, Metric, fit_curvature
from baselines.support.gradients import PerExampleGradients, trainable_parameters
from bench.scoring import run_stage
from retrain.examples import Examples
from retrain.losses import CrossEntropy, SquaredError
from retrain.resume import ResumeState
from retrain.task import Task
from retrain.tasks import load_task
from tests.baselines.test_bif_parts import Killed
from tests.baselines.test_kfac import dense_fisher, influence
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import CPU, assert_same, problem_of, refused, run


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
    fitted = weight.right * weight.eigenvalues[0] @ weight.right.T
    torch.testing.assert_close(fitted, inputs.T @ inputs / len(inputs), rtol=0.05, atol=0.05)
    assert bias.eigenvalues.item() == pytest.approx(1.0, rel=0.05)


def test_the_tokens_of_a_sequence_count_as_its_mean_loss_has_them() -> None:
    """The trace of the fitted curvature is that of the exact Gauss-Newton matrix of mean-over-token losses."""
    torch.manual_seed(0)
    model, tokens = nn.Linear(4, 3, bias=False).eval(), 5
    inputs = torch.randn(3000, tokens, 4)
    examples = Examples(inputs, torch.zeros(len(inputs), tokens, dtype=torch.long))
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    (weight,) = fit_curvature(gradients, CrossEntropy(), examples, 500, CPU)
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
    displacement, *both = ([torch.randn_like(parameter) for parameter in parameters] for _ in range(3))
    moved = metric.to_weights(displacement)
    assert [m.shape for m in moved] == [p.shape for p in parameters]
    rows = torch.stack([parameters_to_vector(one) for one in both])
    by_metric = torch.stack([parameters_to_vector(metric.of_gradient(one)) for one in both])
    adjoint = by_metric @ parameters_to_vector(displacement)
    torch.testing.assert_close(rows @ parameters_to_vector(moved), adjoint, rtol=1e-4, atol=1e-4)

    matrix = torch.block_diag(*[_matrix(block) for block in blocks])
    damped = torch.linalg.inv(torch.eye(len(matrix)) + matrix / 0.01)
    torch.testing.assert_close(by_metric @ by_metric.T, rows @ damped @ rows.T, rtol=1e-3, atol=1e-3)


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
    numbers = {"draws": 3000, "step_size": 0.004, "n_beta": 60.0, "gamma": 30.0, "damping": 1.0, "minibatch": 100}
    method = BIF(chains=1, localiser="kronecker", gradient="difference", **numbers)
    torch.manual_seed(0)
    metric = method.fit(problem).metric
    workbench = Workbench(method, task, problem.model, problem.train, problem.queries, metric)
    weights = [parameters_to_vector(workbench.sampled.values()).detach() for _ in workbench.draws(3, 0)]
    found = torch.cov(torch.stack(weights).T)
    inputs = torch.cat([task.train_data.inputs, torch.ones(100, 1)], dim=1)
    fitted = torch.block_diag(*[_matrix(block) for block in metric.blocks])
    precision = 60.0 * inputs.T @ inputs / 100 + 30.0 * (torch.eye(3) + fitted)
    torch.testing.assert_close(found @ precision, torch.eye(3), rtol=0, atol=0.25)


def test_with_the_kronecker_localiser_few_draws_are_damped_influence(tmp_path: Path) -> None:
    task = Planted(num_train=80, num_queries=10, dimension=3)
    problem = make_problem(task, tmp_path)
    numbers = {"draws": 10, "step_size": 1e-7, "gamma": 1e7, "n_beta": 1.0, "damping": 0.3, "minibatch": 80}
    method = BIF(chains=2, localiser="kronecker", control_variate=True, shrinkage=True, **numbers)
    torch.manual_seed(0)
    metric = method.fit(problem).metric
    gradients = PerExampleGradients(problem.model, task.loss_function.per_example)
    train, queries = (gradients((e.inputs, e.targets)) for e in (problem.attributed, problem.queries))
    damped = torch.linalg.inv(torch.eye(4) + torch.block_diag(*[_matrix(block) for block in metric.blocks]) / 0.3)
    answer = method.score(problem, Fitted(method, None, metric))
    exact = -method.prior_variance(2) * queries @ damped @ train.T
    assert_same(answer.scores, exact, rtol=1e-3)
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
    refused(lambda: BIF(**options, parameters="nothing").fit(problem), '"nothing", which no trainable')


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
    alone = Agreement()
    alone.add(torch.ones(2, 3), torch.ones(3), torch.zeros(2, 3), torch.zeros(3))
    assert not alone.shares()[0].any(), "one chain agrees with nobody"
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


# ---- ekfac_cg: exact Gauss-Newton products, and a solve that goes from kfac's answer to the exact one ----
def classifying(scratch: Path) -> Problem:
    """Two layers with a frozen scale between them, trained a little; 37 numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    inputs = torch.randn(40, 3)
    targets = (inputs @ torch.randn(3, 3)).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    task: Task = Planted()
    object.__setattr__(task, "loss_function", CrossEntropy())
    train, queries = Examples(inputs[:30], targets[:30]), Examples(inputs[30:], targets[30:])
    return problem_of(task, scratch, model.eval(), train=train, queries=queries, seed=1)


def exact_scores(problem: Problem, damping: float) -> torch.Tensor:
    """By the Fisher information, which is the Gauss-Newton matrix of cross-entropy."""
    fisher = dense_fisher(problem.model, problem.train.inputs)
    return influence(problem.model, CrossEntropy().per_example, fisher, damping, problem)[0]


def test_iterations_lead_from_kfac_to_the_exact_solve(scratch: Path) -> None:
    """By products with the Gauss-Newton matrix itself."""
    problem, damping = classifying(scratch), 0.01
    names, expected = list(trainable_parameters(problem.model)), dense_fisher(problem.model, problem.train.inputs)
    product = GaussNewton(problem.model, CrossEntropy(), names, problem.train, CPU, batch_size=7)
    torch.testing.assert_close(product(torch.eye(len(expected))), expected, rtol=1e-4, atol=1e-6)
    exact = exact_scores(problem, damping)
    found = {k: run(load_method("ekfac_cg", damping=damping, iterations=k), problem) for k in (0, 1, 5, 40)}
    errors = [float((found[k].scores - exact).norm() / exact.norm()) for k in (0, 1, 5, 40)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1, "Kronecker factors are not exact here"
    assert errors[-1] < 1e-3
    kfac = run(load_method("kfac", damping=damping), problem)
    torch.testing.assert_close(found[0].scores, kfac.scores, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[5].train_scale, kfac.train_scale, rtol=1e-4, atol=1e-5)
    assert found[40].diagnostics["median_residual"] < 1e-3 < found[1].diagnostics["median_residual"]
    assert found[0].diagnostics["median_residual"] is None, "a record holds no NaN"


@pytest.mark.parametrize("name", ["ekfac_cg", "astra"])
def test_products_by_gradients_lead_to_the_exact_solve_as_well(name: str, scratch: Path) -> None:
    problem = classifying(scratch)
    exact = exact_scores(problem, 0.01)

    def error(**options: object) -> float:
        method = load_method(name, damping=0.01, labels="exact", product="gradients", **options)
        return float((run(method, problem).scores - exact).norm() / exact.norm())

    counts = (0, 5, 60) if name == "ekfac_cg" else (0, 20, 400)
    errors = [error(iterations=count) for count in counts]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < (1e-3 if name == "ekfac_cg" else 0.1)
    if name == "astra":  # half of the examples a step: noise that the mean takes out
        assert error(iterations=400, minibatch=15) < 0.6 * errors[0]


def test_sampled_labels_give_the_matrix_in_the_mean(scratch: Path) -> None:
    kfac, problem = load_method("kfac"), classifying(scratch)
    train = problem.train
    rows = GradientsInBasis(kfac._gradients(problem), kfac.fit(problem))  # type: ignore[attr-defined]
    products = [FisherProduct(rows, CrossEntropy(), train, CPU, 7, seed=1, exact=exact) for exact in (True, False)]
    vectors = torch.eye(rows.dimension)
    expected = products[0](vectors)
    found = torch.stack([products[1](vectors, stream=stream) for stream in range(60)])
    assert torch.equal(found[0], products[1](vectors, stream=0))
    assert (found.mean(0) - expected).norm() < 0.3 * expected.norm() < 0.6 * (found[0] - expected).norm()
    kept = np.arange(10)
    some = FisherProduct(rows, CrossEntropy(), train.select(kept), CPU, 7, seed=1, exact=True)
    torch.testing.assert_close(products[0](vectors, kept), some(vectors))


def test_a_query_without_a_gradient_has_no_influence_and_what_it_cannot_do_is_refused(scratch: Path) -> None:
    task = Planted(num_train=20, num_queries=4)
    problem = make_problem(task, scratch)
    model = problem.model
    perfect = replace(task.query_data, targets=model(task.query_data.inputs).squeeze(1).detach())
    found = run(load_method("ekfac_cg", iterations=3), replace(problem, queries=perfect))
    assert torch.equal(found.scores, torch.zeros_like(found.scores))
    refused(lambda: load_method("ekfac_cg", iterations=-1), "expected 0 or more")
    refused(lambda: load_method("ekfac_cg", layers="kronfluence"), "over all of them")


# ---- A killed fit or scoring goes on where it was, to the bits of one that was left alone ----
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
    answer = run(method, problem if work is None else replace(problem, work=work))
    return torch.cat([answer.scores.flatten(), answer.train_scale])


def with_kills(method: Method, task: Planted, folder: Path, most: int) -> tuple[torch.Tensor, int, set[str]]:
    """The answer of the first attempt that nobody kills, how many were, and what of "pairwise" those had saved."""
    states = set[str]()
    for kills in range(most):
        work = Eager(folder / "work", saves=1)
        try:
            return attempt(method, task, folder, work), kills, states
        except Killed:
            states |= (work.load("pairwise") or ({}, {}))[0].keys()
    raise AssertionError("no attempt gets further than the one before it")


@pytest.mark.parametrize("name", METHODS)
def test_killed_again_and_again_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """And what was saved counts as nothing where its files are damaged."""
    task, method = Planted(num_train=60, num_queries=12), load_method(name, **METHODS[name])
    expected = attempt(method, task, tmp_path, None)
    found, kills, _ = with_kills(method, task, tmp_path, most=50)
    assert kills >= 3
    assert torch.equal(found, expected)
    with pytest.raises(Killed):
        attempt(method, task, tmp_path, Eager(tmp_path / "damaged", saves=2))
    for file in (tmp_path / "damaged").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    assert torch.equal(attempt(method, task, tmp_path, ResumeState(tmp_path / "damaged")), expected)


def test_a_resumed_stage_is_charged_for_what_it_went_on_from(tmp_path: Path) -> None:
    """And for nothing of what it did not."""
    work = ResumeState(tmp_path / "work")
    ResumeState(tmp_path / "work").save("inner_products", {}, {})
    problem = replace(make_problem(Planted(num_train=20), tmp_path), work=work)
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
    monkeypatch.setattr("baselines.ekfac.BATCHES_TOGETHER", 1)  # of the fit as well, whose sums round as they are cut
    expected = attempt(method, task, tmp_path, None)
    monkeypatch.setattr("baselines.ekfac.SECONDS_TOGETHER", 0.0)
    assert torch.equal(attempt(method, task, tmp_path, None), expected)
    found, kills, states = with_kills(method, task, tmp_path, most=80)
    assert states == {"scores", "row", "own"}
    assert kills >= 15, "three batches of queries times five of training examples, and self-influences"
    assert torch.equal(found, expected)


def test_on_layers_with_factors(tmp_path: Path) -> None:
    """A network, where the passes of a fit have sides, a basis and sizes to keep."""
    task = load_task("digits", num_train=40, epochs=1, widths=(4, 4))
    model = task.train_base(init_seed=0, order_seed=0, device=CPU)
    for name, options in (("kfac", {"fit_batch_size": 10}), ("ekfac", {"fit_batch_size": 2})):
        method, found = load_method(name, **options), []
        for saves in (1, 3, 6, 10**9):
            folder = tmp_path / name / str(saves)
            problem = problem_of(task, tmp_path, model, queries=range(4), seed=1, work=Eager(folder, saves))
            try:
                state = method.fit(problem)
            except Killed:
                state = method.fit(replace(problem, work=ResumeState(folder)))
            found.append(method.pack_fit(state))
        for other in found[:-1]:
            assert other.keys() == found[-1].keys()
            assert all(torch.equal(other[key], found[-1][key]) for key in other)
