"""What may be compared with what: runs that differ in what could change a number share no panel, row or mean."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench.identity import UNUSUAL_READINGS, Identity, model_words, settings_words
from bench.metrics import PooledCeiling
from bench.records import EXPERIMENT, ceiling_over_seeds, linear_ceiling_over_seeds, load_results, over_seeds
from retrain.tasks.cifar10 import READINGS
from tests.helpers.synthetic_results import METHODS, edited, write_run

ONE: dict[str, Any] = {"shares": (0.1,), "alphas": (0.1,), "seeds": (1,)}
DIGITS: dict[str, Any] = {"task": "digits", "shares": (1.0,), "alphas": (0.5,)}
UNREPLICATED = {"ceiling": None, "reliability": None, "num_replicates": 1}


def change_record(place: Path, ceiling: dict[str, Any], **config: Any) -> None:
    with edited(place / "run.json") as record:
        record["config"] |= config
        record["ceilings"] = [known | ceiling for known in record["ceilings"]]
        for row in record["rows"]:
            row["ceiling"] = ceiling["ceiling"]


def test_every_row_has_its_names(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    results = load_results(tmp_path)
    assert results.problems == results.left_out == []
    assert len(results.rows) == 2 * 2 * 2 * len(METHODS) * 2
    assert not results.rows.duplicated(EXPERIMENT).any()
    assert set(results.rows["ground"]) == {"cifar10-paper"}
    assert set(results.rows["truth"]) == {"100 subsets x 2, 8,000 queries"}
    assert set(results.rows["series"]) == {"BIF", "EK-FAC", "TRAK", "GradSim", "random"}
    assert len(results.pairs) == 2 * 2 * 2 * 10 * 2


def test_another_ground_is_another_figure(tmp_path: Path) -> None:
    usual = {**ONE, "task_settings": {"data": "1" * 40, "epochs": 1}}
    others: list[dict[str, Any]] = [{"task_settings": {"epochs": 2}}, {"task_settings": {"data": "0" * 40}}]
    others += [{"split": "all"}, {"protocols": ("scratch",)}, {"task": "digits"}]
    for number, other in enumerate([{}, *others]):
        write_run(tmp_path, run_id=f"run{number}", **{**usual, **other})
    rows = load_results(tmp_path).rows
    assert rows["ground"].nunique() == 6
    assert (rows.groupby("ground")["run_id"].nunique() == 1).all()
    assert len(rows) == 6 * 2 * len(METHODS)


def test_an_option_as_usual_changes_no_name_and_another_reading_is_named_even_alone(tmp_path: Path) -> None:
    assert set(UNUSUAL_READINGS) == set(READINGS)
    write_run(tmp_path, run_id="other0000000", **ONE, task_settings={"epoch_rate": "falling"})
    words = "task cifar10, protocol paper, report queries"
    rows = load_results(tmp_path).rows
    assert set(zip(rows["ground"], rows["ground_words"])) == {
        ("cifar10-paper-epoch-rate-falling", f"{words}, epoch_rate=falling")
    }
    write_run(tmp_path, run_id="one000000000", **ONE)
    rows = load_results(tmp_path).rows.set_index("run_id")
    assert set(rows.loc["one000000000", "ground"]) == {"cifar10-paper"}
    assert set(rows.loc["one000000000", "ground_words"]) == {words}


def test_other_subsets_or_replicates_are_another_truth_of_the_same_ground(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="one000000000", **ONE)
    write_run(tmp_path, run_id="fewer0000000", subsets=25, **ONE)
    change_record(write_run(tmp_path, run_id="single000000", **{**ONE, "seeds": (7,)}), UNREPLICATED)
    rows = load_results(tmp_path).rows
    assert rows["ground"].nunique() == 1
    assert sorted(rows["truth"].unique()) == [
        "100 subsets x 1, 8,000 queries", "100 subsets x 2, 8,000 queries", "25 subsets x 2, 8,000 queries",
    ]  # fmt: skip


def test_of_two_runs_with_the_same_seeds_the_one_with_more_replicates_is_shown(tmp_path: Path) -> None:
    both, more = METHODS, (*METHODS, "kfac")
    # Without its first seed, a mean would be of other seeds than it says; and a truth goes whole or not at all.
    for seeds, methods, shown in (((1,), both, set()), ((1, 2), both, set(both)), ((1,), more, set(more))):
        folder = tmp_path / f"{len(seeds)} {len(methods)}"
        write_run(folder, run_id="twice0000000", seeds=(1,), **DIGITS)
        change_record(write_run(folder, run_id="once00000000", seeds=seeds, methods=methods, **DIGITS), UNREPLICATED)
        results = load_results(folder)
        assert set(results.rows.query("run_id == 'once00000000'")["method"]) == shown
        assert any("elsewhere with more replicates" in words for words in results.left_out) == (not shown)


def test_other_settings_are_another_series_and_say_so(tmp_path: Path) -> None:
    """The three settings of the issue: never one panel's one line, and none vanishes."""
    for number, (damping, shift) in enumerate(((1e-8, 0.0), (1e-7, -0.08), (1e-4, 0.24))):
        options = {"ekfac": {"damping": damping}}
        write_run(tmp_path, run_id=f"run{number}", methods=("ekfac", "random"), options=options, shift=shift, **ONE)
    rows = load_results(tmp_path).rows
    mine = rows[(rows["method"] == "ekfac") & ~rows["normalised"].astype(bool)]
    assert sorted(mine["series"]) == ["EK-FAC, damping=0.0001", "EK-FAC, damping=1e-07", "EK-FAC, damping=1e-08"]
    assert len(set(mine["lds"])) == 3
    assert list(rows[rows["method"] == "random"]["series"].unique()) == ["random"]


