"""GradSim, EK-FAC and TRAK on a language model, each against the same thing computed by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from baselines.ekfac import EKFAC, tracked_modules
from baselines.method import Problem, load_method
from baselines.support.gradients import trainable_parameters
from baselines.support.projectors import Sketch, make_projector
from bench.scaling.methods import LargeTRAK, ShiftedSketch
from retrain.losses import CrossEntropy
from retrain.models import causal_lm
from retrain.models.causal_lm import CausalLM, sample_tokens
from retrain.tasks import load_task
from retrain.tasks.language import Pythia14M
from tests.helpers.problems import CPU, gradients_by_hand, problem_of
from tests.helpers.tiny_language import save_both, write_text

NUM_TRAIN, NUM_QUERIES = 150, 6


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Pythia14M:
    folder = tmp_path_factory.mktemp("language")
    model = save_both(folder / "tiny-stand-in", hidden_size=8, intermediate_size=16, num_hidden_layers=1)
    text = write_text(folder / "text.jsonl", 160)
    return load_task(
        "pythia14m", model=str(model), text=str(text), length=16, num_train=NUM_TRAIN, num_queries=NUM_QUERIES,
        batch_size=16, learning_rate=1e-2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(task) -> CausalLM:
    return task.train_base(init_seed=0, order_seed=0, device=CPU)


def problem(task: Pythia14M, model: CausalLM, scratch: Path, num_train: int = NUM_TRAIN) -> Problem:
    return problem_of(task, scratch, model, train=task.train_data.select(range(num_train)), chosen=[5, 2, 9, 11])


def by_hand(model: CausalLM, examples, function, names: list[str]) -> torch.Tensor:
    """(examples, d): each sequence's gradient of the mean over its tokens, from the logits of transformers."""

    def value(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return function(model.transformer(input_ids=inputs, use_cache=False).logits, targets).mean()

    return gradients_by_hand(model, examples, value, names)


def margins(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log p / (1 - p) of each next token, from the probabilities themselves."""
    probability = logits.double().softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    return torch.log(probability / (1 - probability)).float()


# ---- TRAK: a next-token model output ----
@pytest.mark.parametrize("projector", ["sketch", "dense", "shifted"])
def test_trak_is_the_projected_kernel_by_hand(task, model, scratch, projector) -> None:
    """scores = slope_query * phi_query (Phi^T Phi)^-1 phi_train * (1 - p)_train, up to traker's own scale."""
    options = {"projection": 104, "ridge": 1e-3, "batch_size": 40}
    method = LargeTRAK(**options) if projector == "shifted" else load_method("trak", projector=projector, **options)
    asked = problem(task, model, scratch)
    found = method.score(asked, method.fit(asked)).scores

    names = list(trainable_parameters(model))
    d = sum(model.get_parameter(name).numel() for name in names)
    made = ShiftedSketch(d, 104, 3, CPU) if projector == "shifted" else make_projector(projector, d, 104, 3, CPU)
    projection = made.project(torch.eye(d), 0)
    train, query = (
        (by_hand(model, examples, margins, names) @ projection / d**0.5).double()
        for examples in (asked.train, asked.queries)
    )

    def slopes(examples) -> torch.Tensor:
        probability = model(examples.inputs).softmax(-1).gather(-1, examples.targets[..., None]).squeeze(-1)
        return -(1 - probability).mean(1).double().detach()

    kernel = train.T @ train + 1e-3 * torch.eye(104, dtype=torch.float64)
    expected = query @ torch.linalg.solve(kernel, train.T)[:, asked.attributed_indices]
    expected = slopes(asked.queries)[:, None] * expected * -slopes(asked.attributed)[None, :]
    scale = (found.double() * expected).sum() / expected.square().sum()
    assert scale > 0
    assert (found.double() / scale - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("kind", [Sketch, ShiftedSketch])
def test_sketched_inner_products_are_unbiased_with_a_gaussians_variance(kind, monkeypatch) -> None:
    monkeypatch.setattr("bench.scaling.methods.SKETCH_SLICE", 300)  # several slices, the last one short
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(1001, generator=generator)
    other = 0.2 * one + torch.randn(1001, generator=generator)
    found = []
    for seed in range(400):
        sketch = kind(1001, 104, seed, CPU)
        first, second = sketch.project(torch.stack([one, other]), model_id=0) / 104**0.5
        found.append(float(first @ second))
    exact, spread = float(one @ other), np.std(found)
    assert abs(np.mean(found) - exact) < 4 * spread / 400**0.5
    gaussian = float(((one @ one) * (other @ other) + (one @ other) ** 2) / 104) ** 0.5
    assert 0.8 < spread / gaussian < 1.15
    assert not torch.equal(sketch.project(one[None], 0), sketch.project(one[None], 1))


# ---- EK-FAC ----
def test_ekfac_leaves_the_head_out_and_needs_no_logits(task, model, scratch, monkeypatch) -> None:
    """With the identity for a Hessian its scores are inner products over the tracked layers; the head never runs."""
    names = tracked_modules(model)
    assert len(names) == 4
    assert not any("lm_head" in name or "embed" in name for name in names)
    forward, shape = nn.Linear.forward, model.head.weight.shape

    def guarded(layer, inputs):
        assert layer.weight.shape != shape, "the head was asked for all logits"
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Linear, "forward", guarded)
    asked = problem(task, model, scratch, num_train=32)
    method = EKFAC(strategy="identity")
    found = method.score(asked, method.fit(asked)).scores
    monkeypatch.undo()
    parameters = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in names]
    function = CrossEntropy().per_example
    query, train = (by_hand(model, e, function, parameters) for e in (asked.queries, asked.attributed))
    torch.testing.assert_close(found, -query @ train.T, rtol=1e-3, atol=1e-5)


def test_token_scores_add_up_to_the_sequences_score(task, model, scratch) -> None:
    asked = problem(task, model, scratch, num_train=32)
    method = EKFAC(self_influence=False)
    torch.manual_seed(0)
    state = method.fit(asked)
    scores = method.score(asked, state).scores
    tokens = method.token_scores(asked, state)
    assert tokens.shape == (NUM_QUERIES, 4, 15)
    torch.testing.assert_close(tokens.sum(-1), scores, rtol=1e-3, atol=1e-3 * float(scores.abs().max()))
    some = method.token_scores(asked, state, task.train_data.select([11, 2]))
    torch.testing.assert_close(some, tokens[:, [3, 1]], rtol=1e-3, atol=1e-3 * float(tokens.abs().max()))


def test_sampled_tokens_follow_the_models_distribution_in_chunks(monkeypatch) -> None:
    hidden, weight = torch.randn(1, 4), torch.randn(7, 4)
    monkeypatch.setattr(causal_lm, "SAMPLED_LOGITS", 7 * 100)
    torch.manual_seed(0)
    drawn = sample_tokens(hidden.expand(20_000, 4), weight)
    found = torch.bincount(drawn, minlength=7) / 20_000
    torch.testing.assert_close(found, (hidden @ weight.T).softmax(-1)[0], atol=0.015, rtol=0)
