"""The ledger's rules on made-up records: what holds, what does not, what is undecided, what is missing."""

import importlib
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.method import load_method
from bench.ledger import main
from bench.ledger.claims import PAPER_CLAIMS, PaperClaim
from bench.ledger.cost_rules import GIVEN_TRAK
from bench.ledger.evidence import GIVEN_SETTINGS, Evidence
from bench.ledger.page import ledger_page, verdicts_of
from bench.ledger.verdicts import (
    AS_PAPER,
    FAILS,
    GROUPS,
    HOLDS,
    MISSING,
    SCRATCH,
    TUNED,
    UNDECIDED,
    Cell,
    Gap,
    Reading,
    ahead,
    everywhere,
    over_readings,
    student_interval,
    within,
)
from bench.methods import parse_method_spec

ROOT = Path(__file__).resolve().parents[3]
SEEDS = (1, 2, 3, 4, 42)
NOISE = (-0.010, 0.004, 0.000, 0.009, -0.003)  # of a seed; the same for every method, so that differences are exact
METHOD_OF = {"bif-paper": "bif", "bif-long": "bif", "bif-equal": "bif", "ekfac-library": "ekfac"}
Level = float | Callable[[float, float, int], float]  # of (alpha, share, number of the seed)


def claim(name: str) -> PaperClaim:
    return next(one for one in PAPER_CLAIMS if one.name == name)


def write_lds(
    folder: Path,
    levels: Mapping[str, Level],
    *,
    task: str = "cifar10",
    protocol: str = "paper",
    alphas: Sequence[float] = (0.1, 0.5),
    shares: Sequence[float] = (0.1,),
    seeds: Sequence[int] = SEEDS,
    across: float = 1.0,
    jitter: float = 0.002,
    run_id: str = "aaaabbbbcccc",
    description: str = "made up",
    diagnostics: Sequence[Mapping[str, Any]] = (),
) -> None:
    """A record in which a label's LDS is its level, plus what a seed adds to all, plus a little of its own."""
    rows, ceilings, pairs = [], [], []
    for share in shares:
        for alpha in alphas:
            for k, seed in enumerate(seeds):
                where = {"task": task, "protocol": protocol, "alpha": alpha, "alpha_attribution": share, "seed": seed}
                sizes = {"num_subsets": 100, "num_queries": 8000, "num_undefined": 0}
                ceilings.append(where | {"ceiling": 0.9, "reliability": 0.81, "num_replicates": 2})
                lds: dict[str, float] = {}
                for i, (label, level) in enumerate(levels.items()):
                    base = level(alpha, share, k) if callable(level) else level
                    lds[label] = base + NOISE[k % 5] + jitter * math.sin(3 * i + 5 * k)
                for normalised in (False, True):
                    for label, value in lds.items():
                        rows.append(
                            {
                                **where, **sizes, "method": METHOD_OF.get(label, label), "label": label, "settings": "",
                                "normalised": normalised, "lds": value, "ci_low": value - 0.02, "ci_high": value + 0.02,
                                "lds_across_queries": across * value, "ceiling": 0.9, "fit_seconds": 1.0,
                                "score_seconds": 9.0 if label.startswith("bif") else 1.0, "device": "NVIDIA H200",
                            }
                        )  # fmt: skip
                    for label, value in lds.items():
                        for against, other in lds.items():
                            if label < against:
                                gap = value - other
                                ends = {"ci_low": gap - 0.02, "ci_high": gap + 0.02, "difference": gap}
                                names = {"label": label, "against": against, "normalised": normalised}
                                pairs.append({**where, **sizes, **names, **ends})
    methods = [
        {"name": METHOD_OF.get(label, label), "label": label, "of": label, **GIVEN_SETTINGS.get((task, label), {})}
        for label in levels
    ]
    record = {
        "run_id": run_id, "device": "NVIDIA H200", "description": description, "rows": rows, "ceilings": ceilings,
        "pairs": pairs, "diagnostics": list(diagnostics),
        "config": {"task": {"name": task}, "query_split": "report", "methods": methods},
    }  # fmt: skip
    (folder / run_id).mkdir(parents=True)
    (folder / run_id / "run.json").write_text(json.dumps(record))


def outcome(folder: Path, name: str, group: str = AS_PAPER) -> str:
    return verdicts_of(claim(name).rule(Evidence(folder)))[group].outcome