def test_a_younger_option_at_its_usual_value_is_no_difference(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="old000000000", methods=("bif",), **{**ONE, "seeds": (1,)})
    options = {"bif": {"control_variate": False, "localiser": "isotropic", "keep_traces": True}}
    write_run(tmp_path, run_id="new000000000", methods=("bif",), options=options, **{**ONE, "seeds": (2,)})
    rows = load_results(tmp_path).rows
    assert set(rows["series"]) == {"BIF"}
    write_run(tmp_path, run_id="other0000000", methods=("bif",), options={"bif": {"control_variate": True}}, **ONE)
    assert load_results(tmp_path).rows["series"].nunique() == 2


def test_variants_of_one_run_are_series_and_pairs(tmp_path: Path) -> None:
    write_run(tmp_path, methods=("ekfac", "ekfac@damping=1e-4", "my own"), **ONE)
    results = load_results(tmp_path)
    assert set(results.rows["series"]) == {"EK-FAC", "EK-FAC, damping=1e-4", "my own"}
    assert set(results.rows["method"]) == {"ekfac", "my own"}
    assert set(zip(results.pairs["series"], results.pairs["against"])) == {
        ("EK-FAC", "EK-FAC, damping=1e-4"), ("EK-FAC", "my own"), ("EK-FAC, damping=1e-4", "my own"),
    }  # fmt: skip


def test_records_of_variants_as_bench_lds_writes_them(tmp_path: Path) -> None:
    """Pairs have labels and no method; raw and normalised rows of one label may have settings of their own; a part of a
    method is a row that shares its settings."""
    for number, damping in enumerate((1e-3, 1e-1)):
        place = write_run(tmp_path, run_id=f"run{number}", methods=("ekfac", "bif"), **ONE) / "run.json"
        with edited(place) as record:
            described = {"asked": "ekfac", "label": "ekfac", "origin": "tuned", "settings": "x=1"}
            ekfac = {**described, "name": "ekfac", "version": 2, "source": f"code{number}"}
            record["config"] |= {
                "methods": [
                    {**ekfac, "rows": "raw", "damping": damping},
                    {**ekfac, "rows": "normalised", "damping": 1.0},
                    {"name": "bif", "label": "bif", "rows": "both", "draws": 10 + number, "source": "same"},
                ],
                "settings": "tuned", "options": {"bif": {"draws": number}}, "stream": "report",
                "task_options": {"data_dir": f"/data{number}"}, "initialisation": "shared",
            }  # fmt: skip
            part = [row | {"label": "bif: first order", "lds": 0.1} for row in record["rows"] if row["method"] == "bif"]
            record["rows"] = [row | {"label": row.get("label", row["method"])} for row in record["rows"]] + part
            for pair in record["pairs"]:
                del pair["method"]
    results = load_results(tmp_path)
    assert results.problems == []
    raw = results.rows[~results.rows["normalised"].astype(bool)]
    assert sorted(raw["series"]) == [
        "BIF, draws=10", "BIF, draws=11", "BIF: first order, draws=10", "BIF: first order, draws=11",
        "EK-FAC, damping=0.001", "EK-FAC, damping=0.1",
    ]  # fmt: skip
    normalised = results.rows[results.rows["normalised"].astype(bool)]
    assert list(normalised[normalised["method"] == "ekfac"]["series"]) == ["EK-FAC, damping=1"]
    assert set(results.rows["ground"]) == {"cifar10-paper"}
    assert ("EK-FAC, damping=0.1", "BIF, draws=11") in set(zip(results.pairs["series"], results.pairs["against"]))
    assert any("run0: 1 of its" in line for line in results.left_out)  # EK-FAC, normalised: the same in both


