"""bench.scaling: laws with known answers, points of two tiny models, and a sweep that survives what goes wrong."""

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bench import scaling, scaling_point
from bench.scaling_estimate import crossovers, read_rows
from bench.scaling_fits import (
    Curve,
    Estimator,
    Setting,
    bilinear,
    crossover_parameters,
    crossover_queries,
    draw_flops,
    fit_line,
)
from bench.scaling_problem import ByteTokenizer, CompletionLoss, ScalingTask, load_queries, query_examples
from bench.scaling_rows import COLUMNS, make_row
from retrain.errors import UsageError
from retrain.examples import Examples
from retrain.models.pythia_suite import SUITE, Configuration, build_random, suite_configuration

pytestmark = pytest.mark.usefixtures("light_garbage_collection")

KNOWN = {
    "14m": 14_067_712, "70m": 70_426_624, "160m": 162_322_944, "410m": 405_334_016, "1b": 1_011_781_632,
    "1.4b": 1_414_647_808, "2.8b": 2_775_208_960, "6.9b": 6_857_302_016, "12b": 11_846_072_320,
}  # fmt: skip


# ---- shapes ----


def test_parameter_counts_are_the_published_ones() -> None:
    assert {name: SUITE[name].num_parameters for name in KNOWN} == KNOWN