def test_two_runs_of_one_seed_are_compared_by_the_ends_of_both(tmp_path: Path) -> None:
    """No pair was measured, but on the same subsets; the means are of the seeds that have both."""
    truth: dict[str, Any] = {"task": "pythia14m", "protocol": "finetune", "alphas": (0.5,), "shares": (1.0,)}
    for name, level, outcome_of in (("far", 0.1, HOLDS), ("near", 0.47, UNDECIDED)):
        write_lds(tmp_path / name, {"ekfac-library": 0.5}, seeds=(1, 2, 3), **truth)
        write_lds(tmp_path / name, {"bif-paper": level}, seeds=(1,), run_id="ddddeeeeffff", **truth)
        assert outcome(tmp_path / name, "Pythia-14M: EK-FAC ahead of BIF") == outcome_of, name
    (reading, *_) = claim("Pythia-14M: EK-FAC ahead of BIF").rule(Evidence(tmp_path / "far"))
    assert reading.cells[0].text.startswith("0.490 - 0.090 = +0.400 [+0.360, +0.440]")


# ---- what several comparisons come to ----


def test_the_rule_of_verdicts() -> None:
    assert everywhere([]) == MISSING
    assert everywhere([HOLDS, UNDECIDED]) == HOLDS
    assert everywhere([HOLDS, UNDECIDED, UNDECIDED]) == UNDECIDED
    assert everywhere([HOLDS, HOLDS, FAILS]) == FAILS

    def reading(word: str, part_of: tuple[str, ...] = ()) -> Reading:
        return Reading(("a",), (Cell("alpha 0.1", "x", word),), part_of=part_of)

    assert over_readings([]).outcome == MISSING
    assert over_readings([reading(HOLDS), reading(UNDECIDED)]).outcome == HOLDS
    assert over_readings([reading(FAILS), reading(UNDECIDED)]).outcome == FAILS
    both = over_readings([reading(HOLDS), reading(FAILS)])
    assert (both.outcome, "depends on the reading" in both.reason) == (UNDECIDED, True)
    # Two places of one reading are no two readings.
    assert over_readings([reading(HOLDS, ("r",)), reading(FAILS, ("r",))]).outcome == FAILS


def test_few_readings_that_settle_a_claim_are_named() -> None:
    outcomes = [HOLDS, FAILS, FAILS, FAILS, UNDECIDED]
    readings = [
        Reading((f"truth {number}", "raw"), (Cell("0.1", "", outcome),)) for number, outcome in enumerate(outcomes)
    ]
    assert over_readings(readings).reason == (
        "depends on the reading (5 readings: 1 holds, 3 does not hold, 1 undecided; holds: truth 0)"
    )
    assert over_readings(readings[1:]).reason == "4 readings: 3 does not hold, 1 undecided"
    alone = [readings[0], *(replace(one, cells=(Cell("0.1", "", UNDECIDED),)) for one in readings[1:])]
    assert over_readings(alone).reason == "5 readings: 1 holds, 4 undecided; holds: truth 0"


def test_one_comparison() -> None:
    assert [ahead(Gap(0, *ends)) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1))] == [HOLDS, FAILS, UNDECIDED]
    assert ahead(Gap(0.5)) == UNDECIDED, "without an interval nothing is decided"
    assert [within(Gap(0, *ends), 2, 8) for ends in ((3, 4), (9, 10), (7, 9))] == [HOLDS, FAILS, UNDECIDED]
    gap = student_interval([1.0, 2.0, 3.0])
    assert gap.mean == pytest.approx(2.0)
    assert gap.high - gap.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom
    assert not student_interval([1.0]).known


# ---- LDS ----


def test_without_records_nothing_is_measured(tmp_path: Path) -> None:
    for one in PAPER_CLAIMS:
        verdicts = verdicts_of(one.rule(Evidence(tmp_path)))
        assert {verdict.outcome for verdict in verdicts.values()} == {MISSING}, one.name
    page = ledger_page(Evidence(tmp_path), tmp_path)
    assert page.count("**Not measured**: no record.") == len(PAPER_CLAIMS)
    assert page.count("To measure it: `python -m ") == len(PAPER_CLAIMS)


@pytest.mark.parametrize(
    ("bif", "jitter", "expected"), [(0.398, 0.002, HOLDS), (0.30, 0.002, FAILS), (0.39, 0.08, UNDECIDED)]
)
def test_matching(tmp_path: Path, bif: float, jitter: float, expected: str) -> None:
    write_lds(tmp_path, {"bif-paper": bif, "ekfac-library": 0.4}, jitter=jitter)
    assert outcome(tmp_path, "BIF matches EK-FAC") == expected
    assert outcome(tmp_path, "BIF matches EK-FAC", TUNED) == MISSING


