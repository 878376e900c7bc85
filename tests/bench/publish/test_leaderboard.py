"""The leaderboard and its one rule for "A is ahead of B": ranks respect ties, and no column mixes ground truths."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.publish.__main__ import main
from bench.publish.compare import Estimate, difference, is_ahead, mean_of_independent, over_seeds, student
from bench.publish.leaderboard import LeaderboardRow, boards, rows
from bench.records import amount_asked
from tests.helpers.synthetic_results import edited, write_question, write_run


def planted(folder: Path, **known: Any) -> list[LeaderboardRow]:
    """LDS as in synthetic_results: ekfac 0.40, bif 0.34, gradsim 0.31, trak 0.22, random 0; paired intervals +-0.03."""
    write_run(folder, alphas=(0.1,), shares=(0.1,), **known)
    return [row for row in rows(folder) if row.scores == "raw"]


def ranks(found: list[LeaderboardRow]) -> dict[str, str]:
    return {row.label: row.rank for row in found}


RECORD = "aaaabbbbcccc/run.json"


def test_pairs_decide_ties_where_intervals_alone_would_not(tmp_path: Path) -> None:
    """bif - gradsim is made 0.03 +- 0.04; ekfac - bif is 0.06 +- 0.03, though their own intervals overlap."""
    planted(tmp_path, seeds=(1,))
    with edited(tmp_path / RECORD) as record:
        for pair in record["pairs"]:
            if {pair["label"], pair["against"]} == {"gradsim", "bif"}:
                pair.update(ci_low=pair["difference"] - 0.04, ci_high=pair["difference"] + 0.04)
    found = [row for row in rows(tmp_path) if row.scores == "raw"]
    assert ranks(found) == {"ekfac": "1", "bif": "2-3", "gradsim": "2-3", "trak": "4", "random": "5"}
    assert all(row.num_ranked == 5 and row.record == ("aaaabbbbcccc",) and row.num_seeds == 1 for row in found)
    planted(tmp_path / "three", seeds=(1, 2, 3))
    with edited(tmp_path / "three" / RECORD) as record:
        for pair in record["pairs"]:
            if {pair["label"], pair["against"]} == {"ekfac", "bif"} and pair["seed"] == 2:
                pair.update(difference=0.001, ci_low=-0.029, ci_high=0.031)
    three = ranks([row for row in rows(tmp_path / "three") if row.scores == "raw"])
    assert (three["ekfac"], three["bif"]) == ("1-2", "1-2"), "few seeds must agree"


def test_without_pairs_overlapping_intervals_are_ties(tmp_path: Path) -> None:
    planted(tmp_path, seeds=(1,))
    with edited(tmp_path / RECORD) as record:
        record["pairs"] = []
    found = {row.label: row for row in rows(tmp_path) if row.scores == "raw"}
    for one in found.values():
        for other in found.values():
            if one.low > other.high:
                assert one.rank_worst < other.rank_best or one.rank_best < other.rank_best
    assert found["bif"].rank_worst >= 3, "its interval overlaps with gradsim's"
    assert found["random"].rank == "5"
    many = ranks(planted(tmp_path / "five", seeds=(1, 2, 3, 4, 42)))
    assert many == {"ekfac": "1", "bif": "2", "gradsim": "3", "trak": "4", "random": "5"}
    with_pairs = ranks(rows(tmp_path / "five"))
    with edited(tmp_path / "five" / RECORD) as record:
        record["pairs"] = []
    assert ranks(rows(tmp_path / "five")) == with_pairs, "five seeds' differences need no recorded pairs"


def test_grounds_truths_settings_and_seeds_never_share_a_column(tmp_path: Path) -> None:
    known: dict[str, Any] = {"alphas": (0.1,), "shares": (0.1,), "methods": ("ekfac", "bif"), "seeds": (1, 2)}
    write_run(tmp_path, run_id="aa", **known)
    write_run(tmp_path, run_id="bb", subsets=50, **known)
    write_run(tmp_path, run_id="cc", task_settings={"epochs": 3}, **known)
    write_run(tmp_path, run_id="dd", **{**known, "methods": ("trak",), "seeds": (1,)})
    found = rows(tmp_path)
    for column in {row.column for row in found}:
        here = [row for row in found if row.column == column]
        for name in ("task", "protocol", "ground", "truth", "metric", "scores", "alpha", "alpha_attribution", "seeds"):
            assert len({getattr(row, name) for row in here}) == 1, (column, name)
    raw = [row for row in found if row.scores == "raw"]
    assert len({row.column for row in raw}) == 4, "two truths, another task, and the one seed that trak has"
    (one_seed,) = {row.column for row in raw if row.label == "trak"}
    assert {row.label for row in raw if row.column == one_seed} == {"trak", "ekfac", "bif"}
    assert {row.seeds for row in raw if row.column == one_seed} == {(1,)}


def test_one_label_with_two_settings_stays_two_lines(tmp_path: Path) -> None:
    known: dict[str, Any] = {"alphas": (0.1,), "shares": (0.1,), "seeds": (1,), "methods": ("ekfac",)}
    write_run(tmp_path, run_id="aa", options={"ekfac": {"damping": 1e-4}}, **known)
    write_run(tmp_path, run_id="bb", options={"ekfac": {"damping": 1.0}}, **known)
    (board,) = boards(rows(tmp_path))
    assert sorted(line[0] for line in board.lines) == ["ekfac (damping=0.0001)", "ekfac (damping=1)"]


def test_each_truth_has_a_table_and_seconds_of_its_own(tmp_path: Path) -> None:
    known: dict[str, Any] = {"alphas": (0.1, 0.5), "shares": (0.1,), "seeds": (1,)}
    write_run(tmp_path, run_id="aa", methods=("ekfac", "bif"), task_settings={"source": "old"}, **known)
    write_run(tmp_path, run_id="bb", methods=("ekfac", "kfac"), task_settings={"source": "new"}, **known)
    found = [replace(row, seconds=1.0 if row.record == ("aa",) else 2.0) for row in rows(tmp_path)]
    made = boards(found)
    assert len({board.title for board in made}) == 2
    for board in made:
        ours = {"bif": "1.0", "kfac": "2.0"}[({line[0] for line in board.lines} - {"ekfac"}).pop()]
        assert [line[-2] for line in board.lines] == [ours, ours]
        assert board.header[1:-2] == [f"LDS, alpha {a}, {kind}" for a in (0.1, 0.5) for kind in ("raw", "normalised")]


def test_seconds_and_memory_are_of_the_faster_run(tmp_path: Path) -> None:
    planted(tmp_path, seeds=(1,))
    with edited(tmp_path / RECORD) as record:
        for row in record["rows"]:
            if row["method"] == "ekfac":
                row["score_seconds"] = 1.8 if row["normalised"] else 30.0
                row["peak_memory_bytes"] = 2**20 if row["normalised"] else 2**30
            if row["method"] == "bif":
                row["fit_seconds"] = None
    found = rows(tmp_path)
    assert [(row.seconds, row.memory) for row in found if row.label == "ekfac"] == [(pytest.approx(2.0), 2**20)] * 2
    assert all(math.isnan(row.seconds) and row.memory == 2**31 for row in found if row.label == "bif")
    (board,) = boards([replace(row, seconds=math.nan, memory=7.0) if row.scores == "raw" else row for row in found])
    assert next(line[-2:] for line in board.lines if line[0] == "ekfac") == ["2.0", "1 MiB"], "both of one row"


def test_an_undefined_value_has_no_rank_and_takes_none(tmp_path: Path) -> None:
    planted(tmp_path, seeds=(1,))
    with edited(tmp_path / RECORD) as record:
        for row in record["rows"]:
            if row["method"] == "ekfac":
                row.update(lds=None, ci_low=None, ci_high=None)
    found = {row.label: row for row in rows(tmp_path) if row.scores == "raw"}
    assert found["ekfac"].rank == "-"
    assert math.isnan(found["ekfac"].value)
    assert found["bif"].num_ranked == 4
    assert found["bif"].rank_best == 1


def test_ranks_are_by_lds_within_groups_with_lds_beside_it(tmp_path: Path) -> None:
    """same_class has the most LDS and nothing within classes; at subset models methods are other ones than at full."""
    write_question(tmp_path, seeds=(1,), alphas=(0.1,))
    fixed = [row for row in rows(tmp_path) if "balanced" not in row.ground and row.scores == "raw"]
    (board,) = boards(fixed)
    assert [head.partition(",")[0] for head in board.header] == ["method", "within class", "LDS", "seconds", "memory"]
    names = [line[0] for line in board.lines]
    assert names[:2] == ["kfac, subset x 8", "ekfac, subset x 8"]
    assert {"kfac", "kfac, subset"} <= set(names)
    assert next(line[1] for line in board.lines if line[0] == "same_class") == "nothing"
    within = {row.name: row for row in fixed if row.metric == "lds within groups"}
    assert within["kfac, subset x 8"].rank == "1-2"  # 0.74 and 0.73 +- 0.01
    assert within["same_class"].rank == "-"
    assert within["kfac"].value == pytest.approx(0.9 * 0.14)
    assert within["kfac"].ceiling != next(row.ceiling for row in fixed if row.metric == "lds")


def test_the_command_names_a_ceiling_that_may_be_zero_and_writes_csv(tmp_path: Path, capsys: Any) -> None:
    path = write_run(tmp_path / "results", alphas=(0.1, 0.5), shares=(0.1,)) / "run.json"
    with edited(path) as record:
        for ceiling in record["ceilings"]:
            if ceiling["alpha"] == 0.5:
                ceiling.update(ceiling=0.2, reliability=0.04, ci_low=0.0, ci_high=0.5)
    assert main(["leaderboard", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "board.csv")]) == 0
    assert "At alpha 0.5 the noise ceiling's interval touches 0" in capsys.readouterr().out
    assert len((tmp_path / "board.csv").read_text().splitlines()) == 21
    assert main(["leaderboard", "--results", str(tmp_path / "results"), "--task", "digits"]) == 2
    assert "there is cifar10" in capsys.readouterr().err


def test_records_that_cannot_be_read_are_named_whatever_else_there_is(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path, alphas=(0.1,), shares=(0.1,), seeds=(1,))
    damaged = tmp_path / "damaged" / "run.json"
    damaged.parent.mkdir()
    damaged.write_text((tmp_path / RECORD).read_text()[:200])
    assert main(["leaderboard", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "ekfac" in said.out
    assert said.err.startswith(f"tda-bench publish leaderboard: {damaged}: ")
    assert main(["leaderboard", "--results", str(tmp_path), "--task", "nosuch"]) == 2
    assert str(damaged) in capsys.readouterr().err
    assert main(["leaderboard", "--results", str(damaged.parent)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"tda-bench publish leaderboard: {damaged}: ")
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_seeds_that_differ_by_an_example_share_a_column() -> None:
    for config, at, asked in (
        ({"shares": [0.01, 0.05]}, 48 / 4750, 0.01),
        ({"share": 0.1}, 456 / 4750, 0.1),
        ({"share": 0.1}, 48 / 4750, 0.01),
        ({"shares": [0.001]}, 1 / 300, 1 / 300),  # one example is the least, and more than was asked for
        ({}, 0.5, 0.5),
        ({"share": 0.1}, None, None),
    ):
        assert amount_asked({"config": config}, at) == asked


FIVE = [(value, math.nan, math.nan) for value in (0.03, 0.05, 0.04, 0.04, 0.04)]


def test_many_seeds_have_students_interval_and_few_have_to_agree() -> None:
    gap = student([1.0, 2.0, 3.0])
    assert gap.mean == pytest.approx(2.0)
    assert gap.high - gap.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom
    assert not student([1.0]).known
    assert not student([1.0, math.nan]).known
    assert over_seeds(FIVE) == student([0.03, 0.05, 0.04, 0.04, 0.04])
    assert is_ahead(over_seeds(FIVE))
    few = over_seeds([(0.03, 0.01, 0.05), (0.02, -0.01, 0.05)])
    assert (few.mean, few.low, few.high, few.num_seeds) == (pytest.approx(0.025), -0.01, 0.05, 2)
    assert not is_ahead(few)
    assert is_ahead(over_seeds([(0.03, 0.01, 0.05), (0.02, 0.005, 0.05)]))


def test_a_pair_decides_where_intervals_would_not_and_what_nobody_knows_is_a_tie() -> None:
    one, other = [(0.40, 0.36, 0.44)], [(0.34, 0.30, 0.38)]
    apart = difference(one, other)
    assert (apart.low, apart.high) == (pytest.approx(-0.02), pytest.approx(0.14))
    assert not is_ahead(apart)
    assert is_ahead(difference(one, other, [(0.06, 0.03, 0.09)]))
    assert is_ahead(difference([(0.9, 0.88, 0.92)], other)), "intervals that do not overlap need no pair"
    tiny = Estimate(2e-4, 1e-4, 3e-4)
    assert not is_ahead(tiny)
    assert is_ahead(tiny, negligible=0.0), "of a metric without an end"
    assert not is_ahead(Estimate(0.5)), "without an interval"
    assert not is_ahead(-Estimate(0.5, 0.4, 0.6))
    assert is_ahead(-Estimate(-0.5, -0.6, -0.4)), "where lower is better"
    mean = mean_of_independent([Estimate(0.10, 0.07, 0.13), Estimate(0.02, -0.02, 0.06)])
    assert mean.mean == pytest.approx(0.06)
    assert mean.high - mean.mean == pytest.approx(0.05 / 2)