def test_other_code_of_a_task_is_another_truth_and_of_a_method_is_said(tmp_path: Path) -> None:
    for number in (1, 2):
        place = write_run(tmp_path, run_id=f"run{number}", **{**ONE, "seeds": (number,)}) / "run.json"
        with edited(place) as record:
            for method in record["config"]["methods"]:
                method["source"] = f"code{number}"
    results = load_results(tmp_path)
    assert results.rows["truth"].nunique() == 1
    said = "EK-FAC: its rows were made by different code of the method, in runs run1, run2"
    assert any(said in line for line in results.left_out)
    record["config"]["task"]["source"] = "another"
    place.write_text(json.dumps(record))
    rows = load_results(tmp_path).rows
    assert rows["ground"].nunique() == 1
    assert rows["truth"].nunique() == 2


def test_a_relative_option_that_does_nothing_is_no_setting(tmp_path: Path) -> None:
    expected = {1e-8: ("damping=1e-08", 1), 0.0: ("damping=0", 1), None: ("relative_damping=0.1", 2)}
    for damping, (words, series) in expected.items():
        for seed, relative in enumerate((0.1, 3.0)):
            own = {"ekfac": {"damping": damping, "relative_damping": relative}}
            known = {"run_id": f"{seed:012d}", "methods": ("ekfac",), "options": own, **ONE, "seeds": (seed,)}
            write_run(tmp_path / words, **known)
        rows = load_results(tmp_path / words).rows
        assert words in set(rows["settings"])
        assert rows["series"].nunique() == series
    assert "relative_ridge" not in settings_words("trak", {"ridge": 0.0, "relative_ridge": 10.0})


def test_the_same_experiment_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="first0000000", finished="2026-11-14T00:00:00Z", **ONE)
    write_run(tmp_path, run_id="again0000000", finished="2026-11-15T00:00:00Z", shift=0.1, **ONE)
    results = load_results(tmp_path)
    assert set(results.rows["run_id"]) == {"again0000000"}
    (said,) = results.left_out
    assert "run first0000000: 10 of its 10 rows are measured again in run again0000000" in said
    assert "their LDS differ by up to 0.100" in said
    write_run(tmp_path, run_id="again0000000", folder_name="copy", **ONE)
    results = load_results(tmp_path)
    assert len(results.rows) == 10
    assert "has the run id again0000000" in results.problems[0]


def test_what_settings_were_chosen_on_is_not_shown_and_that_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, **ONE)
    for run_id, chosen_on in (("tune1", {"stream": "tune"}), ("tune2", {"query_split": "tune"})):
        change_record(write_run(tmp_path, run_id=run_id, **{**ONE, "seeds": (99,)}), {"ceiling": 0.5}, **chosen_on)
    results = load_results(tmp_path)
    assert 99 not in set(results.rows["seed"])
    assert all(f"run {run_id}" in said for run_id, said in zip(("tune1", "tune2"), results.left_out, strict=True))