def test_nothing_is_matched_where_the_rival_predicts_nothing(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": 0.0, "ekfac-library": 0.0})
    assert outcome(tmp_path, "BIF matches EK-FAC") == UNDECIDED


def test_small_and_large_sets_are_told_apart(tmp_path: Path) -> None:
    """Ahead only at alpha 0.1 of 0.01, slightly behind only at 0.5 of 0.1."""

    def bif(alpha: float, share: float, k: int) -> float:
        size = alpha * share
        return 0.45 if size < 0.002 else 0.396 + 0.008 * (k % 2) if size > 0.04 else 0.2

    write_lds(tmp_path, {"bif-paper": bif, "ekfac-library": 0.4}, shares=(0.01, 0.1), jitter=0.0)
    assert outcome(tmp_path, "BIF ahead where the retrained set is small") == HOLDS
    assert outcome(tmp_path, "BIF slightly behind where it is large") == HOLDS
    assert outcome(tmp_path, "BIF matches EK-FAC") == FAILS


@pytest.mark.parametrize(("bif", "expected"), [(0.5, FAILS), (0.3, FAILS)])
def test_far_from_slightly_behind(tmp_path: Path, bif: float, expected: str) -> None:
    write_lds(tmp_path, {"bif-paper": bif, "ekfac-library": 0.4})
    assert outcome(tmp_path, "BIF slightly behind where it is large") == expected


@pytest.mark.parametrize(("rival", "expected"), [(0.3, HOLDS), (0.5, FAILS), (0.4, UNDECIDED)])
def test_who_is_ahead(tmp_path: Path, rival: float, expected: str) -> None:
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4, "gradsim": rival, "trak-library": rival})
    for name in ("EK-FAC ahead of GradSim", "EK-FAC ahead of TRAK", "BIF ahead of GradSim", "BIF ahead of TRAK"):
        assert outcome(tmp_path, name) == expected, name


def test_few_seeds_have_their_paired_intervals(tmp_path: Path) -> None:
    write_lds(tmp_path, {"ekfac-library": 0.4, "gradsim": 0.37}, seeds=(1,), jitter=0.0)
    (raw, normalised, *_) = claim("EK-FAC ahead of GradSim").rule(Evidence(tmp_path))
    assert raw.cells[0].text == "0.390 - 0.360 = +0.030 [+0.010, +0.050] (one seed)"
    assert (raw.outcome, normalised.outcome) == (HOLDS, HOLDS)
    assert outcome(tmp_path, "EK-FAC ahead of GradSim") == HOLDS  # across queries, one seed decides nothing


def test_protocols_and_settings_stand_apart(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": 0.2, "bif-long": 0.4, "ekfac-library": 0.4, "ekfac": 0.4})
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4}, protocol="scratch", run_id="ddddeeeeffff")
    found = {group: outcome(tmp_path, "BIF matches EK-FAC", group) for group in GROUPS}
    assert found == {AS_PAPER: FAILS, TUNED: HOLDS, SCRATCH: HOLDS, "scratch, tuned": MISSING}


def test_the_other_sign_is_read_where_bif_is_below_zero(tmp_path: Path) -> None:
    """Across subsets BIF matches as it is; across queries only with its sign turned: the verdict depends on it."""
    write_lds(tmp_path, {"bif-paper": -0.4, "ekfac-library": 0.4}, across=1.0)
    readings = claim("BIF matches EK-FAC").rule(Evidence(tmp_path))
    assert [(one.words[-1], one.outcome) for one in readings if one.words[3] == "across subsets"] == [
        ("raw", FAILS), ("raw, BIF's sign turned", HOLDS), ("train-normalised", FAILS),
        ("train-normalised, BIF's sign turned", HOLDS),
    ]  # fmt: skip
    assert outcome(tmp_path, "BIF matches EK-FAC") == UNDECIDED


def test_two_settings_under_one_label_are_left_out_and_said(tmp_path: Path) -> None:
    levels = {"bif-paper": 0.4, "ekfac-library": 0.4}
    write_lds(tmp_path, levels, seeds=(1, 2))
    write_lds(tmp_path, levels, seeds=(3, 4), run_id="ddddeeeeffff")
    path = tmp_path / "ddddeeeeffff" / "run.json"
    record = json.loads(path.read_text())
    record["config"]["methods"][0]["draws"] = 7
    path.write_text(json.dumps(record))
    assert outcome(tmp_path, "BIF matches EK-FAC") == MISSING
    assert "several settings under one label" in ledger_page(Evidence(tmp_path), tmp_path)


