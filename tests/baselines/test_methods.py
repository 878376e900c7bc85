"""Conformance: the same tests over every file in baselines/, so that a new method is covered without a new test."""

import copy
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from scipy.stats import spearmanr

from baselines.method import Attribution, Method, Size, available_methods, load_method
from baselines.support.gradients import PerExampleGradients
from baselines.support.pieces import Scattered, Whole, patches
from baselines.trak import TRAK
from retrain.losses import CrossEntropy, mean_over_tokens
from retrain.models.resnet9 import ResNet9
from retrain.tasks import load_task
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import CPU, assert_same, correlation, refused, run

# What suits 200 examples and 5 parameters; a method not named here must work with its defaults.
SETTINGS: dict[str, dict] = {
    "bif": {
        "chains": 2, "draws": 40, "burn_in": 5, "minibatch": 200, "n_beta": 200.0, "gamma": 1e-3, "step_size": 0.004,
    },
    "ekfac": {"damping": 1e-8},
    "kfac": {"damping": 1e-8},
    "shampoo": {"damping": 1e-8},
    "logra": {"damping": 1e-8},
    "trackstar": {"damping": 1e-8},
    "ekfac_cg": {"damping": 1e-8},
    "astra": {"damping": 1e-8, "minibatch": 200},
    "bif_gaussian": {"damping": 1e-3, "rise": 0.01, "draws": 100},
    "daunce": {"models": 6, "minibatch": 60},
}  # fmt: skip
SETTINGS["bif_cv"] = SETTINGS["bif"]
SETTINGS["bif_devinterp"] = {**SETTINGS["bif"], "draws": 10}  # three milliseconds a step
# What it takes to be accurate, where that is more: the other properties hold at any number of draws.
ACCURATE: dict[str, dict] = {
    "bif": {"chains": 4, "draws": 400},
    # Where its shadow is near and losses are nearly linear: its limit is damped influence.
    "bif_cv": {"draws": 400, "gamma": 2e4, "n_beta": 2e4, "step_size": 2e-5},
    "bif_devinterp": {"chains": 4, "draws": 400},
    "bif_gaussian": {"draws": 1000},
    "daunce": {
        "models": 100, "minibatch": 60, "steps": 20, "step_size": 0.3, "share": 1.0, "objective": "hessian", "rho": 1.0,
    },
}  # fmt: skip
# What exact leave-one-out correlation each must reach: EK-FAC and BIF are influence functions here, exactly.
EXACT = ("bif", "ekfac", "kfac", "shampoo", "ekfac_cg", "astra", "if_cg")
ACCURACY = dict.fromkeys(EXACT, 0.95) | dict.fromkeys(("bif_cv", "logra", "trackstar", "trak", "daunce"), 0.8)
SEEDS = {"init_seed": 0, "order_seed": 0}
CONTROLS = {"random": "knows nothing", "repsim": "sees inputs, and nothing of the targets"}


def build(name: str, **options: object) -> Method:
    return load_method(name, **{**SETTINGS.get(name, {}), **options})


# Those whose optional library is not here have nothing to conform.
RUNNABLE = [name for name in available_methods() if build(name).skip(Planted()) is None]


@pytest.fixture(scope="module")
def task() -> Planted:
    return Planted()


@pytest.fixture(scope="module")
def answers(task: Planted, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attribution]:
    return {name: run(build(name), make_problem(task, tmp_path_factory.mktemp(name))) for name in RUNNABLE}