def test_a_linear_ceiling_above_the_noise_ceiling_is_not_shown(tmp_path: Path) -> None:
    for name, share in (("shown", 0.4), ("not", 0.46)):
        linear = {"linear_ceiling": share**0.5, "linear_low": 0.6, "linear_high": 0.7, "linear_share": share}
        place = write_run(tmp_path / name, **DIGITS, seeds=(1,))
        change_record(place, {"ceiling": 0.43**0.5, "reliability": 0.43} | linear)
        found = linear_ceiling_over_seeds(load_results(tmp_path / name).rows)
        assert np.isfinite(found) == (name == "shown")


def ceiling_of(reliabilities: list[float], lows: list[float], highs: list[float]) -> PooledCeiling:
    columns = {"reliability": reliabilities, "ceiling_low": lows, "ceiling_high": highs}
    return ceiling_over_seeds(pd.DataFrame({"seed": range(1, len(lows) + 1), **columns}))


def test_ceilings_of_seeds_are_pooled_as_reliabilities() -> None:
    """Each seed's own interval touches 0: that of many need not, and five that happen to agree are not sure."""
    pooled = ceiling_of([0.5, 0.1, np.nan], [0.6, 0.0, np.nan], [0.8, 0.5, np.nan])
    assert pooled.ceiling == pytest.approx(0.3**0.5)
    assert pooled.ceiling != pytest.approx((0.5**0.5 + 0.1**0.5) / 2)
    assert (pooled.num_seeds, pooled.touches_zero) == (2, True)
    assert not ceiling_of([0.5], [0.6], [0.8]).touches_zero
    nothing = ceiling_of([np.nan], [np.nan], [np.nan])
    assert (np.isnan(nothing.ceiling), nothing.touches_zero) == (True, False)
    alone = ceiling_of([0.09], [0.0], [0.5])
    assert (alone.touches_zero, alone.ci_low, alone.ci_high) == (True, 0.0, 0.5)
    many = ceiling_of([0.05, 0.13] * 10, [0.0] * 20, [0.5] * 20)
    assert many.ceiling == pytest.approx(0.3)
    assert many.ci_low > 0
    assert not many.touches_zero
    two = ceiling_of([0.45, 0.6], [0.6, 0.7], [0.75, 0.85])
    assert (two.ci_low, two.ci_high, two.touches_zero) == (pytest.approx(0.6), pytest.approx(0.85), False)
    agreeing = ceiling_of([0.04, 0.041, 0.039, 0.042, 0.038], [0.0] * 5, [0.5] * 5)
    assert (agreeing.ci_low, agreeing.touches_zero) == (0.0, True)
    unknown = ceiling_of([0.25], [np.nan], [np.nan])
    assert (unknown.ceiling, unknown.touches_zero) == (0.5, False)
    assert np.isnan(unknown.ci_low)


def test_few_seeds_show_their_own_intervals_and_five_their_standard_error() -> None:
    scores = np.array([0.40, 0.402, 0.41, 0.42, 0.43])
    cell = pd.DataFrame({"lds": scores, "ci_low": scores - 0.02, "ci_high": scores + 0.03})
    error = scores.std(ddof=1) / np.sqrt(5)
    assert over_seeds(cell) == pytest.approx((scores.mean(), scores.mean() - error, scores.mean() + error))
    assert over_seeds(cell[:2]) == pytest.approx((0.401, 0.38, 0.432))
    assert over_seeds(cell[:1]) == pytest.approx((0.40, 0.38, 0.43))


def test_an_option_of_its_own_counts_no_models_that_a_method_looks_at() -> None:
    """Records of daunce have its finetuned models where those of others have the models whose scores are averaged."""
    told = {"label": "daunce@models=200", "name": "daunce", "models": 200, "reference": "subset"}
    averaged = {"label": "kfac@models=8", "name": "kfac", "models": 8, "reference": "subset"}
    record = Identity({"config": {"task": {}, "methods": [told, averaged]}, "ceilings": []})
    words = {}
    for one in (told, averaged):
        found = record.series({"method": one["name"], "normalised": False}, one["label"])
        words[found["models"]] = model_words(found["label"], found["reference"], found["models"]), found["settings"]
    assert words == {1: ("daunce@models=200, subset", "models=200"), 8: ("kfac, subset x 8", "")}
