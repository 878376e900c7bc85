"""The datamodel on planted linear problems: it finds the weights, uses a right prior, and survives a wrong one."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from baselines.datamodel import Datamodel, normal_scores
from baselines.method import Method, Problem, Retrained, Size, load_method
from baselines.support import subset_regression
from baselines.support.nested import nested_method, nested_text
from baselines.support.subset_data import SubsetData
from baselines.support.subset_regression import _evidence, _posterior, regress
from retrain.subsets import masks as draw
from tests.helpers.planted import Planted
from tests.helpers.problems import CPU, problem_of, refused
from tests.helpers.problems import run as answer

EXAMPLES, QUERIES = 120, 30


def planted(num_subsets: int, noise: float = 3.0, stream: str = "learn") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """masks, losses and the planted weights (queries, examples)."""
    generator = np.random.default_rng(5)
    weights = generator.normal(size=(QUERIES, 6)) @ generator.normal(size=(6, EXAMPLES))
    kept = draw(1, num_subsets, 0.5, EXAMPLES, stream=stream)  # type: ignore[arg-type]
    chance = np.random.default_rng([9, num_subsets]).normal(size=(num_subsets, QUERIES))
    return kept, (4.0 + kept @ weights.T + noise * chance).astype(np.float32), weights


def guess(weights: np.ndarray, noise: float) -> torch.Tensor:
    """A prior: the weights and noise."""
    return torch.from_numpy(weights + noise * np.random.default_rng(2).normal(size=weights.shape)).float()


def agreement(found: torch.Tensor, weights: np.ndarray) -> float:
    """Mean over queries of the correlation with what the planted weights predict for other subsets."""
    kept = draw(1, 300, 0.5, EXAMPLES, stream="report").astype(float)
    made, truth = kept @ found.double().numpy().T, kept @ weights.T
    return float(np.mean([np.corrcoef(made[:, j], truth[:, j])[0, 1] for j in range(len(weights))]))


class TestRegression:
    @pytest.mark.parametrize("num_subsets", [600, 1500])
    def test_it_finds_the_planted_weights(self, num_subsets: int) -> None:
        kept, losses, weights = planted(num_subsets, noise=1.0)
        found = regress(kept, losses, device=CPU)
        assert agreement(found.weights, weights) > 0.99
        # Subsets of one size say nothing about a constant that is added to all weights.
        expected = torch.from_numpy(weights - weights.mean(1, keepdims=True)).float()
        error = (found.weights - found.weights.mean(1, keepdim=True) - expected).norm() / expected.norm()
        assert error < 0.1

    @pytest.mark.parametrize("num_subsets", [110, 400])
    @pytest.mark.parametrize("bias", [1.0, 4.0])
    def test_what_some_subsets_chose_is_settled_on_all(self, monkeypatch, num_subsets: int, bias: float) -> None:
        """The same as if all had chosen but for how much of the identity there is: the likeliest that was tried."""
        kept, losses, weights = planted(num_subsets)
        chance = np.random.default_rng(3).normal(size=weights.shape)
        priors = {"good": torch.from_numpy(weights + bias * chance).float(), "bad": torch.from_numpy(chance).float()}
        everybody = regress(kept, losses, priors, device=CPU)
        monkeypatch.setattr(subset_regression, "SEARCHED", 60)
        some = regress(kept, losses, priors, device=CPU)
        for name in ("prior_scores", "prior_covariance", "prior_power"):
            assert some.diagnostics[name] == everybody.diagnostics[name]
        assert some.diagnostics["log_evidence"] >= everybody.diagnostics["log_evidence"] - 2 * QUERIES
        assert agreement(some.weights, weights) > agreement(everybody.weights, weights) - 0.01

    @pytest.mark.parametrize("num_subsets", [40, 119, 121, 400])
    def test_penalties_are_as_good_as_the_best_for_the_truth(self, num_subsets: int) -> None:
        kept, losses, weights = planted(num_subsets)
        centred = kept - kept.mean(0)
        inner, products = centred.T @ centred, centred.T @ (losses - losses.mean(0))
        ridges = [np.linalg.solve(inner + penalty * np.eye(EXAMPLES), products).T for penalty in np.logspace(-2, 3, 30)]
        best = max(agreement(torch.from_numpy(ridge), weights) for ridge in ridges)
        assert agreement(regress(kept, losses, device=CPU).weights, weights) > best - 0.02

    @pytest.mark.parametrize("num_subsets", [40, 100, 400])
    def test_a_right_prior_helps_and_a_wrong_one_hurts_little(self, num_subsets: int) -> None:
        kept, losses, weights = planted(num_subsets)
        right, wrong = guess(weights, 3.0), guess(0 * weights, 1.0)
        alone = agreement(regress(kept, losses, device=CPU).weights, weights)
        helped, hurt = (agreement(regress(kept, losses, {"p": p}, device=CPU).weights, weights) for p in (right, wrong))
        assert helped > alone + (0.05 if num_subsets <= 100 else 0.0)
        assert helped > agreement(right, weights)
        assert hurt > alone - 0.03

    def test_a_prior_of_the_other_sign_or_another_unit_is_the_same_prior(self) -> None:
        kept, losses, weights = planted(80)
        prior = guess(weights, 1.0)
        made = [regress(kept, losses, {"p": scale * prior}, device=CPU).weights for scale in (1.0, 1e-6, -1e4)]
        for other in made[1:]:
            torch.testing.assert_close(other, made[0], rtol=1e-3, atol=1e-3)

    def test_it_is_the_same_either_way_round_and_in_blocks_of_queries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """m x m, or n x n where there are more subsets than examples."""
        kept, losses, weights = planted(200)
        prior = {"p": guess(weights, 1.0)}
        one = regress(kept, losses, prior, device=CPU)
        with monkeypatch.context() as patch:
            patch.setattr("baselines.support.subset_data.BLOCK_BYTES", 7 * 8 * EXAMPLES)
            torch.testing.assert_close(regress(kept, losses, prior, device=CPU).weights, one.weights)
        by_subsets = lambda data, covariance, identity: data._by_subsets(covariance, identity)  # noqa: E731
        monkeypatch.setattr("baselines.support.subset_data.SubsetData.spectrum", by_subsets)
        other = regress(kept, losses, prior, device=CPU)
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-5)
        assert one.diagnostics["log_evidence"] == pytest.approx(other.diagnostics["log_evidence"], rel=1e-6)

    def test_constant_queries_and_empty_priors_are_no_trouble(self) -> None:
        kept, losses, weights = planted(50)
        losses[:, 3] = 2.0
        prior = torch.from_numpy(weights).float()
        prior[5] = 0.0
        found = regress(kept, losses, {"p": prior}, device=CPU).weights
        assert torch.isfinite(found).all()
        assert (found[3] == 0).all()
        assert found[5].norm() > 0
        empty = regress(kept, losses, {"p": 0 * prior}, device=CPU).weights
        torch.testing.assert_close(empty, regress(kept, losses, device=CPU).weights)

    @pytest.mark.parametrize("num_subsets", [40, 400])
    def test_a_given_covariance_is_used_where_it_is_likelier_and_nonsense_is_left_out(self, num_subsets: int) -> None:
        kept, losses, weights = planted(num_subsets)
        prior = guess(weights, 6.0)
        own = torch.from_numpy(weights.T @ weights)
        alone, given, both = (
            regress(kept, losses, {"p": prior}, covariances, device=CPU)
            for covariances in (None, {"train": own}, {"queries": None, "train": own})
        )
        assert agreement(given.weights, weights) > agreement(alone.weights, weights) + 0.01
        assert both.diagnostics["prior_covariance"] == "train"
        assert torch.equal(both.weights, given.weights)
        nonsense = torch.from_numpy(np.random.default_rng(4).normal(size=(EXAMPLES, EXAMPLES)))
        beside = regress(kept, losses, {"p": prior}, {"queries": None, "train": nonsense}, device=CPU)
        assert torch.equal(alone.weights, beside.weights)

    def test_queries_that_are_alike_share_strength(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Six kinds of queries, and a prior that knows the kinds well and their weights badly."""
        kept, _, _ = planted(60)
        generator = np.random.default_rng(8)
        kinds = generator.normal(size=(6, EXAMPLES))
        of_query = np.arange(QUERIES) % 6
        weights = kinds[of_query]
        losses = (kept @ weights.T + 5.0 * generator.normal(size=(60, QUERIES))).astype(np.float32)
        guess = (kinds + 2.0 * generator.normal(size=kinds.shape))[of_query]
        prior = torch.from_numpy(guess + 0.3 * generator.normal(size=weights.shape)).float()
        shared = regress(kept, losses, {"p": prior}, device=CPU)
        monkeypatch.setattr("baselines.support.subset_regression.QUERY_POWERS", ())
        separate = regress(kept, losses, {"p": prior}, device=CPU)
        assert "prior_shared" in shared.diagnostics
        assert agreement(shared.weights, weights) > agreement(separate.weights, weights) + 0.03

    def test_the_queries_own_basis_changes_nothing(self) -> None:
        kept, losses, weights = planted(50)
        data = SubsetData(kept, losses, CPU)
        turned = data.in_basis(torch.eye(QUERIES, dtype=torch.float64))
        mean = torch.from_numpy(weights).float()
        spectrum = data.spectrum(None, 1.0)
        own, same = _evidence(data, spectrum, mean), _evidence(turned, spectrum, turned.turned_mean(mean))
        assert same.total == pytest.approx(own.total, rel=1e-6)
        torch.testing.assert_close(
            _posterior(turned, same).weights, _posterior(data, own).weights, rtol=1e-3, atol=1e-4
        )