@pytest.mark.parametrize("name", RUNNABLE)
class TestEveryMethod:
    def test_shape_type_and_the_examples_own_scale(self, name, task, answers) -> None:
        answer = answers[name]
        assert answer.scores.shape == (task.num_queries, task.num_train)
        assert answer.scores.dtype == torch.float32
        assert torch.isfinite(answer.scores).all()
        assert answer.scores.device.type == "cpu"
        assert (answer.train_scale >= 0).all()
        torch.testing.assert_close(answer.normalised() * answer.train_scale, answer.scores)

    def test_ranks_exact_leave_one_out(self, name, task, answers, scratch) -> None:
        """Sign, orientation and index order at once: each of them wrong would lose the correlation."""
        if name in CONTROLS:
            pytest.skip(f"the control {CONTROLS[name]}")
        truth = task.exact_inclusion_effect()
        answer = run(build(name, **ACCURATE[name]), make_problem(task, scratch)) if name in ACCURATE else answers[name]
        scores = answer.scores.numpy()
        per_query = [spearmanr(truth[j], scores[j]).statistic for j in range(task.num_queries)]
        assert np.mean(per_query) > ACCURACY.get(name, 0.5)
        assert np.mean([spearmanr(truth[:, i], scores[:, i]).statistic for i in range(task.num_train)]) > 0.4

    def test_permuting_the_training_examples_permutes_the_scores(self, name, task, answers, scratch) -> None:
        order = np.random.default_rng(0).permutation(task.num_train)
        permuted = run(build(name), make_problem(task, scratch, order)).scores
        assert_same(permuted, answers[name].scores[:, order])

    def test_a_part_of_the_training_set_gets_the_same_scores(self, name, task, answers, scratch) -> None:
        if build(name).extra_retrains()[0]:
            pytest.skip("it learns from subsets of what is attributed: of a part they are others")
        chosen = np.array([150, 3, 17])
        part = run(build(name), make_problem(task, scratch, chosen)).scores
        assert_same(part, answers[name].scores[:, chosen])

    def test_batch_sizes_do_not_change_the_scores(self, name, task, answers, scratch) -> None:
        method = build(name)
        names = [f.name for f in fields(method) if not f.metadata.get("key", True) and f.name.endswith("batch_size")]
        sizes = {name: 7 if "query" in name else 60 for name in names}  # of 25 queries and of 200 examples
        # Not in the key of the scores, so it must not change them. EK-FAC's fit_batch_size and, under the Kronecker
        # localiser, bif's gradient_batch_size do (labels are sampled batch by batch), and are in the key.
        sizes = {name: size for name, size in sizes.items() if replace(method, **{name: size}).config == method.config}
        if not sizes:
            pytest.skip("has no batch size")
        other = run(build(name, **sizes), make_problem(task, scratch)).scores
        assert_same(other, answers[name].scores)

    def test_the_same_seed_gives_the_same_scores_and_leaves_the_model_as_it_was(self, name, task, answers, scratch):
        problem = make_problem(task, scratch)
        before = copy.deepcopy(problem.model.state_dict())
        flags = [parameter.requires_grad for parameter in problem.model.parameters()]
        kind, training = type(problem.model), problem.model.training
        torch.testing.assert_close(run(build(name), problem).scores, answers[name].scores)
        assert type(problem.model) is kind
        assert problem.model.training == training
        assert [parameter.requires_grad for parameter in problem.model.parameters()] == flags
        assert not any(module._forward_hooks for module in problem.model.modules())
        for key, value in problem.model.state_dict().items():
            assert torch.equal(value, before[key])


def test_random_scores_differ_between_seeds_and_examples(task: Planted, scratch: Path) -> None:
    one, two = (run(load_method("random"), make_problem(task, scratch, seed=s)).scores for s in (1, 2))
    assert abs(correlation(one, two)) < 0.1


def test_batch_sizes_that_sampled_labels_depend_on_are_in_the_key() -> None:
    kronecker = {"localiser": "kronecker"}
    for name, option, default, options in (
        ("ekfac", "fit_batch_size", 500, {}),
        ("kfac", "fit_batch_size", 500, {}),
        ("bif", "gradient_batch_size", 250, kronecker),
    ):
        usual = load_method(name, **options).config
        assert option not in usual, "as before it was known, so that scores keep their key"
        assert load_method(name, **{option: default}, **options).config == usual
        assert load_method(name, **{option: 7}, **options).config == usual | {option: 7}
    assert load_method("bif", gradient_batch_size=7).config == load_method("bif").config
    assert load_method("kfac", labels="exact", fit_batch_size=7).config == load_method("kfac", labels="exact").config


