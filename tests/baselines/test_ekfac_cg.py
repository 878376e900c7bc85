"""ekfac_cg: exact Gauss-Newton products, and a solve that goes from kfac's answer to the exact one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.ekfac_cg import solve
from baselines.method import Problem, load_method
from baselines.support.curvature import GradientsInBasis
from baselines.support.gauss_newton import FisherProduct, GaussNewton
from baselines.support.gradients import PerExampleGradients, trainable_parameters
from retrain.examples import Examples
from retrain.losses import CrossEntropy
from retrain.task import Task
from tests.baselines.test_methods import make_problem, run
from tests.helpers.planted import Planted

CPU = torch.device("cpu")


def small_network() -> tuple[torch.nn.Module, Examples, Examples]:
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
    return model.eval(), Examples(inputs[:30], targets[:30]), Examples(inputs[30:], targets[30:])


def problem_of(model: torch.nn.Module, train: Examples, queries: Examples, scratch: Path) -> Problem:
    task: Task = Planted()
    object.__setattr__(task, "loss_function", CrossEntropy())
    indices = np.arange(len(train))
    return Problem(
        task=task, model=model, train=train, attributed_indices=indices, queries=queries, seed=1, device=CPU,
        scratch=scratch,
    )  # fmt: skip


def exact_matrix(model: torch.nn.Module, train: Examples) -> torch.Tensor:
    """The mean of J^T (diag p - p p^T) J, from the Jacobian itself."""
    names = list(trainable_parameters(model))
    parameters = {name: model.get_parameter(name).detach() for name in names}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (train.inputs,)))(parameters)
    rows = torch.cat([jacobian[name].flatten(2) for name in names], dim=2).double()  # (n, classes, dimension)
    share = model(train.inputs).detach().double().softmax(1)
    curvature = torch.diag_embed(share) - share[:, :, None] * share[:, None]
    return torch.einsum("nci,ncd,ndj->ij", rows, curvature, rows) / len(train)


def test_the_product_is_the_gauss_newton_matrix() -> None:
    model, train, _ = small_network()
    names = list(trainable_parameters(model))
    product = GaussNewton(model, CrossEntropy(), names, train, CPU, batch_size=7)
    expected = exact_matrix(model, train).float()
    torch.testing.assert_close(product(torch.eye(len(expected))), expected, rtol=1e-4, atol=1e-6)


def test_iterations_lead_from_kfac_to_the_exact_solve(scratch: Path) -> None:
    model, train, queries = small_network()
    problem = problem_of(model, train, queries, scratch)
    damping = 0.01
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    asked, own = (gradients((e.inputs, e.targets)).double() for e in (queries, train))
    matrix = exact_matrix(model, train) + damping * torch.eye(gradients.dimension)
    exact = -(asked @ torch.linalg.solve(matrix, own.T)).float()
    found = {k: run(load_method("ekfac_cg", damping=damping, iterations=k), problem) for k in (0, 1, 5, 60)}
    errors = [float((found[k].scores - exact).norm() / exact.norm()) for k in (0, 1, 5, 60)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1, "Kronecker factors are not exact here"
    assert errors[-1] < 1e-3
    kfac = run(load_method("kfac", damping=damping), problem)
    torch.testing.assert_close(found[0].scores, kfac.scores, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[5].train_scale, kfac.train_scale, rtol=1e-4, atol=1e-5)
    assert found[60].diagnostics["median_residual"] < 1e-3 < found[1].diagnostics["median_residual"]


@pytest.mark.parametrize("name", ["ekfac_cg", "astra"])
def test_products_by_gradients_lead_to_the_exact_solve_as_well(name: str, scratch: Path) -> None:
    model, train, queries = small_network()
    problem = problem_of(model, train, queries, scratch)
    gradients = PerExampleGradients(model, CrossEntropy().per_example)
    asked, own = (gradients((e.inputs, e.targets)).double() for e in (queries, train))
    matrix = exact_matrix(model, train) + 0.01 * torch.eye(gradients.dimension)
    exact = -(asked @ torch.linalg.solve(matrix, own.T)).float()

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
    model, train, _ = small_network()
    kfac = load_method("kfac")
    problem = problem_of(model, train, train, scratch)
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


def test_a_good_preconditioner_saves_iterations() -> None:
    torch.manual_seed(0)
    spread = torch.logspace(-3, 2, 30)
    basis = torch.linalg.qr(torch.randn(30, 30)).Q
    matrix = basis @ torch.diag(spread) @ basis.T
    near = torch.linalg.inv(matrix + 0.01 * torch.eye(30) + 1e-3 * torch.diag(torch.rand(30)))
    wanted = torch.randn(4, 30)
    product = lambda rows: rows @ matrix  # noqa: E731
    _, with_it = solve(product, lambda rows: rows @ near, wanted, 0.01, 3)
    _, without = solve(product, lambda rows: rows, wanted, 0.01, 3)
    assert max(with_it) < 0.01 < min(without)


def test_a_query_without_a_gradient_has_no_influence(scratch: Path) -> None:
    task = Planted(num_train=20, num_queries=4)
    problem = make_problem(task, scratch)
    model = problem.model
    perfect = replace(task.query_data, targets=model(task.query_data.inputs).squeeze(1).detach())
    found = run(load_method("ekfac_cg", iterations=3), replace(problem, queries=perfect))
    assert torch.equal(found.scores, torch.zeros_like(found.scores))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        load_method("ekfac_cg", iterations=-1)
    with pytest.raises(ValueError, match="over all of them"):
        load_method("ekfac_cg", layers="kronfluence")