# ---- the method ----
def problem(task: Planted, folder: Path, retrained: Retrained | None) -> Problem:
    return problem_of(task, folder, seed=1, retrained=None if retrained is None else lambda: retrained)


def test_a_prior_needs_fewer_retrains(scratch: Path) -> None:
    task = Planted()
    few = task.retrained(np.arange(task.num_train), 60)
    judged = Retrained(draw(0, 300, 0.8, task.num_train), np.zeros((300, task.num_queries), dtype=np.float32))
    models = [task.train(np.flatnonzero(kept), init_seed=0, order_seed=0, device=CPU) for kept in judged.masks]
    truth = torch.stack([task.losses(model, task.query_data, CPU) for model in models]).numpy()

    def lds(method: Method) -> float:
        made = judged.masks @ answer(method, problem(task, scratch, few)).scores.numpy().T
        return float(np.mean([np.corrcoef(made[:, j], truth[:, j])[0, 1] for j in range(task.num_queries)]))

    plain, prior, gradsim = (
        lds(load_method(name, **options))
        for name, options in (("datamodel", {}), ("datamodel", {"prior": "gradsim"}), ("gradsim", {}))
    )
    assert prior > plain + 0.1
    assert prior > gradsim


def test_the_covariance_is_of_the_priors_own_scores_among_training_examples(scratch: Path, monkeypatch) -> None:
    task = Planted()
    asked = problem(task, scratch, task.retrained(np.arange(task.num_train), 60))
    spy = Mock(side_effect=regress)
    monkeypatch.setattr("baselines.datamodel.regress", spy)
    short = "bif+draws:60+chains:2+gamma:100.0+n_beta:10.0+step_size:0.001"
    for prior in ("gradsim", short):
        for covariance in ("queries", "train", "likelier"):
            answer(load_method("datamodel", prior=prior, covariance=covariance), asked)
    method = load_method("datamodel", prior="gradsim")
    assert torch.equal(answer(method, asked).scores, answer(method, asked).scores), "the same bits again"
    seen = [call.args[3] for call in spy.call_args_list[:6]]
    names = [["queries"], ["train"], ["queries", "train"]]
    assert [list(one) for one in seen] == 2 * names
    gradsim = load_method("gradsim")
    among = gradsim.score(replace(asked, queries=asked.attributed), None).scores
    assert torch.equal(seen[1]["train"], -among)
    assert torch.equal(seen[2]["train"], -among)
    traces = answer(replace(nested_method(short), keep_traces=True), asked).arrays["loss_traces"]
    expected = torch.cov(traces[..., : task.num_train].flatten(0, 1).double().T)
    torch.testing.assert_close(seen[4]["train"].double(), expected, rtol=1e-3, atol=1e-6)