class TestPerExampleGradients:
    """Hooks, vmap and a plain loop agree on every kind of layer."""

    def test_convolutional_network(self) -> None:
        model = ResNet9(in_channels=1, image_size=8, widths=(4, 6, 6)).eval()
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.running_mean.normal_()
                    module.running_var.uniform_(0.5, 2)
                    module.weight.requires_grad_(True)
        self.check(model, torch.randn(5, 1, 8, 8), torch.randint(0, 10, (5,)))

    def test_language_model(self) -> None:
        model = load_task("tinylm", num_train=10, hidden=32, pretraining_steps=2).build_model(0).eval()
        tokens = torch.randint(0, 50, (3, 13))
        self.check(model, tokens[:, :-1], tokens[:, 1:])

    def test_layers_that_share_a_weight_and_padding(self) -> None:
        class Tied(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Embedding(9, 4, padding_idx=2)
                self.norm = torch.nn.LayerNorm(4)
                self.head = torch.nn.Linear(4, 9)
                self.head.weight = self.embed.weight

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                return self.head(self.norm(self.embed(tokens)))

        tokens = torch.randint(0, 9, (5, 8))
        tokens[:, :2] = 2
        self.check(Tied(), tokens[:, :-1], tokens[:, 1:], vmap_too=False)  # vmap knows no padding
        untied = Tied()
        untied.head = torch.nn.Linear(4, 9)
        kinds = []
        for model in (Tied(), untied):
            gradients = PerExampleGradients(model, CrossEntropy().per_example)
            (pieces,) = gradients.each(tokens, lambda _: [(tokens, None)])
            kinds.append(type(pieces[gradients.names.index("embed.weight")]))
        assert kinds == [Whole, Scattered], "a shared weight is no outer product"

    @pytest.mark.parametrize("batch", [3, 7])
    @pytest.mark.parametrize("with_batch_axis", [False, True])
    def test_position_embeddings(self, batch: int, with_batch_axis: bool) -> None:
        """Seven positions must not be mistaken for seven examples; a row for all examples is repeated for each."""

        class Positions(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.position = torch.nn.Embedding(9, 4), torch.nn.Embedding(7, 4)
                self.head = torch.nn.Linear(4, 9)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                positions = torch.arange(tokens.shape[1])
                positions = positions[None] if with_batch_axis else positions
                return self.head((self.embed(tokens) + self.position(positions)).tanh())

        tokens = torch.randint(0, 9, (batch, 8))
        self.check(Positions(), tokens[:, :-1], tokens[:, 1:], way="hooks" if with_batch_axis else "vmap")

    def test_a_row_for_all_examples_that_is_not_broadcast_falls_back(self) -> None:
        class Mean(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.shared, self.head = torch.nn.Linear(2, 4), torch.nn.Linear(4, 3)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.head(inputs * self.shared(torch.ones(1, 2)).sum(0))

        self.check(Mean(), torch.randn(5, 4), torch.randint(0, 3, (5,)), way="vmap")

    @pytest.mark.cuda
    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize(
        "options",
        [{}, {"padding": 1}, {"stride": 2, "padding": (0, 2)}, {"dilation": (2, 1), "stride": (1, 3)}],
        ids=str,
    )
    def test_patches_on_a_gpu_are_those_on_the_cpu(self, options: dict, channels_last: bool) -> None:
        convolution = torch.nn.Conv2d(3, 4, (2, 3), **options)
        images = torch.randn(5, 3, 7, 8)
        images = images.to(memory_format=torch.channels_last) if channels_last else images
        assert torch.equal(patches(convolution, images.cuda()).cpu(), patches(convolution, images))

    def test_what_vmap_cannot_follow_is_looped_over(self) -> None:
        class Looks(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.linear = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 3)
                self.unused = torch.nn.Linear(2, 2)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                if (inputs > 100).any():  # control flow that looks at values
                    inputs = inputs / 2
                return self.linear(inputs * self.scale)

        compute = PerExampleGradients(Looks(), CrossEntropy().per_example)
        inputs, targets = torch.randn(6, 4), torch.randint(0, 3, (6,))
        gradients = compute((inputs, targets))
        assert compute.way == "loop"
        own = PerExampleGradients(compute.model, CrossEntropy().per_example, ["linear.weight", "linear.bias"])
        torch.testing.assert_close(own((inputs, targets)), gradients[:, 4:19])
        assert own.way == "hooks"
        assert not gradients[:, 19:].any()
        joined = PerExampleGradients(compute.model, CrossEntropy().per_example, join_biases=True)
        assert joined.groups == [("scale",), ("linear.weight", "linear.bias"), ("unused.weight", "unused.bias")]
        (pieces,) = joined.each(inputs, lambda _: [(targets, None)])
        weight_and_bias = torch.cat([gradients[:, 4:16].reshape(6, 3, 4), gradients[:, 16:19, None]], dim=2)
        torch.testing.assert_close(pieces[1].matrices(), weight_and_bias)

    def check(self, model, inputs, targets, way: str = "hooks", vmap_too: bool = True) -> None:
        loss = CrossEntropy()
        for function in (loss.per_example, loss.model_output):
            compute = PerExampleGradients(model, function)
            computed = compute((inputs, targets))
            assert compute.way == way
            by_vmap = compute._by_vmap((inputs, targets)) if vmap_too else computed
            parameters = [model.get_parameter(name) for name in compute.names]
            for i in range(len(inputs)):
                value = mean_over_tokens(function(model(inputs[i : i + 1]), targets[i : i + 1])).sum()
                by_loop = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])
                torch.testing.assert_close(computed[i], by_loop, rtol=1e-3, atol=1e-5)
                torch.testing.assert_close(by_vmap[i], by_loop, rtol=1e-3, atol=1e-5)


def test_bad_options_and_an_unknown_method_are_refused() -> None:
    for name, option, value in (("bif", "chains", 0), ("trak", "projection", 0), ("ekfac", "damping", -1.0)):
        refused(lambda name=name, options={option: value}: load_method(name, **options), option)
        refused(lambda name=name: load_method(name, nonsense=1), "available:")
    refused(lambda: load_method("efkac"), f"available: {', '.join(available_methods())}")


class TestTrak:
    def test_projections_above_the_rank_are_reduced_or_refused(self, scratch: Path) -> None:
        few = make_problem(Planted(num_train=20, num_queries=5, dimension=60), scratch)
        refused(lambda: run(load_method("trak", ridge=0.0), few), "rank 20 at most", "relative_ridge")
        answer = run(load_method("trak"), make_problem(Planted(num_train=30, num_queries=5), scratch / "defaults"))
        assert torch.isfinite(answer.scores).all()
        assert answer.diagnostics["projection"] == 5, "no more than there are parameters"
        wide = make_problem(Planted(num_train=80, num_queries=5, dimension=120), scratch / "library")
        answer = run(load_method("trak", **TRAK.library_settings), wide)
        assert (answer.diagnostics["projection"], answer.diagnostics["kernels"][0]["ridge"]) == (20, 0)

    @pytest.mark.parametrize("num_train", [20, 200], ids=["more numbers than examples", "fewer"])
    def test_a_ridge_is_a_share_of_the_mean_eigenvalue(self, tmp_path: Path, num_train: int) -> None:
        """Of the eigenvalues that are not zero, whichever side is longer; and the scores are ridge regression's."""
        task = Planted(num_train=num_train, num_queries=5, dimension=40)
        problem = make_problem(task, tmp_path)
        answer = run(load_method("trak", relative_ridge=0.5), problem)
        inputs = torch.cat([task.train_data.inputs, torch.ones(num_train, 1)], dim=1).double()
        queries = torch.cat([task.query_data.inputs, torch.ones(5, 1)], dim=1).double()
        mean = inputs.square().sum() / min(inputs.shape)
        kernel = answer.diagnostics["kernels"][0]
        assert kernel["mean_eigenvalue"] == pytest.approx(float(mean), rel=1e-4)
        assert kernel["ridge"] == pytest.approx(0.5 * float(mean), rel=1e-4)
        weights = torch.linalg.solve(inputs.T @ inputs + 0.5 * mean * torch.eye(41), inputs.T)
        slopes = [
            (problem.model(e.inputs).squeeze(1) - e.targets).detach().double()
            for e in (task.query_data, task.train_data)
        ]
        expected = -slopes[0][:, None] * (queries @ weights) * slopes[1]
        scale = (answer.scores * expected).sum() / expected.square().sum()
        assert scale > 0
        torch.testing.assert_close(answer.scores.double(), scale * expected, rtol=1e-3, atol=1e-4 * float(scale))

    def test_dense_projections_are_trakers_own(self) -> None:
        from trak.projectors import BasicProjector, ProjectionType

        from baselines.support.projectors import make_projector

        rows = torch.randn(4, 700)
        for width in (40, 250):  # one block, and several with a last one cut short
            theirs = BasicProjector(700, width, 3, ProjectionType.normal, CPU)
            ours = make_projector("dense", 700, width, 3, CPU)
            for model_id in (0, 1):
                torch.testing.assert_close(ours.project(rows, model_id), theirs.project(rows, model_id))
            ours.free_memory()
            torch.testing.assert_close(ours.project(rows, 1), theirs.project(rows, 1))


@pytest.mark.parametrize(
    "name", ["bif", "bif_cv", "bif_devinterp", "datamodel", "ekfac", "kfac", "shampoo", "trak", "gradsim", "random"]
)
def test_memory_is_planned_and_papers_and_grids_are_there(name: str) -> None:
    method = load_method(name)
    size = Size(num_train=100, num_attributed=100, num_queries=10, num_parameters=10_000, device=CPU)
    sizes = [size, replace(size, num_train=10**9, num_attributed=10**9)]
    assert 0 < method.memory_bytes(sizes[0]) < 2**30 < method.memory_bytes(sizes[1])
    assert method.paper
    grids = [method.grid] if isinstance(method.grid, dict) else list(method.grid)
    settings = [dict(zip(grid, values)) for grid in grids for values in product(*grid.values())]
    assert len(settings) <= 20
    papers = getattr(method, "paper_settings", {})
    of_papers = list(papers.values()) if name in ("bif", "bif_cv") else [papers]  # bif has one for every kind of data
    for setting in [*settings, *of_papers, getattr(method, "library_settings", {})]:
        load_method(name, **setting)


@pytest.mark.parametrize("name", ["ekfac", "kfac", "shampoo", "trak"])
def test_a_kept_fit_gives_the_same_scores_for_other_queries(name: str, task: Planted, tmp_path: Path) -> None:
    """A fit serves other queries, and whatever of the options its key leaves out."""
    for k in range(3):
        (tmp_path / str(k)).mkdir()
    first, second, third = (make_problem(task, tmp_path / str(k)) for k in range(3))
    method = build(name)
    kept = method.pack_fit(method.fit(replace(first, queries=task.query_data.select(range(3)))))
    written = save({k: v.contiguous() for k, v in kept.items()})
    other = build(name, **({"damping": 0.1} if name != "trak" else {"relative_ridge": 3.0}))
    assert other.fit_config == method.fit_config  # type: ignore[attr-defined]
    of_fit = {"ekfac": {"strategy": "kfac"}, "trak": {"projection": 7}}.get(name, {"labels": "exact"})
    assert build(name, **of_fit).fit_config != method.fit_config  # type: ignore[attr-defined]
    again = other.score(second, other.unpack_fit(second, load(written)))
    fresh = run(other, third)
    assert torch.equal(again.scores, fresh.scores)
    assert torch.equal(again.train_scale, fresh.train_scale)