def test_a_label_that_is_not_what_it_says_decides_nothing(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4})
    assert outcome(tmp_path, "BIF matches EK-FAC") == HOLDS
    path = tmp_path / "aaaabbbbcccc" / "run.json"
    path.write_text(path.read_text().replace('"draws": 100', '"draws": 250'))
    assert outcome(tmp_path, "BIF matches EK-FAC") == MISSING
    assert "draws=250, not 100" in ledger_page(Evidence(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("slope", "expected"), [(-0.1, HOLDS), (0.1, FAILS), (0.0, UNDECIDED)], ids=["falls", "grows", "flat"]
)
def test_lds_against_the_attribution_set(tmp_path: Path, slope: float, expected: str) -> None:
    level = lambda alpha, share, k: 0.4 + slope * math.log10(share) + 0.01 * (-1) ** k * (share == 0.1)  # noqa: E731
    parts = ("bif-paper", "ekfac-library", "gradsim", "trak-library")
    write_lds(tmp_path, dict.fromkeys(parts, level), shares=(0.01, 0.1))
    assert outcome(tmp_path, "LDS grows as the attribution set shrinks") == expected


@pytest.mark.parametrize(
    ("gap", "expected"), [(0.1, HOLDS), (0.03, UNDECIDED)], ids=["intervals apart", "intervals overlap"]
)
def test_of_one_seed_the_attribution_sets_own_intervals_count(tmp_path: Path, gap: float, expected: str) -> None:
    parts = ("bif-paper", "ekfac-library", "gradsim", "trak-library")
    level = lambda alpha, share, k: 0.4 + gap * (share < 0.1)  # noqa: E731
    write_lds(tmp_path, dict.fromkeys(parts, level), shares=(0.01, 0.1), seeds=(1,))
    readings = claim("LDS grows as the attribution set shrinks").rule(Evidence(tmp_path))
    across_subsets = [one for one in readings if "across subsets" in one.words]
    assert across_subsets
    assert {cell.outcome for one in across_subsets for cell in one.cells} == {expected}


def test_one_alpha_against_it_keeps_the_attribution_set_from_holding(tmp_path: Path) -> None:
    parts = ("bif-paper", "ekfac-library", "gradsim", "trak-library")
    level = lambda alpha, share, k: 0.4 + (-0.1 if alpha == 0.1 else 0.1) * (share < 0.1)  # noqa: E731
    write_lds(tmp_path, dict.fromkeys(parts, level), shares=(0.01, 0.1), alphas=(0.1, 0.3, 0.5))
    assert outcome(tmp_path, "LDS grows as the attribution set shrinks") == UNDECIDED


def ends_of_a_ceiling(low: float) -> dict[str, float]:
    middle = low + 0.1
    return {"ci_low": low, "ceiling": middle, "reliability": middle**2, "ci_high": low + 0.2}


@pytest.mark.parametrize(("noisy", "low", "expected"), [(0.01, 0.5, HOLDS), (0.01, 0.0, UNDECIDED), (0.1, 0.0, HOLDS)])
def test_a_smaller_attribution_set_under_a_ceiling_that_may_be_zero_decides_nothing(
    tmp_path: Path, noisy: float, low: float, expected: str
) -> None:
    """Under that of the larger one LDS still grows, and it is marked."""
    parts = ("bif-paper", "ekfac-library", "gradsim", "trak-library")
    level = lambda alpha, share, k: 0.4 - 0.1 * math.log10(share) + 0.01 * (-1) ** k * (share == 0.1)  # noqa: E731
    write_lds(tmp_path, dict.fromkeys(parts, level), shares=(0.01, 0.1))
    path = tmp_path / "aaaabbbbcccc" / "run.json"
    record = json.loads(path.read_text())
    for ceiling in record["ceilings"]:
        ceiling |= ends_of_a_ceiling(low if ceiling["alpha_attribution"] == noisy else 0.7)
    path.write_text(json.dumps(record))
    readings = claim("LDS grows as the attribution set shrinks").rule(Evidence(tmp_path))
    across_subsets = [cell for one in readings if "across subsets" in one.words for cell in one.cells]
    assert {cell.outcome for cell in across_subsets} == {expected}
    assert all(("touches 0" in cell.text) == (low == 0) for cell in across_subsets)


@pytest.mark.parametrize(("spread", "expected"), [(0.2, HOLDS), (0.0, FAILS), (0.03, UNDECIDED)])
def test_spread_over_seeds(tmp_path: Path, spread: float, expected: str) -> None:
    level = lambda alpha, share, k: 0.6 + spread * (k - 2) / 2  # noqa: E731
    write_lds(tmp_path, {"ekfac-library": level, "bif-paper": level})
    assert outcome(tmp_path, "LDS varies substantially over seeds") == expected


def test_a_spread_around_zero_is_no_share_of_anything(tmp_path: Path) -> None:
    write_lds(tmp_path, {"ekfac-library": 0.0})
    assert outcome(tmp_path, "LDS varies substantially over seeds") == UNDECIDED


@pytest.mark.parametrize(("low", "expected"), [(0.5, HOLDS), (0.0, UNDECIDED)])
def test_a_spread_under_a_ceiling_that_may_be_zero_decides_nothing(tmp_path: Path, low: float, expected: str) -> None:
    """LDS across queries has no ceiling; it is constant here."""
    write_lds(tmp_path, {"ekfac-library": lambda alpha, share, k: 0.6 + 0.1 * (k - 2)})
    path = tmp_path / "aaaabbbbcccc" / "run.json"
    record = json.loads(path.read_text())
    for ceiling in record["ceilings"]:
        ceiling["ci_low"] = low if ceiling["seed"] == SEEDS[0] else 0.8  # one seed is enough
    for row in record["rows"]:
        row["lds_across_queries"] = 0.3 + 0.02 * SEEDS.index(row["seed"])
    path.write_text(json.dumps(record))
    assert outcome(tmp_path, "LDS varies substantially over seeds") == expected
    readings = claim("LDS varies substantially over seeds").rule(Evidence(tmp_path))
    said = {one.words[3]: "touches 0" in one.cells[0].text for one in readings}
    assert said == {"across subsets": low == 0, "across queries, as printed": False}


@pytest.mark.parametrize(("low", "expected"), [(0.5, FAILS), (0.0, UNDECIDED)])
def test_who_is_ahead_under_a_ceiling_that_may_be_zero_is_not_decided(
    tmp_path: Path, low: float, expected: str
) -> None:
    write_lds(tmp_path, {"bif-paper": 0.1, "ekfac-library": 0.4})
    path = tmp_path / "aaaabbbbcccc" / "run.json"
    record = json.loads(path.read_text())
    for ceiling in record["ceilings"]:
        ceiling |= ends_of_a_ceiling(low)
    path.write_text(json.dumps(record))
    readings = claim("BIF matches EK-FAC").rule(Evidence(tmp_path))
    across_subsets = [cell for one in readings if "across subsets" in one.words for cell in one.cells]
    assert {cell.outcome for cell in across_subsets} == {expected}
    assert all(("touches 0" in cell.text) == (low == 0) for cell in across_subsets)


@pytest.mark.parametrize(("own", "expected"), [(0.0, HOLDS), (0.1, FAILS)])
def test_methods_within_a_seed(tmp_path: Path, own: float, expected: str) -> None:
    level = lambda alpha, share, k: 0.4 + own * (-1) ** k  # noqa: E731
    write_lds(tmp_path, {"ekfac-library": 0.4, "bif-paper": level})
    assert outcome(tmp_path, "Methods agree within a seed") == expected


@pytest.mark.parametrize(("library", "expected"), [(0.42, HOLDS), (0.38, HOLDS), (0.3, FAILS), (0.36, UNDECIDED)])
def test_defaults_of_ekfac(tmp_path: Path, library: float, expected: str) -> None:
    write_lds(tmp_path, {"ekfac-library": library, "ekfac": 0.4}, jitter=0.004)
    assert outcome(tmp_path, "EK-FAC works well with its defaults") == expected


@pytest.mark.parametrize(
    ("rhat", "first", "expected"),
    [(1.02, 1.02, HOLDS), (1.6, 1.6, FAILS), (1.18, 1.11, FAILS), (1.6, 1.02, UNDECIDED)],
)
def test_chains(tmp_path: Path, rhat: float, first: float, expected: str) -> None:
    lines = [
        {"label": "bif-paper", "method": "bif", "seed": seed, "alpha_attribution": 0.1, "ess": 20.0, "num_draws": 400,
         "rhat": first if seed == SEEDS[0] else rhat}
        for seed in SEEDS
    ]  # fmt: skip
    write_lds(tmp_path, {"bif-paper": 0.3}, diagnostics=lines)
    assert outcome(tmp_path, "The chains have converged") == expected
    (reading,) = claim("The chains have converged").rule(Evidence(tmp_path))
    assert "20 of 400 draws count" in reading.cells[0].text


# ---- Pythia-14M ----


def test_printed_sizes_and_their_order(tmp_path: Path) -> None:
    levels = {"gradsim": 0.2, "ekfac-library": 0.4, "bif-paper": 0.12}
    write_lds(tmp_path, levels, task="pythia14m", protocol="finetune", shares=(1.0,), alphas=(0.5,))
    assert outcome(tmp_path, "Pythia-14M: LDS of GradSim") == HOLDS
    assert outcome(tmp_path, "Pythia-14M: LDS of EK-FAC") == FAILS
    assert outcome(tmp_path, "Pythia-14M: LDS of BIF") == HOLDS
    assert outcome(tmp_path, "Pythia-14M: EK-FAC ahead of GradSim") == HOLDS
    assert outcome(tmp_path, "Pythia-14M: GradSim ahead of BIF") == HOLDS
    assert outcome(tmp_path, "Pythia-14M: sequence and token level agree") == HOLDS
    assert outcome(tmp_path, "BIF matches EK-FAC") == MISSING, "another task"


def test_a_stand_in_decides_no_size(tmp_path: Path) -> None:
    write_lds(tmp_path, {"ekfac-library": 0.9}, task="pythia14m", protocol="finetune", description="a stand-in, really")
    assert outcome(tmp_path, "Pythia-14M: LDS of EK-FAC") == UNDECIDED
    assert "Measured on a stand-in, not the paper's weights." in ledger_page(Evidence(tmp_path), tmp_path)


# ---- costs ----


def write_speed(folder: Path, bif: float, draws: int = 100) -> None:
    rows = [
        {"method": name, "label": label, "seconds": seconds, "fit_seconds": 0.0, "score_seconds": seconds,
         "all_seconds": [0.9 * seconds, seconds, 1.1 * seconds], "options": options}
        for name, label, seconds, options in (
            ("bif", "bif-paper", bif, {"chains": 4, "draws": draws}), ("ekfac", "ekfac-library", 10.0, {}),
        )
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    question = {"task": {"name": "cifar10"}, "alpha_attribution": 0.1}
    (folder / "speed.json").write_text(json.dumps({"rows": rows, "question": question}))


@pytest.mark.parametrize(
    ("bif", "draws", "expected"),
    [(50.0, 100, HOLDS), (3.0, 100, FAILS), (22.0, 100, UNDECIDED), (50.0, 1500, MISSING)],
)
def test_five_times_faster(tmp_path: Path, bif: float, draws: int, expected: str) -> None:
    write_speed(tmp_path / "speed", bif, draws)
    assert outcome(tmp_path, "EK-FAC five times faster on ResNet-9") == expected


def test_seconds_of_the_runs_are_a_reading_too(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4})  # 10 s and 2 s
    (reading,) = claim("EK-FAC five times faster on ResNet-9").rule(Evidence(tmp_path))
    assert reading.cells[0] == Cell("BIF / EK-FAC", "10.0 s / 2.0 s = 5.00 [5.00, 5.00] over seeds", HOLDS)


def test_the_suite_from_the_rates_that_ship(tmp_path: Path) -> None:
    """The package's own rows: what they say today of the paper's scaling claims."""
    (tmp_path / "scaling.csv").write_text((ROOT / "bench" / "scaling" / "rates.csv").read_text())
    assert outcome(tmp_path, "BIF two orders of magnitude faster at 2.8 B") == HOLDS
    assert outcome(tmp_path, "41 GiB of factors") == HOLDS
    assert outcome(tmp_path, "EK-FAC's cost is its fit") == HOLDS
    readings = claim("BIF two orders of magnitude faster at 2.8 B").rule(Evidence(tmp_path))
    assert [one.group for one in readings] == [AS_PAPER, "shown", "shown"]
    assert readings[-1].outcome == FAILS, "fitted on 400 sequences it is not"


def test_smaller_models_decide_nothing_about_the_largest(tmp_path: Path) -> None:
    lines = (ROOT / "bench" / "scaling" / "rates.csv").read_text().splitlines(keepends=True)
    small = [line for line in lines if not line.startswith(("2.8b,", "6.9b,", "12b,"))]
    (tmp_path / "scaling.csv").write_text("".join(small))
    for name in (
        "BIF two orders of magnitude faster at 2.8 B",
        "The same GPU memory",
        "BIF scales better in model size",
    ):
        assert outcome(tmp_path, name) == UNDECIDED


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.4, 0.38, 0.36), HOLDS),
        ((0.4, 0.1, 0.3), FAILS),
        ((0.4, 0.3, 0.35), UNDECIDED),
        ((0.04, 0.01, 0.02), UNDECIDED),  # all within their own intervals of nothing
    ],
)
def test_stable_settings(tmp_path: Path, values: Sequence[float], expected: str) -> None:
    cells: list[dict] = [
        {"burn_in": 100, "gamma": gamma, "lds": value, "ci_high": value + 0.05, "rhat": 1.01}
        for gamma, value in zip((1e3, 1e4, 1e5), values)
    ]
    cells += [{"burn_in": 0, "gamma": 1e3, "lds": 0.01, "rhat": 3.0}, {"burn_in": 100, "gamma": 1e6, "lds": None}]
    for task in ("cifar10", "pythia14m"):
        (tmp_path / task).mkdir()
        record = {
            "task": task, "protocol": "paper", "alpha": 0.1, "run_id": "s", "method": "bif",
            "axes": {"burn_in": [0, 100], "gamma": [1e3, 1e4, 1e5, 1e6]}, "cells": cells,
            "options": GIVEN_SETTINGS[task, "bif-paper"],
        }  # fmt: skip
        (tmp_path / task / "sweep.json").write_text(json.dumps(record))
    assert outcome(tmp_path, "BIF is stable over its settings") == expected