def test_losses_that_are_not_finite_are_left_out(scratch: Path) -> None:
    task = Planted()
    found, rest, method = task.retrained(np.arange(task.num_train), 40), np.arange(40) != 7, load_method("datamodel")
    broken = Retrained(found.masks, np.where(rest[:, None], found.losses, np.nan))
    made = answer(method, problem(task, scratch, broken))
    assert made.diagnostics["retrains"] == 39
    expected = answer(method, problem(task, scratch, Retrained(found.masks[rest], found.losses[rest])))
    assert torch.equal(made.scores, expected.scores)
    with pytest.raises(FloatingPointError, match="0 of 40 retrained models"):
        answer(method, problem(task, scratch, Retrained(found.masks, np.nan * found.losses)))
    refused(lambda: answer(method, problem(task, scratch, None)), "here are none")


def test_ranks_are_blind_to_monotone_transforms_and_keep_the_losses_unit() -> None:
    losses = planted(80)[1]
    made = normal_scores(losses)
    assert np.array_equal(np.argsort(made, axis=0), np.argsort(losses, axis=0))
    np.testing.assert_allclose(made.std(axis=0), losses.std(axis=0), rtol=0.05)
    skewed = normal_scores(np.exp(losses / 4))
    np.testing.assert_allclose(skewed / skewed.std(axis=0), made / made.std(axis=0), rtol=1e-4, atol=1e-5)
    many = np.tile(losses, 40)  # more than are ranked at once
    np.testing.assert_allclose(normal_scores(many), np.tile(made, 40), rtol=1e-5, atol=1e-6)


