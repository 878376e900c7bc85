"""Per-token scores: the token-by-token matrix against kept traces, against the sequence level, and the page of them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from baselines.bif.engine import Workbench
from baselines.bif.method import BIF
from baselines.bif.tokens import token_bif
from baselines.method import Problem
from bench.inspect.__main__ import main
from bench.inspect.tokens import strongest_pairs
from retrain.examples import Examples
from retrain.tasks.tinylm import TinyLM
from tests.helpers.browser import CHROMEDRIVER, CHROMIUM, Browser
from tests.helpers.planted import Planted, make_problem
from tests.helpers.problems import problem_of, refused

METHOD = BIF(chains=2, draws=17, burn_in=2, step_size=3e-4, n_beta=300.0, gamma=1000.0, minibatch=10)
SMALL = {"length": 8, "num_train": 24, "num_queries": 10, "hidden": 16, "layers": 1, "heads": 2}
SMALL["pretraining_steps"] = 40


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    task = TinyLM(**SMALL)
    chosen = np.arange(20)[::-1]
    return problem_of(task, tmp_path_factory.mktemp("tokens"), queries=range(6), chosen=chosen, seed=1)


EVERY_PAIR = [(query, train) for query in range(6) for train in range(20)]


def test_the_average_over_tokens_is_the_sequence_score(problem: Problem) -> None:
    """Implementations A and B on the same draws, and A is what the method itself gives."""
    tokens = token_bif(METHOD, problem, EVERY_PAIR)
    averaged = torch.stack([matrix.double().mean() for matrix in tokens.covariance])
    assert spearmanr(averaged, tokens.sequence).statistic >= 0.999
    torch.testing.assert_close(averaged, tokens.sequence, rtol=1e-4, atol=1e-5 * float(tokens.sequence.abs().max()))
    scores = METHOD.score(problem, None).scores.flatten()
    torch.testing.assert_close(averaged.float(), scores, rtol=1e-3, atol=1e-4 * float(scores.abs().max()))
    assert spearmanr(averaged, scores).statistic >= 0.999


def test_tokens_see_the_localiser_that_sequences_see(problem: Problem) -> None:
    method = BIF(**{**METHOD.__dict__, "localiser": "kronecker"})
    pairs = EVERY_PAIR[:20]
    torch.manual_seed(0)
    averaged = torch.stack([matrix.mean() for matrix in token_bif(method, problem, pairs).covariance])
    torch.manual_seed(0)  # the curvature's labels are drawn from the global generator
    scores = method.score(problem, method.fit(problem)).scores[0]
    torch.testing.assert_close(averaged, scores, rtol=1e-3, atol=1e-3 * float(scores.abs().max()))
    refused(lambda: token_bif(BIF(control_variate=True), problem, pairs), "control_variate=false")


@pytest.mark.parametrize("centring", ["pooled", "chain"])
def test_streamed_sums_are_the_kept_traces_covariance(problem: Problem, centring: str) -> None:
    method = BIF(**{**METHOD.__dict__, "centring": centring})
    pairs = [(4, 3), (0, 19), (4, 7)]
    tokens = token_bif(method, problem, pairs)
    parts = problem.queries, problem.attributed
    both = Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))
    workbench = Workbench(method, problem.task, problem.model, problem.train, both)
    with torch.no_grad():
        losses = [
            [problem.task.loss(workbench.model, (both.inputs, both.targets)).numpy().copy() for _ in draws]
            for draws in (workbench.draws(problem.seed, chain) for chain in range(method.chains))
        ]
    traces = np.array(losses, dtype=np.float64)  # (chains, draws, sequences, tokens)
    traces -= traces.mean((0, 1) if centring == "pooled" else 1, keepdims=True)
    freedom = 34 - (1 if centring == "pooled" else 2)
    for k, (query, train) in enumerate(pairs):
        expected = -np.einsum("cdq,cdt->qt", traces[:, :, query], traces[:, :, 6 + train]) / freedom
        spreads = [np.sqrt((traces[:, :, s] ** 2).sum((0, 1)) / freedom) for s in (query, 6 + train)]
        np.testing.assert_allclose(tokens.covariance[k], expected, rtol=1e-3, atol=2e-5 * np.abs(expected).max())
        correlation = expected / spreads[0][:, None] / spreads[1]
        np.testing.assert_allclose(tokens.correlation[k], correlation, rtol=1e-3, atol=1e-4)
        assert tokens.correlation[k].abs().max() <= 1.0001


def test_blocks_of_pairs_see_the_same_draws(problem: Problem) -> None:
    pairs = [(0, 1), (5, 0)]
    at_once, in_blocks = token_bif(METHOD, problem, pairs), token_bif(METHOD, problem, pairs, block=1)
    assert in_blocks.diagnostics["blocks"] == 2
    for one, other in zip(at_once.covariance, in_blocks.covariance, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max()))


def test_bad_questions_are_one_line_and_a_chain_that_diverges_is_named(problem, tmp_path, monkeypatch) -> None:
    diverging = BIF(chains=1, draws=5, step_size=50.0, gamma=1e4, n_beta=200.0, minibatch=10)
    with pytest.raises(FloatingPointError, match="0 of 1 bif chains are healthy"):
        token_bif(diverging, problem, [(0, 0)])
    refused(lambda: token_bif(METHOD, problem, [(6, 0)]), "pair 6:0 is out of range; expected a query below 6")
    refused(lambda: token_bif(METHOD, problem, []), "no pair was given")
    refused(lambda: token_bif(METHOD, make_problem(Planted(), tmp_path), [(0, 0)]), "has no tokens")
    monkeypatch.setattr("baselines.bif.tokens.free_bytes", lambda _: 1000)
    refused(lambda: token_bif(METHOD, problem, [(0, 0)]), "GiB free may be used; take fewer pairs")


# ---- the command and its page ----
def test_the_strongest_pairs_are_of_different_sequences() -> None:
    scores = np.array([[-9.0, 1.0, 2.0], [300.0, -100.0, 90.0], [1.0, 8.0, -1.0]])
    same = np.zeros((3, 3), dtype=bool)
    same[0, 0] = True
    assert strongest_pairs(scores, same, 3) == [(2, 1), (1, 0), (0, 2)]
    assert strongest_pairs(scores, ~np.eye(3, dtype=bool), 3) == [(0, 0), (1, 1), (2, 2)]
    assert strongest_pairs(scores, np.ones((3, 3), dtype=bool), 3) == []


def command(out: Path, *extra: str) -> int:
    task = [part for name, value in SMALL.items() for part in ("--set", f"tinylm.{name}={value}")]
    place = ["--device", "cpu", "--cache", str(out / "cache"), "--out", str(out)]
    return main(["tokens", "--task", "tinylm", *task, *place, *extra])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    options = ("draws=20", "chains=2", "gamma=1e3", "step_size=3e-4")
    sampling = [word for option in options for word in ("--set", f"bif.{option}")]
    assert command(out, "--top", "2", *sampling) == 0
    return out


def test_the_command_writes_its_record_and_its_numbers(written: Path) -> None:
    record = json.loads((written / "tokens.json").read_text())
    arrays = np.load(written / "tokens.npz")
    assert record["n"] == {"train": 24, "queries": 8, "tokens": 8, "pairs": 2}
    assert record["diagnostics"]["num_draws"] == 40
    assert record["command"].startswith("python -m bench.inspect tokens --task tinylm")
    assert record["versions"]["torch"]
    for pair in record["pairs"]:
        name = f"{pair['query']}-{pair['train']}"
        matrix = arrays[f"covariance-{name}"]
        assert matrix.shape == (len(pair["query_tokens"]), len(pair["train_tokens"])) == (8, 8)
        assert matrix.astype(np.float64).mean() == pytest.approx(pair["score"], rel=1e-3)


def test_ekfac_writes_a_score_for_every_training_token(tmp_path: Path) -> None:
    assert command(tmp_path, "--methods", "ekfac", "--pairs", "1:5", "2:0") == 0
    record, arrays = json.loads((tmp_path / "tokens.json").read_text()), np.load(tmp_path / "tokens.npz")
    assert record["diagnostics"]["largest_gap_between_sums_and_scores"] < 1e-3
    assert arrays["score-1-5"].shape == (1, 8)
    assert arrays["score-1-5"].sum() == pytest.approx(record["pairs"][0]["score"], rel=1e-2)


def test_bad_commands_are_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    place = f"--device cpu --out {tmp_path} --cache {tmp_path}/cache"
    tiny = "--task tinylm --set tinylm.num_train=24 --set tinylm.pretraining_steps=2"
    for words, message in (
        (f"{tiny} --pairs 0:1", "there is no query 0 here"),  # a tune query
        (f"{tiny} --pairs 1:99", "there is no training sequence 99 here; 24 are"),
        ("--task digits", "has no tokens"),
    ):
        assert message in refused(main, f"tokens {words} {place}".split())


@pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="no Chromium and chromedriver here")
def test_the_page_colours_tokens_by_pointer_and_by_keyboard(written: Path) -> None:
    coloured = "return [...document.querySelectorAll('#{} .token')].map((t) => t.style.background)"
    record = json.loads((written / "tokens.json").read_text())
    first = record["pairs"][0]
    matrix = np.load(written / "tokens.npz")[f"correlation-{first['query']}-{first['train']}"]
    with Browser() as browser:
        for theme in ("light", "dark"):
            browser.look(1100, 800, theme)
            browser.open(written / "tokens.html")
            browser.run("document.querySelectorAll('#query .token')[3].click()")
            colours = browser.run(coloured.format("train"))
            strongest = int(np.abs(matrix[3]).argmax())
            assert ("--helps" if matrix[3, strongest] < 0 else "--harms") in colours[strongest]
            assert browser.run(coloured.format("query")) == [""] * 8
            assert "Query token 4" in browser.run("return document.getElementById('said').textContent")
        key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}))"
        browser.run(key % "Escape")
        browser.run("document.querySelectorAll('#train .token')[0].focus()")
        browser.run(key % "ArrowRight")
        browser.run(key % "Enter")
        assert "Training token 2" in browser.run("return document.getElementById('said').textContent")
        assert browser.run("return document.querySelectorAll('[aria-pressed=true]').length") == 1
        assert any(browser.run(coloured.format("query")))
        assert browser.console() == []