def test_mixed_cells_decide_about_what_they_still_vary_in(tmp_path: Path) -> None:
    mixing = {1e3: "not mixed: R-hat 1.5, 9 of 400 draws count", 1e4: "", 1e5: ""}
    cells = [
        {"gamma": gamma, "n_beta": n_beta, "lds": 0.4, "ci_high": 0.45, "rhat": 1.01, "mixing": mixing[gamma]}
        for gamma in (1e3, 1e4, 1e5)
        for n_beta in (10, 100)
    ]
    record = {
        "task": "cifar10", "protocol": "paper", "alpha": 0.1, "run_id": "s", "method": "bif", "cells": cells,
        "axes": {"gamma": [1e3, 1e4, 1e5], "n_beta": [10, 100]}, "options": GIVEN_SETTINGS["cifar10", "bif-paper"],
        "alpha_attribution": 0.1, "num_queries": 1000, "split": "tune",
    }  # fmt: skip

    def mixed() -> tuple[str, str]:
        (tmp_path / "sweep.json").write_text(json.dumps(record))
        readings = claim("BIF is stable over its settings").rule(Evidence(tmp_path))
        (cell,) = next(one.cells for one in readings if one.words[-1] == "mixed")
        assert readings[0].words[1] == "0.1 of the training set, 1,000 tune queries"
        return cell.text, cell.outcome

    assert mixed() == ("0.400 to 0.400, 0% of the best, 4 settings", HOLDS)
    for cell in cells:
        cell["mixing"] = "" if cell["gamma"] == 1e5 else "not mixed"
    record["cells"] = [*cells, {**cells[-1], "n_beta": 1000}]
    assert mixed() == ("0.400 to 0.400, 0% of the best, 3 settings, all at gamma 100000", UNDECIDED)