class TestSpelling:
    def test_options_stand_behind_a_plus(self) -> None:
        options = {"damping": 1e4, "strategy": "kfac"}
        assert nested_method("ekfac+damping:1e+4+strategy:kfac") == load_method("ekfac", **options)
        assert nested_text("ekfac", {**options, "relative_damping": 0.1}) == "ekfac+strategy:kfac+damping:10000.0"
        assert nested_method(nested_text("ekfac", {"damping": 1e4})) == load_method("ekfac", damping=1e4)
        plain, one, two = (Datamodel(prior=prior) for prior in ("none", "gradsim", "random"))
        assert len({method.source for method in (plain, one, two)}) == 3, "another prior is another key"
        assert len({str(method.config) for method in (plain, one, two)}) == 3

    def test_what_makes_no_sense_is_refused(self) -> None:
        for options, words in (
            ({"retrains": 3}, "retrains is 3; expected at least 10"),
            ({"alpha": 1.0}, "alpha is 1.0; expected a fraction"),
            ({"prior": "efkac"}, "unknown method"),
            ({"prior": "ekfac+nonsense:1"}, "has no option"),
            ({"prior": "datamodel"}, "retrains by itself"),
            ({"covariance": "test"}, "available: likelier, queries, train"),
        ):
            refused(lambda options=options: load_method("datamodel", **options), words)


def test_the_largest_problem_fits_into_16_gib() -> None:
    size = Size(num_train=47_500, num_attributed=4_750, num_queries=10_000, num_parameters=2_000_000, device=CPU)
    for prior in ("none", "gradsim"):
        methods = [load_method("datamodel", retrains=count, prior=prior) for count in (500, 4_000, 8_000)]
        few, more, most = (method.memory_bytes(size) for method in methods)
        assert 2**28 < few <= more <= most < 16 * 2**30
    assert load_method("datamodel").memory_bytes(replace(size, num_attributed=10**8)) > 2**40