def test_a_built_model_has_the_counts_and_names_that_its_configuration_says() -> None:
    configuration = Configuration(name="t", hidden=32, layers=2, heads=2, intermediate=64, vocabulary=96)
    model = build_random(configuration, dtype=torch.float32)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert sum(math.prod(shape) for shape in shapes.values()) == configuration.num_parameters
    embedding = next(shape for name, shape in shapes.items() if "embed_in" in name)
    assert configuration.num_parameters - math.prod(embedding) == configuration.num_token_parameters
    weights = [shape for name, shape in shapes.items() if ".layers." in name and len(shape) == 2]
    assert sorted(weights) == sorted((d_out, d_in) for d_in, d_out in configuration.linear_shapes)
    again = build_random(configuration, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_factors_of_the_largest_model_of_the_paper_take_41_gib() -> None:
    assert SUITE["2.8b"].factor_bytes(2) / 2**30 == pytest.approx(41, abs=0.5)  # sec:appendix-scaling


def test_unknown_model_is_one_line() -> None:
    with pytest.raises(UsageError, match='unknown model "3b"; expected one of 14m'):
        suite_configuration("3b")


# ---- the problem ----


def test_only_the_completion_counts() -> None:
    examples = query_examples([("ab", "cd"), ("a", "bcdefghij")], ByteTokenizer(256), tokens=6)
    assert examples.inputs[0].tolist() == [97, 98, 99, 0, 0, 0]
    assert examples.targets[0].tolist() == [-100, 99, 100, -100, -100, -100]
    assert examples.targets[1].tolist() == [98, 99, 100, 101, 102, 103]
    outputs = torch.randn(2, 6, 256)
    losses = CompletionLoss().per_example(outputs, examples.targets).mean(1)
    logs = outputs.log_softmax(-1)
    assert losses[0] == pytest.approx(float(-(logs[0, 1, 99] + logs[0, 2, 100]) / 2), rel=1e-5)
    longer = query_examples([("ab", "cd")], ByteTokenizer(256), tokens=9)
    padded = torch.cat([outputs[:1], torch.randn(1, 3, 256)], dim=1)
    assert CompletionLoss().per_example(padded, longer.targets).mean(1)[0] == pytest.approx(float(losses[0]), rel=1e-5)


def test_our_queries_are_eighteen_and_a_bad_file_is_named(tmp_path: Path) -> None:
    assert len(load_queries(None)) == 18
    (tmp_path / "q.json").write_text('[{"prompt": "a"}]')
    with pytest.raises(UsageError, match="expected a JSON list"):
        load_queries(str(tmp_path / "q.json"))


def test_low_memory_ekfac_gives_the_scores_of_plain_ekfac(scratch: Path, monkeypatch) -> None:
    from baselines.ekfac import EKFAC
    from baselines.method import Problem
    from bench.scaling_ekfac import LowMemoryEKFAC

    configuration = Configuration(name="t", hidden=16, layers=1, heads=2, intermediate=32, vocabulary=64)
    tokens = torch.randint(64, (6, 9), generator=torch.Generator().manual_seed(0))
    train = Examples(tokens[:, :-1], tokens[:, 1:])
    found = []
    drawn = torch.randint(64, (6 * 8,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("baselines.ekfac.sample_tokens", lambda *_: drawn)  # both fit on the same labels
    plain = EKFAC(self_influence=False, fit_batch_size=6, damping=1e-8)
    for number, method in enumerate((plain, LowMemoryEKFAC(fit_batch_size=6))):
        folder = scratch / str(number)
        folder.mkdir()
        problem = Problem(
            task=ScalingTask(train_examples=train, query_examples=train.select([0, 1])),
            model=build_random(configuration, dtype=torch.float32), train=train, attributed_indices=np.arange(6),
            queries=train.select([0, 1]), seed=0, device=torch.device("cpu"), scratch=folder,
        )  # fmt: skip
        torch.manual_seed(0)
        found.append(method.score(problem, method.fit(problem)).scores)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))


# ---- laws with known answers ----


def test_a_line_gives_back_its_law_and_covers_it_under_noise() -> None:
    line = fit_line([4, 8, 16], [1.4, 1.8, 2.6])
    assert (line.intercept, line.slope) == (pytest.approx(1.0), pytest.approx(0.1))
    assert line.linear
    assert not fit_line([1, 2, 4, 8], [1, 4, 16, 64]).linear
    assert fit_line([1, 2], [1.0, 2.2]).intercept == 0.0
    generator = np.random.default_rng(0)
    sizes = np.array([4.0, 8.0, 16.0, 32.0])
    inside = 0
    for _ in range(300):
        values = (1 + 0.1 * sizes) * (1 + 0.02 * generator.normal(size=4))
        low, high = fit_line(sizes, values).interval(2000)
        inside += low <= 201 * (1 + 0.02 * generator.normal()) <= high
    assert 0.90 <= inside / 300 <= 0.99
    with pytest.raises(ValueError, match="two sizes"):
        fit_line([4, 4], [1, 2])


def test_scoring_costs_are_told_apart() -> None:
    points = [(n, q, 0.5 + 0.01 * n + 0.2 * q + 0.003 * n * q) for n in (200, 400) for q in (9, 18)]
    assert bilinear(points) == pytest.approx((0.5, 0.01, 0.2, 0.003), rel=1e-3)


def test_the_floor_of_a_draw() -> None:
    # 2 d per token of 418 sequences and 6 d per token of 32, 150 tokens each
    assert draw_flops(1e9, 400, 18, 32, 150) == 1e9 * 150 * (2 * 418 + 6 * 32)
    assert draw_flops(1e9, 10, 18, 32, 150) == 1e9 * 150 * (2 * 28 + 6 * 10)  # no minibatch beyond the training set


def test_a_curve_is_exact_on_a_power_law() -> None:
    curve = Curve([1e7, 1e8, 1e9], [2e7**0.7, 2e8**0.7, 2e9**0.7])
    assert curve.at(5e8) == pytest.approx(1e9**0.7)
    assert curve.at(1e11) == pytest.approx(2e11**0.7)
    assert curve.slope == pytest.approx(0.7)
    assert curve.error == pytest.approx(0, abs=1e-9)


LAW = Setting(train=400, queries=18, tokens=150, draws=2000, fit_examples=400)


def bif_law(configuration: Configuration, setting: Setting) -> float:
    flops = draw_flops(configuration.num_token_parameters, setting.train, setting.queries, 32, setting.tokens)
    return 2.0 + setting.draws * 1.5 * flops / 7e14


def ekfac_parts(configuration: Configuration, setting: Setting) -> dict[str, float]:
    d = configuration.num_token_parameters
    return {
        "eigen": 3e-11 * configuration.eigen_cost,
        "per_example": 2e-12 * d * setting.tokens,
        "score_per_train": 1e-11 * d,
        "score_per_query": 5e-11 * d,
        "score_per_pair": 1e-13 * d,
    }


def ekfac_law(configuration: Configuration, setting: Setting) -> float:
    parts = ekfac_parts(configuration, setting)
    n, q = setting.train, setting.queries
    score = parts["score_per_train"] * n + parts["score_per_query"] * q + parts["score_per_pair"] * n * q
    return parts["eigen"] + parts["per_example"] * setting.fit_examples + score


def synthetic_rows(models: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for name in models:
        configuration = SUITE[name]
        shared = {
            **dict.fromkeys(COLUMNS), "model": name, "parameters": configuration.num_parameters, "device": "machine",
            "token_parameters": configuration.num_token_parameters, "train": 400, "queries": 18, "tokens": 150,
            "projected": False, "dtype": "bfloat16",
        }  # fmt: skip
        each = (bif_law(configuration, LAW) - 2.0) / LAW.draws
        rows.append(
            shared
            | {
                "method": "bif", "fit_seconds": 0.0, "score_seconds": bif_law(configuration, LAW), "draws": 2000,
                "minibatch": 32, "seconds_per_draw": each, "setup_seconds": 2.0, "disk_bytes": 0,
                "peak_memory_bytes": 5.0 * configuration.num_parameters,
            }
        )  # fmt: skip
        parts = ekfac_parts(configuration, LAW)
        fit = parts["eigen"] + 400 * parts["per_example"]
        rows.append(
            shared
            | {
                "method": "ekfac", "fit_seconds": fit, "score_seconds": ekfac_law(configuration, LAW) - fit,
                "eigen_cost": configuration.eigen_cost, "eigen_seconds": parts["eigen"], "fit_examples": 400,
                "fit_seconds_per_example": parts["per_example"], "score_base": 0.0,
                "factor_bytes": configuration.factor_bytes(), "disk_bytes": 1.1 * configuration.factor_bytes(),
                "peak_memory_bytes": 12.0 * configuration.num_parameters,
                **{name: parts[name] for name in ("score_per_train", "score_per_query", "score_per_pair")},
            }
        )  # fmt: skip
    return rows


def test_estimates_find_a_known_law_at_another_model_and_setting() -> None:
    estimator = Estimator(synthetic_rows(("14m", "70m", "160m", "410m", "1.4b", "2.8b")))
    asked = replace(LAW, train=1000, queries=50, draws=500, fit_examples=5000, tokens=150)
    for method, law, memory in (("bif", bif_law, 5.0), ("ekfac", ekfac_law, 12.0)):
        for name, within in (("1b", 0.10), ("2.8b", 0.01), ("6.9b", 0.25)):
            found = estimator.estimate(method, SUITE[name], asked)
            truth = law(SUITE[name], asked)
            assert found.seconds == pytest.approx(truth, rel=within)
            assert found.seconds_low < found.seconds < found.seconds_high
            assert found.peak_memory_bytes == pytest.approx(memory * SUITE[name].num_parameters, rel=0.01)
            assert found.beyond == (name == "6.9b")
    disk = estimator.estimate("ekfac", SUITE["1b"], asked).disk_bytes
    assert disk == pytest.approx(1.1 * SUITE["1b"].factor_bytes(), rel=0.01)


def test_crossovers_with_known_answers() -> None:
    rows = [
        {"model": f"m{size:g}", "parameters": size, "method": method, "fit_seconds": 0.0, "score_seconds": seconds}
        for size in (1e8, 1e9, 1e11)
        for method, seconds in (("bif", 1e-6 * size), ("ekfac", 1e-3 * size**0.7))
    ]
    (crossing,) = crossover_parameters(Estimator(rows))
    assert crossing.value == pytest.approx(1e10, rel=1e-3)  # 1e-6 P = 1e-3 P^0.7
    assert (crossing.cheaper_above, crossing.beyond) == ("ekfac", False)
    assert crossing.low == pytest.approx(crossing.high, rel=0.5), "clocks differ by thousandths"
    (beyond,) = crossover_parameters(Estimator(rows[:4]))
    assert beyond.beyond
    vague = [row | {"seconds_high": 2 * row["score_seconds"], "seconds_low": 0.0} for row in rows[:4]]
    (unknown,) = crossover_parameters(Estimator(vague))
    assert unknown.value == beyond.value
    assert unknown.low < 0.1 * unknown.value
    assert unknown.high is None, "in many draws the lines diverge"

    estimator = Estimator(synthetic_rows(("160m", "410m", "1b")))
    configuration = SUITE["410m"]
    setting = replace(LAW, draws=200)
    (crossing,) = crossover_queries(estimator, configuration, setting)
    per_query = 200 * 1.5 / 7e14 * 2 * 150 * configuration.num_token_parameters
    parts = ekfac_parts(configuration, LAW)
    none = replace(setting, queries=0)
    gap = ekfac_law(configuration, none) - bif_law(configuration, none)
    expected = gap / (per_query - parts["score_per_query"] - 400 * parts["score_per_pair"])
    assert crossing.value == pytest.approx(expected, rel=0.02, abs=1)
    assert crossing.cheaper_above == "ekfac"
    assert {found.axis for found in crossovers(estimator)} >= {"queries"}


# ---- the ladder ----


def climb(seconds_of: Any, budget: float, target: int, first: int = 4) -> tuple[list[int], float]:
    done: list[tuple[int, float]] = []
    for size in scaling_point.ladder(first, target, lambda: done, lambda: budget - sum(s for _, s in done)):
        done.append((size, seconds_of(size)))
    return [size for size, _ in done], sum(seconds for _, seconds in done)


def test_the_ladder_takes_the_whole_run_if_it_fits_and_two_sizes_at_least_if_not() -> None:
    law = lambda size: 1 + 0.01 * size  # noqa: E731
    sizes, spent = climb(law, budget=60, target=2000)
    assert sizes[-1] == 2000
    assert spent <= 60
    sizes, spent = climb(law, budget=15, target=2000)
    assert sizes[-1] < 2000
    assert len(sizes) >= 3
    assert spent <= 15
    assert all(size % 4 == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
    assert climb(law, budget=0.001, target=2000)[0] == [4, 8]
    assert climb(law, budget=60, target=4)[0] == [4]


def test_rows_are_projected_along_the_line_and_say_so() -> None:
    spec = specification("bif")
    rungs = [rung(draws, 1 + 0.5 * draws) for draws in (4, 8, 16)]
    row = make_row(spec, {"rungs": rungs, "finished": True}, peak_flops=1e12)
    assert row["projected"]
    assert row["fit_seconds"] + row["score_seconds"] == pytest.approx(1001.0)
    assert row["seconds_low"] <= 1001.0 <= row["seconds_high"]
    assert row["projected_from"] == "4, 8, 16 of 2000 draws"
    assert row["seconds_per_draw"] == pytest.approx(0.5)
    flops = draw_flops(row["token_parameters"], 8, 2, 4, 12)
    assert row["floor_ratio"] == pytest.approx(0.5 / (flops / 1e12))
    whole = make_row(spec, {"rungs": [rung(4, 3.0), rung(2000, 900.0)]}, None)
    assert (whole["projected"], whole["score_seconds"], whole["seconds_low"]) == (False, 900.0, None)
    one = make_row(spec, {"rungs": [rung(4, 3.0)], "stopped": "stopped after 5 s"}, None)
    assert one["error"].startswith("no time left")
    busy = make_row(spec, {"rungs": [rung(4, 3.0), rung(8, 2.0)]}, None)
    assert "too busy" in busy["error"]
    bent = make_row(spec, {"rungs": [rung(d, float(d**2)) for d in (4, 8, 16, 32)]}, None)
    assert "not linear" in bent["projected_from"]


def test_ekfac_rows_are_lines_in_blocks_and_in_fitting_examples() -> None:
    spec = specification("ekfac") | {"fit_examples": 1000}
    layers = spec["configuration"]["layers"] = 10
    rungs = [
        rung(0, 3.0 * blocks, fit=10.0 * blocks, peak=1000 + 100 * blocks, disk=50 * blocks)
        | {
            "size": {"layers": blocks, "fit_examples": 8, "train": 8, "draws": 0},
            "phases": {"covariance": 2.0 * blocks, "eigen": 6.0 * blocks, "lambda": 2.0 * blocks},
            "half_examples": 4, "half_phases": {"covariance": 1.0 * blocks, "eigen": 0.0, "lambda": 1.0 * blocks},
            "score_points": [[n, q, 3.0 * blocks * n * q / 16] for n in (4, 8) for q in (1, 2)],
        }
        for blocks in (1, 2, 4)
    ]  # fmt: skip
    row = make_row(spec, {"rungs": rungs}, None)
    assert row["projected"]
    assert row["eigen_seconds"] == pytest.approx(6.0 * layers)
    assert row["fit_seconds_per_example"] == pytest.approx(0.5 * layers)
    assert row["fit_seconds"] == pytest.approx(10.0 * layers + (1000 - 8) * 0.5 * layers)
    assert row["score_seconds"] == pytest.approx(3.0 * layers)
    assert row["score_per_pair"] == pytest.approx(3.0 * layers / 16)
    assert (row["peak_memory_bytes"], row["disk_bytes"]) == (2000, 500)


def rung(draws: int, score: float, fit: float = 0.0, peak: int = 100, disk: int = 0) -> dict[str, Any]:
    return {
        "size": {"draws": draws, "layers": 2, "train": 8, "fit_examples": 8}, "fit_seconds": fit,
        "score_seconds": score, "peak_memory_bytes": peak, "peak_reserved_bytes": None, "host_peak_bytes": peak,
        "disk_bytes": disk, "weight_bytes": 10,
    }  # fmt: skip


def specification(method: str) -> dict[str, Any]:
    configuration = Configuration(name="tiny", hidden=16, layers=2, heads=2, intermediate=32, vocabulary=64)
    return {
        "configuration": asdict(configuration), "method": method, "options": {"minibatch": 4, "chains": 4},
        "train": 8, "queries": 2, "tokens": 12, "draws": 2000, "chains": 4, "fit_examples": 8, "dtype": "float32",
        "weights_name": "random", "text_name": "random tokens", "device_name": "CPU",
    }  # fmt: skip


def test_a_rung_whose_chains_take_no_step_says_nothing_about_a_draw() -> None:
    """One draw a chain is a forward pass alone; its time between draws is no part of the projection or its interval."""
    rungs = [
        {**rung(draws=4, fit=0.0, score=1.0), "tick_seconds": 0.2},
        {**rung(draws=8, fit=0.0, score=2.6), "tick_seconds": 0.3},
        {**rung(draws=16, fit=0.0, score=5.0), "tick_seconds": 0.3},
    ]
    row = make_row(specification("bif"), {"rungs": rungs, "load_seconds": 0.1}, 1e12)
    assert row["score_seconds"] == pytest.approx(0.2 + 0.3 * 2000)
    assert row["seconds_low"] == pytest.approx(0.95 * row["score_seconds"])
    assert row["projected_from"] == "the median draw of 4, 8, 16 of 2000 draws"


# ---- sweeps of two tiny models ----


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a sweep over two tiny models whose points run in this process."""
    folders = []
    for name, hidden in (("tiny-a", 16), ("tiny-b", 32)):
        folder = tmp_path / name
        folder.mkdir()
        shape = {
            "model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 2 * hidden, "vocab_size": 64, "max_position_embeddings": 64,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(shape))
        folders.append(str(folder))
    queries = tmp_path / "queries.json"
    queries.write_text(json.dumps([{"prompt": "ab", "completion": "cd"}, {"prompt": "x", "completion": "yz"}]))
    monkeypatch.setattr(scaling, "measure_peak", lambda device: 1e10)

    def here(self: Any, spec: dict[str, Any], limit: float, more: bool) -> dict[str, Any]:
        self.count += 1
        return scaling_point.perform(spec, time.monotonic())

    monkeypatch.setattr(scaling.Processes, "measure", here)
    return [
        "--models", *folders, "--random-weights", "--train", "6", "--queries", str(queries), "--tokens", "8",
        "--device", "cpu", "--draws", "8", "--chains", "2", "--set", "bif.minibatch=4",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out"),
    ]  # fmt: skip


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return read_rows(tmp_path / "out" / "scaling.csv")


def test_a_sweep_of_two_sizes_has_complete_rows_and_outlives_a_failure(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = "tests.scaling_methods:OutOfMemory"
    arguments = [*tiny, "--methods", "bif", "ekfac", failing, "gradsim", "--budget-seconds", "60"]
    assert scaling.main(arguments) == 0
    rows = rows_of(tmp_path)
    assert [(row["model"], row["method"]) for row in rows] == [
        ("tiny-a", "bif"), ("tiny-a", "ekfac"), ("tiny-b", "bif"), ("tiny-b", "ekfac"), ("tiny-a", failing),
        ("tiny-a", "gradsim"), ("tiny-b", failing), ("tiny-b", "gradsim"),
    ]  # fmt: skip
    for row in rows:
        assert row["run_id"]
        if row["method"] == failing:
            assert row["error"].startswith("out of memory: OutOfMemoryError: CUDA out of memory")
            continue
        assert row["error"] is None
        assert row["projected"] is False
        for column in ("load_seconds", "score_seconds", "peak_memory_bytes", "host_peak_bytes", "weight_bytes"):
            assert row[column] > 0, column
        assert row["weights"] == "random"
    ekfac = [row for row in rows if row["method"] == "ekfac"]
    for row in ekfac:
        assert row["disk_bytes"] == pytest.approx(row["factor_bytes"], rel=0.5)  # file headers weigh much at this size
        assert row["disk_bytes"] > row["factor_bytes"]
        assert row["eigen_seconds"] > 0
    assert all(row["floor_ratio"] > 0 for row in rows if row["method"] == "bif")
    record = json.loads((tmp_path / "out" / "scaling.json").read_text())
    assert {"rows", "points", "slopes", "crossovers", "versions", "command"} <= set(record)
    assert len(list((tmp_path / "out").iterdir())) == 2
    assert "out of memory" in capsys.readouterr().out

    # The same command again measures only what failed, and gives the same rows.
    capsys.readouterr()
    assert scaling.main([*arguments, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for old, new in zip(rows, again, strict=True):
        assert (old["score_seconds"], old["error"]) == (new["score_seconds"], new["error"])


def test_an_interrupted_sweep_goes_on_where_it_was(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    measure = scaling.Processes.measure

    def until_stopped(self: Any, spec: dict[str, Any], *rest: Any, **more: Any) -> dict[str, Any]:
        if len(measured) == 1:
            measured.append("stop")
            raise KeyboardInterrupt
        measured.append(spec["configuration"]["name"])
        return measure(self, spec, *rest, **more)

    monkeypatch.setattr(scaling.Processes, "measure", until_stopped)
    arguments = [*tiny, "--methods", "gradsim", "--budget-seconds", "60"]
    assert scaling.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert len(rows_of(tmp_path)) == 1
    assert scaling.main(arguments) == 0
    assert measured == ["tiny-a", "stop", "tiny-b"]
    assert len(rows_of(tmp_path)) == 2


def test_what_exceeds_the_budget_is_projected_and_flagged(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = scaling_point.measure

    def by_law(watched: Any, problem: Any) -> Any:
        """The real run, with the seconds of a law: what a busy machine adds is no part of this test."""
        attribution, cost = measure(watched, problem)
        draws = getattr(getattr(watched, "method", watched), "draws", 0)
        return attribution, {**cost, "fit_seconds": 0.0, "score_seconds": 0.5 + 0.1 * draws}

    monkeypatch.setattr(scaling_point, "measure", by_law)
    arguments = [*tiny, "--methods", "bif", "--draws", "4000", "--chains", "1", "--budget-seconds", "0.01"]
    assert scaling.main(arguments) == 0
    for row in rows_of(tmp_path):
        assert row["projected"] is True
        assert row["projected_from"].startswith("2, 4 of 4000 draws")
        assert row["score_seconds"] == pytest.approx(0.5 + 0.1 * 4000)
        assert row["seconds_low"] < row["score_seconds"] < row["seconds_high"]
    assert "* projected" in capsys.readouterr().out


def test_with_no_time_left_points_are_rows_with_that_reason(tiny: list[str], tmp_path: Path) -> None:
    assert scaling.main([*tiny, "--methods", "gradsim", "--total-seconds", "0.001"]) == 1
    assert [row["error"] for row in rows_of(tmp_path)] == ["no time left"] * 2


def test_a_point_killed_by_the_system_is_a_row_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real process, as every point has one."""
    spec = specification("tests.scaling_methods:Killed") | {
        "options": {}, "weights": "random", "query_file": None, "tokenizer": None, "text": None, "chains": 4,
        "device": "cpu", "seed": 0, "budget_seconds": 60, "scratch": str(tmp_path),
        "result": str(tmp_path / "point.json"),
    }  # fmt: skip
    processes = scaling.Processes(tmp_path, ahead=False)
    result = processes.measure(spec, limit=120, more=False)
    assert "signal 9" in result["error"]
    assert make_row(spec, result, None)["error"] == result["error"]


# ---- the estimate command ----


def test_estimate_prints_what_a_run_will_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scaling.csv"
    pd.DataFrame(synthetic_rows(("14m", "160m", "410m", "1.4b", "2.8b"))).to_csv(path, index=False)
    base = ["--estimate", "--model", "1b", "--from", str(path)]
    assert scaling.main([*base, "--train", "1000", "--queries", "50", "--draws", "500", "--json"]) == 0
    found = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    setting = replace(LAW, train=1000, queries=50, draws=500, fit_examples=1000)
    assert found["bif"]["seconds"] == pytest.approx(bif_law(SUITE["1b"], setting), rel=0.1)
    assert found["ekfac"]["seconds"] == pytest.approx(ekfac_law(SUITE["1b"], setting), rel=0.1)
    assert scaling.main(base) == 0
    said = capsys.readouterr().out
    for text in ("1b (1,011,781,632 parameters)", "95 % interval", "peak memory", "the better buy"):
        assert text in said
    fresh = tmp_path / "fresh.csv"
    pd.DataFrame(synthetic_rows(("1b",))).to_csv(fresh, index=False)
    assert scaling.main(["--estimate", "--against", str(fresh), "--from", str(path), "--json"]) == 0
    assert all(abs(row["seconds_off"]) < 0.1 for row in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--estimate"], "--estimate needs --model"),
        (["--estimate", "--model", "1b", "--from", "/nowhere/scaling.csv"], "measure first"),
        (["--models", "3b"], 'unknown model "3b"'),
        (["--queries", "19"], "there are 18 of our own"),
        (["--text", "/nowhere.jsonl"], "is no file"),
        (["--budget-seconds", "-1"], "expected seconds above 0"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ["--device", "cpu", "--random-weights", "--train", "4", "--tokens", "4"]
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    assert scaling.main([*arguments, *more, *folders]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_draws_are_projected_by_their_median_and_not_by_the_setup_around_them() -> None:
    """Setups of 0.3 and 0.9 s would turn two totals into any line; the draws themselves agree."""
    spec = specification("bif")
    rungs = [rung(4, 0.9 + 4 * 0.1) | {"tick_seconds": 0.1}, rung(8, 0.3 + 8 * 0.102) | {"tick_seconds": 0.102}]
    row = make_row(spec, {"rungs": rungs}, None)
    assert row["score_seconds"] == pytest.approx(0.3 + spec["draws"] * 0.102)
    assert row["seconds_low"] < row["score_seconds"] < row["seconds_high"]
    assert row["seconds_high"] / row["score_seconds"] - 1 == pytest.approx(0.05, abs=0.01)
    assert row["projected"]


def sweep_record(run_id: str, points: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    spec = specification("bif")
    setting = {name: value for name, value in spec.items() if name not in ("configuration", "method", "options")}
    rows = [{"model": point["model"], "method": point["method"], "weights": "random"} for point in points]
    record: dict[str, Any] = {
        "run_id": run_id, "command": f"sweep {run_id}", "finished": "", "seconds": 1.0, "setting": setting,
        "options": {"bif": spec["options"]}, "versions": {}, "cost_code": "x", "rows": rows, "points": points,
    }  # fmt: skip
    return record | changes


def test_sweeps_of_one_machine_are_merged_and_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = {"rungs": [rung(4, 1.4) | {"tick_seconds": 0.1}, rung(8, 1.8) | {"tick_seconds": 0.1}]}
    cut_off = sweep_record(
        "a", [{"model": "14m", "method": "bif", **done}, {"model": "70m", "method": "bif", "rungs": []}]
    )
    rest = sweep_record("b", [{"model": "70m", "method": "bif", **done}])
    other = sweep_record("c", [{"model": "70m", "method": "bif", **done}], cost_code="y")
    paths = []
    for record in (cut_off, rest, other):
        paths.append(str(tmp_path / f"{record['run_id']}.json"))
        Path(paths[-1]).write_text(json.dumps(record))
    assert scaling.main(["--merge", *paths[:2], "--out", str(tmp_path / "out")]) == 0
    rows = pd.read_csv(tmp_path / "out" / "scaling.csv")
    assert list(rows["model"]) == ["14m", "70m"]
    assert list(rows["run_id"]) == ["a", "b"]
    assert rows["error"].isna().all()
    capsys.readouterr()
    assert scaling.main(["--merge", paths[0], paths[2], "--out", str(tmp_path / "out")]) == 2
    assert "differs" in capsys.readouterr().err


# ---- memory ----


def test_activations_of_a_known_model_are_counted(tmp_path, capsys) -> None:
    from bench.scaling_memory import activation_bytes, main

    one = activation_bytes(SUITE["14m"].with_layers(1), 2, 10, torch.bfloat16)
    two = activation_bytes(SUITE["14m"].with_layers(2), 2, 10, torch.bfloat16)
    three = activation_bytes(SUITE["14m"].with_layers(3), 2, 10, torch.bfloat16)
    assert three - two == two - one > 2 * 10 * SUITE["14m"].hidden * 2, "every block keeps as much, its input at least"
    assert activation_bytes(SUITE["14m"].with_layers(1), 4, 10, torch.bfloat16) == pytest.approx(2 * one, rel=0.01)
    assert main(["--from", str(tmp_path / "none.csv")]) == 2
    assert "measure first" in capsys.readouterr().err