def write_curve(
    folder: Path, method: str, axis: str, points: Sequence[tuple[float, float]], protocol: str = "paper", **other: float
) -> None:
    given = GIVEN_TRAK if method == "trak" else GIVEN_SETTINGS["cifar10", "bif-paper"]
    curve = {
        "method": method, "axis": axis, "normalised": False, "options": {**given, **other},
        "points": [
            {"value": v, "seconds": 1.0, "lds": lds, "ci_low": lds - 0.02, "ci_high": lds + 0.02} for v, lds in points
        ],
    }  # fmt: skip
    record = {"task": "cifar10", "protocol": protocol, "alpha": 0.1, "run_id": "b", "device": "H", "curves": [curve]}
    (folder / "budget.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (((400, 0.39), (1000, 0.395), (10_000, 0.4)), HOLDS),
        (((400, 0.1), (1000, 0.2), (10_000, 0.4)), FAILS),
        (((400, 0.39), (1000, 0.4)), UNDECIDED),
        (((400, 0.3), (1000, 0.365), (10_000, 0.4)), UNDECIDED),
        (((400, 0.3), (1000, 0.355), (10_000, 0.4)), UNDECIDED),
    ],
)
def test_draws(tmp_path: Path, points: Sequence[tuple[float, float]], expected: str) -> None:
    write_curve(tmp_path, "bif", "draws", points)
    assert outcome(tmp_path, "100 to 1,000 draws are enough") == expected


