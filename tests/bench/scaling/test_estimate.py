"""bench.scaling without a machine: known laws, estimates, crossovers, held-out checks, figures, the campaign."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench.scaling import estimate
from bench.scaling.__main__ import ROOT, main
from bench.scaling.estimate import LAW_MODELS, PAPER_FITTED, Crossing, Estimator, crossing_in, held_out, score_span
from bench.scaling.lines import LINEAR_WITHIN, Curve, Law, bilinear, fit_blocks, fit_line, student
from bench.scaling.rows import RATES, read_rows, setting_of, total_of, write_csv
from bench.scaling.suite import SUITE, draw_work, ekfac_needs
from tests.helpers.scaling_laws import LAW, SCORE_LAW, bif_law, ekfac_law, ekfac_parts, rows_by_law

SIZES = ("14m", "70m", "160m", "410m", "1.4b", "2.8b")


# ---- lines and curves ----


def coverage(sizes: list[float], noise: Any, at: float, law: Any, jitter: float = 0.0, times: int = 400) -> float:
    """How often what `at` takes is inside the 95 % interval of the line through noisy measurements at `sizes`."""
    inside = 0
    for _ in range(times):
        *values, truth = noise(law(np.array([*sizes, at]))).tolist()
        low, high = fit_line(sizes, values, jitter=jitter).interval(at)
        inside += low <= truth <= high
    return inside / times


def test_a_line_gives_back_its_law_covers_it_under_noise_and_has_students_quantiles() -> None:
    line = fit_line([4, 8, 16], [1.4, 1.8, 2.6])
    assert (line.intercept, line.slope) == (pytest.approx(1.0), pytest.approx(0.1))
    assert line.residual <= LINEAR_WITHIN
    assert fit_line([1, 2, 4, 8], [1, 4, 16, 64]).residual > LINEAR_WITHIN
    assert fit_line([1, 2], [1.0, 2.2]).intercept == 0.0
    generator = np.random.default_rng(0)
    for noise, least, most in ((0.05, 0.90, 0.99), (0.02, 0.95, 1.0), (0.10, 0.85, 1.0)):
        relative = lambda values: values * (1 + noise * generator.normal(size=len(values)))  # noqa: B023, E731
        found = coverage([4.0, 8.0, 16.0, 32.0], relative, 2000, lambda size: 1 + 0.1 * size, times=300)
        assert least <= found <= most, "no wider than usual noise asks for"
    with pytest.raises(ValueError, match="two sizes"):
        fit_line([4, 4], [1, 2])
    for freedom, known in ((1, 12.706), (4, 2.776), (10, 2.228), (15, 2.131), (40, 2.021)):
        assert student(freedom) == pytest.approx(known, rel=0.01)
    assert student(0) == pytest.approx(1.96)
    points = [(n, q, 0.5 + 0.01 * n + 0.2 * q + 0.003 * n * q) for n in (200, 400) for q in (9, 18)]
    assert bilinear(points) == pytest.approx((0.5, 0.01, 0.2, 0.003), rel=1e-3)


@pytest.mark.parametrize("num_sizes", [2, 3])
def test_few_sizes_are_judged_by_what_is_usual(num_sizes: int) -> None:
    """Two leave no residual and three leave one: intervals cover under usual noise, and stay of one order."""
    generator = np.random.default_rng(1)
    sizes = [100.0, 200.0, 400.0][:num_sizes]
    relative = lambda values: values * (1 + 0.05 * generator.normal(size=len(values)))  # noqa: E731
    assert 0.88 <= coverage(sizes, relative, 10_000, lambda size: 5 + 0.1 * size) <= 0.995
    lines = [fit_line(sizes, relative(5 + 0.1 * np.array(sizes)).tolist()) for _ in range(400)]
    assert np.quantile([line.interval(10_000)[1] / line.at(10_000) - 1 for line in lines], 0.95) < 2


def test_short_timings_that_jitter_are_not_taken_for_a_sure_line() -> None:
    """Half a second on 2 and 3 s: what a tenfold size takes is inside the interval as often as is said."""
    generator = np.random.default_rng(0)
    jittered = lambda values: np.maximum(values + generator.normal(0, 0.5, len(values)), 0.1)  # noqa: E731
    sure, by_errors_alone = (
        coverage([200.0, 400.0], jittered, 2000, lambda size: 1 + size / 200, jitter, times=500) for jitter in (0.5, 0)
    )
    assert by_errors_alone < 0.7 < 0.9 < sure
    points = [(2, 4, 2.0), (2, 8, 2.9), (8, 4, 6.1), (8, 8, 11.0)]
    assert fit_blocks(points, jitter=0.5).deviation(32, 1000) > fit_blocks(points).deviation(32, 1000)


def test_blocks_and_sequences_give_back_their_law_and_more_never_costs_less() -> None:
    points = [(blocks, count, 2 + blocks * (0.5 + 0.02 * count)) for blocks, count in ((2, 100), (8, 100), (8, 200))]
    plane = fit_blocks(points)
    assert tuple(plane.weights) == pytest.approx((2, 0.5, 0.02))
    assert plane.at(32, 400) == pytest.approx(2 + 32 * 8.5)
    assert plane.deviation(32, 400) > 0.05 * plane.at(32, 400)
    # Eight blocks that took as long as two are noise, and a sequence still goes through every block.
    noisy = fit_blocks([(2, 100, 5.18), (8, 100, 5.23), (8, 200, 9.72)])
    assert noisy.at(32, 200) - noisy.at(32, 100) == pytest.approx(4 * (noisy.at(8, 200) - noisy.at(8, 100)))
    assert noisy.residual > 0.05
    once = fit_blocks([(1, 8, 3.0), (2, 8, 4.0)])
    assert tuple(once.weights) == pytest.approx((2, 0, 1 / 8)), "one fitting set has no fixed part"
    assert once.at(6, 16) > 1.3 * once.at(6, 8)
    # Two noisy sets would have a further one cost nothing, and a million of them as much as a hundred.
    line = fit_line([200, 400], [0.62, 0.43])
    assert line.slope == 0.0
    assert 0.43 < line.at(1_000_000) < 0.62
    low, high = line.interval(1_000_000)
    assert 0 < low < line.at(1_000_000) < high
    level = fit_line([100, 200, 400], [8.9, 7.1, 8.0], 0.002)
    assert (level.slope, level.at(1e6) > 2000) == (0.002, True)
    assert level.interval(1e6)[1] > 2 * level.at(1e6), "that is a least, and says little about what it is"
    assert fit_line([100, 200], [3.0, 5.0], 0.002).slope == pytest.approx(0.02), "what is measured to be more is more"
    plane = fit_blocks([(2, 100, 7.69), (8, 100, 7.21), (8, 200, 7.67)], 0.0002)
    assert plane.weights[2] >= 0.0002
    assert fit_blocks([(2, 100, 4.0), (8, 100, 10.0), (8, 200, 18.0)], 0.0002).weights[2] == pytest.approx(0.01)


def test_a_curve_is_exact_on_a_power_law_and_unsure_beyond_one_that_bends() -> None:
    curve = Curve([1e6, 1e7, 1e8, 1e9], [2e6**0.7, 2e7**0.7, 2e8**0.7, 2e9**0.7])
    assert curve.at(5e8) == pytest.approx(1e9**0.7)
    assert curve.at(1e11) == pytest.approx(2e11**0.7)
    assert curve.deviation(5e8) == pytest.approx(0, abs=1e-9)
    bent = Curve([1e6, 1e7, 1e8, 1e9], [5.0, 1.0, 0.9, 0.85])
    assert bent.deviation(1e5) > 3 * bent.deviation(1e10), "an end that the others miss says little of what is beyond"
    assert Curve([1e8, 1e8], [1.0, 2.0]).deviation(1e8) > 0.3, "two runs of one size that disagree"
    assert 0.2 < Curve([1e7, 1e8, 1e9], [1.0, 1.2, 1.0]).deviation(5e8) < 1, "one miss: unsure, but not of everything"


def test_a_law_goes_from_waiting_to_arithmetic_where_a_curve_does_not() -> None:
    layers, flops, widths = [6, 6, 12, 24, 32], [1e6, 6e7, 1e9, 1e10, 2e11], [128, 512, 768, 1024, 2560]
    work = list(zip(layers, flops))
    seconds = [1e-3 * blocks + 2e-12 * flop for blocks, flop in work]
    for left_out in range(5):
        others = [i for i in range(5) if i != left_out]
        law = Law(*([values[i] for i in others] for values in (widths, work, seconds)))  # type: ignore[arg-type]
        assert law.at(widths[left_out], work[left_out]) == pytest.approx(seconds[left_out], rel=1e-6)
    paces = [second / flop for second, flop in zip(seconds, flops)]
    drawn_on = Curve(widths[1:], paces[1:]).at(128) * flops[0]
    assert abs(drawn_on / seconds[0] - 1) > 0.5
    exact = Law(widths, work, seconds)
    noisy = Law(widths, work, [second * off for second, off in zip(seconds, (1, 1.3, 0.7, 1.2, 1))])
    assert exact.deviation(768) < 1e-6 < 0.2 < noisy.deviation(768)
    assert noisy.deviation(20_000) > noisy.deviation(2560), "less is known beyond the largest"
    assert Law([], [], []).deviation(100) > 0


# ---- estimates ----


def test_estimates_find_a_known_law_at_another_model_and_setting() -> None:
    estimator = Estimator(rows_by_law(SIZES))
    asked = replace(LAW, train=1000, queries=50, draws=500, fit_examples=1_000_000)
    for method, law in (("bif", bif_law), ("ekfac", ekfac_law)):
        for name in ("1b", "2.8b", "6.9b"):
            found = estimator.estimate(method, SUITE[name], asked)
            assert found.seconds == pytest.approx(law(SUITE[name], asked), rel=0.02)
            assert found.seconds_low < found.seconds < found.seconds_high
            assert found.beyond == (name == "6.9b")
    found = estimator.estimate("ekfac", SUITE["1b"], asked)
    assert found.disk_bytes == pytest.approx(1.1 * SUITE["1b"].factor_bytes(), rel=0.01)
    assert found.fit_examples == 1_000_000
    assert estimator.estimate("bif", SUITE["1b"], asked).fit_examples is None


def test_a_draw_is_told_by_its_kinds_of_work_where_models_of_one_size_differ_in_them() -> None:
    """31m has as many heads as 70m: between its neighbours by size alone it would be missed."""
    rows = [row for row in rows_by_law(tuple(SUITE)) if row["method"] == "bif"]
    prices = (1e-15, 1e-15, 3e-12, 2e-12)
    for row in rows:
        work = draw_work(SUITE[row["model"]], setting_of(row))
        row["seconds_per_draw"] = sum(price * one for price, one in zip(prices, work, strict=True))
        row["score_seconds"] = 2.0 + 2000 * row["seconds_per_draw"]
    asked = SUITE["31m"]
    (left_out,) = [row for row in rows if row["model"] == "31m"]
    others = [row for row in rows if row["model"] != "31m"]
    by_work, by_size = (
        Estimator(known).estimate("bif", asked, LAW).seconds / left_out["score_seconds"] - 1
        for known in (others, others[: LAW_MODELS - 1])
    )
    assert by_work == pytest.approx(0, abs=1e-3)
    assert abs(by_size) > 0.02


def test_what_was_not_measured_widens_the_interval() -> None:
    estimator = Estimator(rows_by_law(SIZES))
    width = lambda found: found.seconds_high / found.seconds_low  # noqa: E731
    base = estimator.estimate("bif", SUITE["1b"], LAW)
    assert width(estimator.estimate("bif", SUITE["1b"], replace(LAW, tokens=1024))) > width(base)
    assert width(estimator.estimate("bif", SUITE["1b"], replace(LAW, queries=1800))) > width(base)
    without = [row | dict.fromkeys(SCORE_LAW) for row in estimator.of("ekfac")]
    seconds, many = without[0]["score_seconds"], replace(LAW, queries=1800)
    assert score_span(without[0], 400, 36) == pytest.approx((seconds * 436 / 418, 2 * seconds))
    blind = Estimator(without).estimate("ekfac", SUITE["1b"], many)
    assert width(blind) > 2 * width(estimator.estimate("ekfac", SUITE["1b"], many))
    one_size = [row | {"fit_sizes": "400"} for row in estimator.of("ekfac")]
    many = replace(LAW, fit_examples=PAPER_FITTED)
    unsplit = Estimator(one_size).estimate("ekfac", SUITE["1b"], many)
    assert width(unsplit) > width(estimator.estimate("ekfac", SUITE["1b"], many))


def test_other_numbers_of_queries_are_learnt_from_the_models_that_have_them() -> None:
    """Two of six models were measured with many queries, where a FLOP takes a tenth less: so it does at the others."""
    rows = [row for row in rows_by_law(SIZES) if row["method"] == "bif"]
    many = replace(LAW, queries=1800)
    sampling = lambda model: 0.9 * (bif_law(SUITE[model], many) - 2.0)  # noqa: E731
    further = [
        row | {"queries": 1800, "seconds_per_draw": sampling(row["model"]) / LAW.draws}
        for row in rows
        if row["model"] in ("14m", "2.8b")
    ]
    estimator, asked = Estimator([*rows, *further]), SUITE["410m"]
    found, unseen = (one.estimate("bif", asked, many) for one in (estimator, Estimator(rows)))
    assert found.seconds == pytest.approx(2.0 + sampling("410m"), rel=0.01)
    assert estimator.estimate("bif", asked, LAW).seconds == pytest.approx(bif_law(asked, LAW), rel=0.01)
    assert unseen.seconds_high / unseen.seconds > found.seconds_high / found.seconds
    # Halves of 18 queries say that one is ten times as dear; two models with 1,800 know better, one is not enough.
    rows = [row for row in rows_by_law(SIZES) if row["method"] == "ekfac"]
    wrong = ("score_per_query", "score_per_pair")
    few = [row | {name: 10 * row[name] for name in wrong} for row in rows]
    many = replace(LAW, queries=1800)
    further = [
        row | {"queries": 1800, "score_seconds": ekfac_law(SUITE[row["model"]], many) - row["fit_seconds"]}
        for row in rows
        if row["model"] in ("14m", "2.8b")
    ]
    law = ekfac_law(SUITE["410m"], many)
    found = Estimator([*few, *further]).estimate("ekfac", SUITE["410m"], many)
    assert found.seconds == pytest.approx(law, rel=0.1)
    assert Estimator([*few, *further[:1]]).estimate("ekfac", SUITE["410m"], many).seconds > 1.5 * law


def test_memory_that_was_not_measured_is_by_arithmetic_or_unknown_and_what_is_written_grows() -> None:
    estimator = Estimator([row | {"peak_memory_bytes": None} for row in rows_by_law(SIZES) if row["method"] == "ekfac"])
    found = estimator.estimate("ekfac", SUITE["1b"], LAW)
    assert found.peak_memory_bytes == ekfac_needs(SUITE["1b"], LAW.tokens).memory_bytes
    assert all(one["memory_off"] is None for one in held_out(estimator))
    known = SHIPPED.estimate("trak", SUITE["410m"], LAW)
    assert known.peak_memory_bytes > 0
    for asked in (replace(LAW, train=4000), replace(LAW, tokens=300), replace(LAW, queries=180)):
        for method in ("trak", "gradsim", "kfac"):
            assert math.isnan(SHIPPED.estimate(method, SUITE["410m"], asked).peak_memory_bytes)
    more = SHIPPED.estimate("trak", SUITE["410m"], replace(LAW, train=10 * LAW.train))
    assert more.disk_bytes == pytest.approx(10 * known.disk_bytes)


def test_an_estimate_is_no_surer_than_the_row_it_repeats() -> None:
    rows = rows_by_law(SIZES)

    def estimate(model: str = "1.4b", **changes: int) -> Any:
        return Estimator(rows).estimate("ekfac", SUITE[model], replace(LAW, **{"fit_examples": 400, **changes}))

    width = lambda found: found.seconds_high / found.seconds_low  # noqa: E731
    before = estimate()
    own = next(row for row in rows if (row["method"], row["model"]) == ("ekfac", "1.4b"))
    assert own["fit_examples"] == 400
    own |= {"projected": True, "seconds_low": 0.2 * before.seconds, "seconds_high": 3 * before.seconds}
    assert width(estimate()) == pytest.approx(15)
    assert width(estimate("410m")) < 15
    for further in ({"queries": 180}, {"fit_examples": 5000}, {"train": 401}):
        assert width(estimate(**further)) > 14.9, "what is unsure there is no surer beside it"
    own |= {"seconds_low": 0.0}
    found = estimate()
    assert found.seconds_high / found.seconds == pytest.approx(3, rel=0.01), "an end at zero leaves the other"


def test_one_measured_model_and_a_fitted_method_of_ones_own_are_enough() -> None:
    row = rows_by_law(("14m",))[0] | {"method": "gradsim", "score_seconds": 2.0}
    found = Estimator([row]).estimate("gradsim", SUITE["12b"], LAW)
    assert found.seconds == pytest.approx(2.0 * SUITE["12b"].num_token_parameters / SUITE["14m"].num_token_parameters)
    mine = {"method": "mine:KFAC", "score_seconds": 1e-6}
    rows = [
        row | mine | {"fit_examples": count, "fit_seconds": 1e-8 * row["parameters"] * (100 + count)}
        for row in rows_by_law(("14m", "70m", "410m", "1b"))
        for count in (400, 2000)
        if row["method"] == "ekfac"
    ]
    found = Estimator(rows).estimate("mine:KFAC", SUITE["70m"], replace(LAW, fit_examples=10_000))
    assert found.seconds == pytest.approx(1e-8 * SUITE["70m"].num_parameters * 10_100, rel=0.01)
    assert found.fit_examples == 10_000


SHIPPED = estimate.by_device(read_rows(RATES))["NVIDIA H200"]


@pytest.mark.parametrize("method", SHIPPED.methods())
@pytest.mark.parametrize("model", ["14m", "410m", "1.4b", "2.8b"])
def test_more_of_anything_is_never_estimated_cheaper(method: str, model: str) -> None:
    axes: dict[str, tuple[int, ...]] = {
        "queries": (1, 18, 60, 91, 180, 735, 1800, 10_000), "train": (100, 400, 470, 1100, 5000),
        "tokens": (64, 150, 512, 2048), "fit_examples": (100, 400, 2000, 10_000, 1_000_000), "draws": (100, 2000),
    }  # fmt: skip
    elsewhere = ({}, {"tokens": 32, "train": 20_000}, {"tokens": 32, "queries": 1800}, {"tokens": 512})
    for (axis, values), changes in itertools.product(axes.items(), elsewhere):
        base = replace(LAW, **changes)
        found = [SHIPPED.estimate(method, SUITE[model], replace(base, **{axis: value})) for value in values]
        seconds = [one.seconds for one in found]
        assert all(more >= 0.999 * less for less, more in itertools.pairwise(seconds)), (axis, base, seconds)
        if base == LAW:
            assert all(one.seconds_high / one.seconds_low < 1e4 for one in found), "an interval that says something"


def test_break_even_in_fitting_sequences_and_queries_is_the_laws_own() -> None:
    estimator, shape = Estimator(rows_by_law(SIZES)), SUITE["410m"]
    parts = ekfac_parts(shape, LAW)
    each = parts["covariance_per_example"] + parts["lambda_per_example"]
    gap = bif_law(shape, LAW) - ekfac_law(shape, replace(LAW, fit_examples=0))
    one = crossing_in(estimator, shape, LAW, "fit_examples")
    assert (one.cheaper, one.values) == (("ekfac", "bif"), (pytest.approx(gap / each, rel=0.02),))
    assert one.low < one.values[0] < one.high
    # Beyond that fitting set BIF is cheaper for few queries and EK-FAC for many: it pays once.
    more = replace(LAW, fit_examples=round(3 * gap / each))
    one = crossing_in(estimator, shape, more, "queries")
    assert one.cheaper == ("bif", "ekfac")
    at = replace(more, queries=round(one.values[0]))
    assert bif_law(shape, at) == pytest.approx(ekfac_law(shape, at), rel=0.05)
    always = crossing_in(estimator, shape, replace(LAW, fit_examples=10**8), "queries")
    assert always == Crossing("queries", ("bif",), (), sure=True)


def test_the_shipped_rates_are_those_of_the_results_and_estimated_as_they_were() -> None:
    committed = read_rows(ROOT / "results" / "scaling" / "scaling.csv")
    assert read_rows(RATES) == [row for row in committed if not row["error"]]
    assert main(["--check", "--json"]) == 0, "every model is inside its interval"
    # The run that a model's fit is from has its scores, and not one in fewer blocks; other sessions' are near.
    for method in SHIPPED.methods():
        behind = {row["model"]: row["run_id"] for row in estimate.first_of_each(SHIPPED.of(method))}
        for row in (row for row in SHIPPED.of(method) if row["queries"] == 18):
            found, took = SHIPPED.estimate(method, SUITE[row["model"]], setting_of(row)), total_of(row)
            assert found.seconds_low <= took <= found.seconds_high, row["model"]
            if row["run_id"] == behind[row["model"]]:
                assert found.seconds == pytest.approx(took, rel=0.12), row["model"]


# ---- the estimate command ----


@pytest.fixture
def by_law(tmp_path: Path) -> Path:
    """One fitting set a point; pandas would make numbers of a column of those."""
    path = tmp_path / "scaling.csv"
    write_csv(path, [row | {"fit_sizes": "400"} if row["method"] == "ekfac" else row for row in rows_by_law(SIZES)])
    return path


@pytest.mark.parametrize("models", [("14m",), ("14m", "70m"), ("410m", "1b")])
def test_one_or_two_models_know_how_little_they_say_of_others(models: tuple[str, ...]) -> None:
    few = Estimator([row for row in SHIPPED.rows if row["model"] in models])
    inside = [
        found.seconds_low <= total_of(row) <= found.seconds_high
        for row in SHIPPED.rows
        if row["model"] not in models and row["method"] in few.methods()
        for found in [few.estimate(row["method"], SUITE[row["model"]], setting_of(row))]
    ]
    assert np.mean(inside) >= 0.95


def test_estimate_prints_what_a_run_will_cost(by_law: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--estimate", "--model", "1b", "--results", str(by_law)]
    asked = ["--train", "1000", "--queries", "50", "--draws", "500", "--fit-examples", "5000", "--tokens", "150"]
    assert main([*base, *asked, "--json"]) == 0
    found = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
    setting = replace(LAW, train=1000, queries=50, draws=500, fit_examples=5000)
    assert found["bif"]["seconds"] == pytest.approx(bif_law(SUITE["1b"], setting), rel=0.05)
    assert found["ekfac"]["seconds"] == pytest.approx(ekfac_law(SUITE["1b"], setting), rel=0.05)
    assert main(base) == 0
    said = capsys.readouterr().out
    sizes = (400, 100_000, PAPER_FITTED)
    assert all(f"{size:,}" in said for size in sizes), "no fitting set is the only one by default"
    assert max(map(len, said.splitlines())) <= 110
    fresh = tmp_path / "fresh.csv"
    pd.DataFrame(rows_by_law(("1b",))).to_csv(fresh, index=False)
    assert main(["--check", str(fresh), "--results", str(by_law), "--json"]) == 0
    assert all(abs(row["seconds_off"]) < 0.05 for row in json.loads(capsys.readouterr().out))


def test_predictions_are_held_against_a_model_outside_the_suite(by_law: Path, tmp_path: Path, capsys: Any) -> None:
    """Its shape is in its row."""
    shape = replace(SUITE["410m"], name="mine", hidden=896, layers=16, heads=14, intermediate=3584)
    row = rows_by_law(("410m",))[0] | {"model": "mine", "hidden": 896, "layers": 16, "fit_seconds": 0.0}
    row |= {"parameters": shape.num_parameters, "token_parameters": shape.num_token_parameters}
    row |= {"score_seconds": bif_law(shape, LAW)}
    fresh = tmp_path / "fresh.csv"
    asked = ["--check", str(fresh), "--results", str(by_law), "--json"]
    pd.DataFrame([row]).to_csv(fresh, index=False)
    assert main(asked) == 2
    assert '"mine" is no model of the suite' in capsys.readouterr().err
    pd.DataFrame([row | {"heads": 14, "intermediate": 3584, "vocabulary": 50304}]).to_csv(fresh, index=False)
    assert main(asked) == 0
    (held,) = json.loads(capsys.readouterr().out)
    assert (held["model"], held["method"]) == ("mine", "bif")
    assert abs(held["seconds_off"]) < 0.05


def test_what_a_fit_takes_at_its_start_does_not_grow_as_models_shrink() -> None:
    """About a second at every size, one by chance more than the next: no law that would have it at tens of seconds."""
    seen = {"31m": 1.3, "70m": 0.3, "160m": 0.5, "410m": 1.0}
    rows = [row for row in rows_by_law(tuple(seen)) if row["method"] == "ekfac"]
    started = [row | {"covariance_base": seen[row["model"]], "lambda_base": 0.0} for row in rows]
    settings = replace(LAW, fit_examples=400)
    seconds = [Estimator(one).estimate("ekfac", SUITE["14m"], settings).seconds for one in (rows, started)]
    assert 0.1 < seconds[1] - seconds[0] < 1.5


def test_rows_that_cannot_be_read_are_named(by_law: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    sound, broken = pd.read_csv(by_law), tmp_path / "broken.csv"
    for damaged, said in (
        (sound.drop(columns="queries"), "lacks the columns queries"),
        (sound.assign(score_seconds="abc"), 'line 2: score_seconds is "abc"'),
        (sound.drop(columns="lambda_per_example"), "lambda_per_example is empty"),
    ):
        damaged.to_csv(broken, index=False)
        error = refused(main, ["--estimate", "--model", "1b", "--results", str(broken)])
        assert f"{broken}" in error
        assert said in error


MEASURED = ["--device", "cpu", "--train", "4", "--tokens", "4", "--out", "nowhere", "--cache", "nowhere"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--estimate", "--model", "1b", "--methods", "repsim"], 'no measured row of "repsim"'),
        (["--estimate", "--model", "14m", "--tokens", "5000"], "14m takes at most 2048"),
        ([*MEASURED, "--model", "3b"], 'unknown model "3b"'),
        ([*MEASURED, "--model", "14m", "--methods", "kfac", "--fit-examples", "1000000"], "with at most 20,000"),
        (["--merge", str(ROOT / "results" / "digits" / "tune-scratch" / "tune.json")], "no scaling.json"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], text: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert text in refused(main, arguments)