@pytest.mark.parametrize(("most", "expected"), [(0.4, HOLDS), (0.2, FAILS), (0.31, UNDECIDED)])
def test_checkpoints(tmp_path: Path, most: float, expected: str) -> None:
    write_curve(tmp_path, "trak", "checkpoints", ((1, 0.3), (5, most)))
    assert outcome(tmp_path, "TRAK gains from more checkpoints") == expected


@pytest.mark.parametrize(
    ("protocol", "other", "group"),
    [
        ("paper", {"draws": 2500}, "paper"),
        ("paper", {"step_size": 1e-4}, "tuned"),
        ("paper", {"control_variate": True}, "tuned"),
        ("scratch", {}, "scratch"),
        ("scratch", {"step_size": 1e-4}, "scratch, tuned"),
    ],
)
def test_a_curve_counts_for_the_settings_it_was_made_with(
    tmp_path: Path, protocol: str, other: dict[str, float], group: str
) -> None:
    write_curve(tmp_path, "bif", "draws", ((400, 0.1), (10_000, 0.4)), protocol, **other)
    (claim,) = (claim for claim in PAPER_CLAIMS if claim.name == "100 to 1,000 draws are enough")
    (reading,) = claim.rule(Evidence(tmp_path))
    assert reading.group == group


# ---- the page ----


def test_the_page_links_its_records_and_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lds(tmp_path / "cifar10", {"bif-paper": 0.2, "ekfac-library": 0.4})
    assert main(["--results", str(tmp_path)]) == 0
    page = (tmp_path / "reproduction.md").read_text()
    assert "| **does not hold** |" in page
    assert "[`aaaabbbbcccc`](cifar10/aaaabbbbcccc/run.json)" in page
    assert str(tmp_path) not in page
    assert main(["--results", str(tmp_path), "--check"]) == 0
    (tmp_path / "reproduction.md").write_text(page.replace("does not hold", "holds"))
    assert main(["--results", str(tmp_path), "--check"]) == 1
    assert "is not what the records say" in capsys.readouterr().err
    assert main(["--results", str(tmp_path / "none")]) == 2
    assert main(["--results", str(tmp_path), "--vision-task", "cifar"]) == 2


def test_equal_seconds_are_those_of_one_run(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-equal": 0.2})
    write_lds(tmp_path, {"ekfac": 0.4}, run_id="another00000")
    assert "which is kronfluence's), " in ledger_page(Evidence(tmp_path), tmp_path)
    write_lds(tmp_path, {"bif-equal": 0.2, "ekfac": 0.4}, run_id="both00000000", alphas=(0.3,))
    page = ledger_page(Evidence(tmp_path), tmp_path)
    assert "kronfluence's; medians 10.0 s and 2.0 s at 0.1 of the training set)" in page


def test_this_repository_s_ledger_is_what_its_records_say() -> None:
    page = ROOT / "results" / "reproduction.md"
    made = ledger_page(Evidence(ROOT / "results"), ROOT / "results")
    assert page.read_text(encoding="utf-8") == made, "python -m bench.ledger writes it again"


def test_every_claim_has_its_columns() -> None:
    assert len({one.name for one in PAPER_CLAIMS}) == len(PAPER_CLAIMS)
    for one in PAPER_CLAIMS:
        assert one.place
        assert one.rule_words.endswith(".")
        python, _, module, *words = shlex.split(one.command)
        assert python == "python"
        command = importlib.import_module("bench.scaling.command" if module == "bench.scaling" else module)
        arguments = command.make_parser().parse_args(words)
        for spec in (getattr(arguments, "methods", None) or []) if module != "bench.scaling" else []:
            asked = parse_method_spec(spec)
            method = load_method(asked.name, **asked.options)
            given = GIVEN_SETTINGS.get((arguments.task, asked.label), {}) if module == "bench.lds" else {}
            assert {name: getattr(method, name) for name in given} == given, "the command has the paper's settings"
