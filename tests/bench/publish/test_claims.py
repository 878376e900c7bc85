"""The rules of the paper's claims on made-up records: what holds, what does not, what cannot be decided."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from bench.publish import claims
from bench.publish.__main__ import main
from bench.publish.claims import FAILS, GIVEN_SETTINGS, HOLDS, OPEN, UNDECIDABLE, Evidence, Judged, judge_all, page
from tests.helpers.synthetic_results import edited

ROOT = Path(__file__).resolve().parents[3]
NOISE = (-0.010, 0.004, 0.000, 0.009, -0.003)  # of a seed; the same for every method, so that differences are exact
METHOD_OF = {"bif-paper": "bif", "ekfac-library": "ekfac", "kfac-library": "kfac", "trak-library": "trak"}
Level = float | Callable[[float, float, int], float]  # of (alpha, share, number of the seed)
SIZES = {"split": "report", "seed": 1, "description": "", "num_subsets": 100, "replicates": 2, "num_queries": 1000}
PARTS = ("bif-paper", "ekfac-library", "gradsim", "trak-library")


def judged(folder: Path, name: str) -> Judged:
    (claim,) = (one for one in claims.claims() if one["name"] == name)
    return claims.RULES[claim["rule"]](Evidence(folder), claim)


def across_subsets(one: Judged) -> list[Any]:
    return [found for found in one.found if found.words[2] == "across subsets"]


def write_lds(
    folder: Path,
    levels: Mapping[str, Level],
    *,
    task: str = "cifar10",
    protocol: str = "paper",
    alphas: Sequence[float] = (0.1, 0.5),
    shares: Sequence[float] = (0.1,),
    seeds: Sequence[int] = (1, 2, 3, 4, 42),
    jitter: float = 0.002,
    run_id: str = "aaaabbbbcccc",
    scheme: str = "fixed",
    queries: int = 8000,
    **task_settings: str,
) -> None:
    """A record in which a label's LDS is its level, plus what a seed adds to all, plus a little of its own."""
    rows, ceilings, pairs = [], [], []
    for share, alpha, (k, seed) in product(shares, alphas, enumerate(seeds)):
        where = {"task": task, "protocol": protocol, "alpha": alpha, "alpha_attribution": share, "seed": seed}
        where |= {"num_subsets": 100, "num_queries": queries, "num_undefined": 0}
        ceilings.append(where | {"ceiling": 0.9, "reliability": 0.81, "num_replicates": 2})
        lds: dict[str, float] = {}
        for i, (label, level) in enumerate(levels.items()):
            base = level(alpha, share, k) if callable(level) else level
            lds[label] = base + NOISE[k % 5] + jitter * math.sin(3 * i + 5 * k)
        for normalised in (False, True):
            for label, value in lds.items():
                row = {
                    "method": METHOD_OF.get(label, label), "label": label, "settings": "", "normalised": normalised,
                    "lds": value, "ci_low": value - 0.02, "ci_high": value + 0.02, "lds_across_queries": value,
                    "ceiling": 0.9, "fit_seconds": 1.0, "score_seconds": 9.0 if label.startswith("bif") else 1.0,
                    "device": "NVIDIA H200",
                }  # fmt: skip
                rows.append({**where, **row})
            for label, against in combinations(sorted(lds), 2):
                gap = lds[label] - lds[against]
                ends = {"ci_low": gap - 0.02, "ci_high": gap + 0.02, "difference": gap}
                pairs.append({**where, "label": label, "against": against, "normalised": normalised, **ends})
    methods = [
        {"name": METHOD_OF.get(label, label), "label": label, "of": label, **GIVEN_SETTINGS.get((task, label), {})}
        for label in levels
    ]
    config = {"task": {"name": task, **task_settings}, "query_split": "report", "scheme": scheme, "methods": methods}
    record = {
        "run_id": run_id, "device": "NVIDIA H200", "description": "made up", "rows": rows, "ceilings": ceilings,
        "pairs": pairs, "diagnostics": [], "config": config,
    }  # fmt: skip
    (folder / run_id).mkdir(parents=True)
    (folder / run_id / "run.json").write_text(json.dumps(record))


def test_the_rule_of_verdicts_which_decides_nothing_without_records(tmp_path: Path) -> None:
    assert claims.outcome_of([]) == OPEN
    assert claims.outcome_of([HOLDS, HOLDS, OPEN]) == HOLDS
    assert claims.outcome_of([FAILS, FAILS, OPEN]) == FAILS
    assert claims.outcome_of([HOLDS, FAILS, OPEN, OPEN]) == OPEN, "half of them open"
    assert claims.outcome_of([HOLDS] * 19 + [FAILS]) == HOLDS, "one cell in twenty may be chance"
    assert claims.outcome_of([HOLDS] * 8 + [FAILS] * 2) == FAILS
    assert claims.outcome_of([FAILS]) == FAILS
    evidence = Evidence(tmp_path)
    found = judge_all(evidence)
    assert {one.verdict for one in found} == {UNDECIDABLE}
    assert page(evidence, found).count("Missing: ") == len(found)


# ---- LDS ----


def by_share(slope: float) -> Level:
    return lambda alpha, share, k: 0.4 + slope * math.log10(share) + 0.01 * (-1) ** k * (share == 0.1)


def by_seed(level: float, spread: float) -> Level:
    return lambda alpha, share, k: level + spread * (k - 2)


def rivals(level: float) -> dict[str, Level]:
    return dict(zip(PARTS, (0.4, 0.4, level, level)))


MATCHES, SMALLER, SPREAD = "BIF matches EK-FAC", "LDS grows as the attribution set shrinks", "LDS varies over seeds"
WITHIN, DEFAULTS = "Methods agree within a seed", "EK-FAC works with its defaults"
AHEAD = ("EK-FAC ahead of GradSim", "EK-FAC ahead of TRAK", "BIF ahead of GradSim", "BIF ahead of TRAK")
BOTH_SHARES: dict[str, Any] = {"shares": (0.01, 0.1)}
CASES: list[tuple[str, dict[str, Level], dict[str, Any], str]] = [
    *((MATCHES, {"bif-paper": bif, "ekfac-library": 0.4}, {"jitter": jitter}, verdict)
      for bif, jitter, verdict in ((0.398, 0.002, HOLDS), (0.5, 0.002, HOLDS), (0.3, 0.002, FAILS),
                                   (0.36, 0.08, UNDECIDABLE))),
    (MATCHES, {"bif-paper": 0.0, "ekfac-library": 0.0}, {}, UNDECIDABLE),  # the rival predicts nothing
    *((name, rivals(level), {}, verdict)
      for name in AHEAD for level, verdict in ((0.3, HOLDS), (0.5, FAILS), (0.4, UNDECIDABLE))),
    *((SMALLER, dict.fromkeys(PARTS, by_share(slope)), BOTH_SHARES, verdict)
      for slope, verdict in ((-0.1, HOLDS), (0.1, FAILS), (0.0, UNDECIDABLE))),
    *((SPREAD, {"ekfac-library": by_seed(0.6, spread / 2)}, {}, verdict)
      for spread, verdict in ((0.3, HOLDS), (0.0, FAILS), (0.06, UNDECIDABLE))),
    # Consistent where they are nearer to each other than one seed to another.
    *((WITHIN, {"ekfac-library": by_seed(0.4, spread), "bif-paper": by_seed(bif, spread)}, {}, verdict)
      for bif, spread, verdict in ((0.4, 0.05, HOLDS), (0.41, 0.1, HOLDS), (0.1, 0.0, FAILS))),
    *((DEFAULTS, {"ekfac-library": library, "ekfac": 0.4}, {"jitter": 0.004}, verdict)
      for library, verdict in ((0.42, HOLDS), (0.35, HOLDS), (0.2, FAILS), (0.3, UNDECIDABLE))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "levels", "known", "expected"), CASES)
def test_verdicts_on_lds(tmp_path: Path, name: str, levels: dict, known: dict, expected: str) -> None:
    write_lds(tmp_path, levels, **known)
    assert judged(tmp_path, name).verdict == expected


def test_small_and_large_sets_are_told_apart(tmp_path: Path) -> None:
    """Ahead only at alpha 0.1 of 0.01, slightly behind only at 0.5 of 0.1."""

    def bif(alpha: float, share: float, k: int) -> float:
        size = alpha * share
        return 0.45 if size < 0.002 else 0.396 + 0.008 * (k % 2) if size > 0.04 else 0.2

    write_lds(tmp_path, {"bif-paper": bif, "ekfac-library": 0.4}, shares=(0.01, 0.1), jitter=0.0)
    assert judged(tmp_path, "BIF ahead where the retrained set is small").verdict == HOLDS
    assert judged(tmp_path, "BIF slightly behind where it is large").verdict == HOLDS
    assert judged(tmp_path, "BIF matches EK-FAC").verdict == FAILS


def test_few_seeds_have_their_paired_intervals_and_one_has_none_across_queries(tmp_path: Path) -> None:
    write_lds(tmp_path, {"ekfac-library": 0.4, "gradsim": 0.37}, seeds=(1,), jitter=0.0)
    found = judged(tmp_path, "EK-FAC ahead of GradSim")
    assert across_subsets(found)[0].cells[0].text == "0.390 - 0.360 = +0.030 [+0.010, +0.050]"
    assert {one.outcome for one in across_subsets(found)} == {HOLDS}
    assert found.verdict == UNDECIDABLE


def test_two_runs_of_one_seed_are_compared_by_the_ends_of_both(tmp_path: Path) -> None:
    """No pair was measured, but on the same subsets; the means are of the seeds that have both."""
    write_lds(tmp_path, {"ekfac-library": 0.5}, seeds=(1, 2, 3), alphas=(0.5,))
    write_lds(tmp_path, {"trak-library": 0.1}, seeds=(1,), alphas=(0.5,), run_id="ddddeeeeffff")
    first, *_ = across_subsets(judged(tmp_path, "EK-FAC ahead of TRAK"))
    assert first.cells[0].text == "0.490 - 0.090 = +0.400 [+0.360, +0.440]"


def test_the_record_nearest_to_the_text_gives_the_verdict_and_the_others_sensitivity(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4})
    write_lds(tmp_path, {"bif-paper": 0.2, "ekfac-library": 0.4}, run_id="primed000000", warmup_keeps="optimizer")
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4}, run_id="scratch00000", protocol="scratch")
    found = judged(tmp_path, "BIF matches EK-FAC")
    assert (found.verdict, found.agree) == (FAILS, "3 of 7"), "two metrics, raw and normalised, of two, less itself"
    assert [one.outcome for one in found.found if one.counts_as == claims.SCRATCH] == [HOLDS] * 4
    assert found.primary.records == ("primed000000",)
    assert found.primary.words[2:4] == ("across queries, as printed", "raw")


def test_the_protocol_to_the_letter_gives_the_verdict_where_it_was_run(tmp_path: Path) -> None:
    """Of the share it has alone; a claim about the smallest set still looks at every share. EK-FAC may be `kfac`'s."""
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4}, shares=(0.01, 0.1))
    literal: dict[str, Any] = {"warmup_keeps": "optimizer", "scheme": "bernoulli", "queries": 10_000}
    write_lds(tmp_path, {"bif-paper": 0.2, "kfac-library": 0.4}, run_id="literal00000", **literal)
    found = judged(tmp_path, "BIF matches EK-FAC")
    assert (found.verdict, found.agree, found.primary.records) == (FAILS, "3 of 7", ("literal00000",))
    smallest = judged(tmp_path, "BIF ahead where the retrained set is small").primary
    assert [cell.where for cell in smallest.cells] == ["share 0.01, alpha 0.1"]
    evidence = Evidence(tmp_path)
    assert "Not so at share 0.01: " in page(evidence, judge_all(evidence))


def test_gradsim_on_ekfacs_layers_is_told_beside_gradsim_on_all_weights(tmp_path: Path) -> None:
    write_lds(tmp_path, {"ekfac-library": 0.4, "gradsim": 0.3})
    levels = {"ekfac-library": 0.4, "gradsim": 0.3, "gradsim-identity": 0.35}
    write_lds(tmp_path, levels, task="digits", protocol="scratch", shares=(1.0,), run_id="digits000000")
    found = judged(tmp_path, "EK-FAC ahead of GradSim")
    assert (found.verdict, found.agree) == (HOLDS, "3 of 3"), "another task counts for nothing"
    assert "On digits: +0.100 with all weights, +0.050 with EK-FAC's layers." in found.why


def test_the_sign_turned_is_shown_and_never_counted(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": -0.4, "ekfac-library": 0.4})
    found = judged(tmp_path, "BIF matches EK-FAC")
    turned = [one for one in found.found if one.words[-1] == "sign turned"]
    assert {(one.counts_as, one.outcome) for one in turned} == {(claims.SHOWN, HOLDS)}
    assert (found.verdict, found.agree) == (FAILS, "3 of 3")


def test_two_settings_under_one_label_are_left_out_and_said(tmp_path: Path) -> None:
    levels = {"bif-paper": 0.4, "ekfac-library": 0.4}
    write_lds(tmp_path, levels, seeds=(1, 2))
    write_lds(tmp_path, levels, seeds=(3, 4), run_id="ddddeeeeffff")
    with edited(tmp_path / "ddddeeeeffff" / "run.json") as record:
        record["config"]["methods"][0]["draws"] = 7
    evidence = Evidence(tmp_path)
    assert judge_all(evidence)[0].verdict == UNDECIDABLE
    assert any("several settings under one label" in line for line in evidence.left_out)


def test_a_label_that_is_not_what_it_says_decides_nothing(tmp_path: Path) -> None:
    write_lds(tmp_path, {"bif-paper": 0.4, "ekfac-library": 0.4})
    assert judged(tmp_path, "BIF matches EK-FAC").verdict == HOLDS
    path = tmp_path / "aaaabbbbcccc" / "run.json"
    path.write_text(path.read_text().replace('"draws": 100', '"draws": 250'))
    found = judged(tmp_path, "BIF matches EK-FAC")
    assert (found.verdict, {one.counts_as for one in found.found}) == (UNDECIDABLE, {claims.SHOWN})


def test_under_a_ceiling_that_may_be_zero_nothing_across_subsets_is_decided(tmp_path: Path) -> None:
    write_lds(tmp_path, {**dict.fromkeys(PARTS, by_share(0.1)), "bif-paper": 0.1}, **BOTH_SHARES)
    for low, expected in ((0.5, FAILS), (0.0, OPEN)):
        with edited(tmp_path / "aaaabbbbcccc" / "run.json") as record:
            for ceiling in record["ceilings"]:
                ceiling |= {"ci_low": low, "ceiling": low + 0.1, "reliability": (low + 0.1) ** 2, "ci_high": low + 0.2}
        for name in (MATCHES, SMALLER):
            found = judged(tmp_path, name)
            assert {one.outcome for one in across_subsets(found)} == {expected}, name
            assert found.verdict == FAILS, "LDS across queries has no ceiling"


def test_a_stand_in_decides_no_size_but_the_implementations(tmp_path: Path) -> None:
    levels = {"gradsim": 0.2, "ekfac-library": 0.4, "bif-paper": 0.12}
    write_lds(tmp_path, levels, task="pythia14m", protocol="finetune", shares=(1.0,), alphas=(0.5,))
    sizes = judged(tmp_path, "Pythia-14M: sizes and order")
    assert (sizes.verdict, sizes.shown_number) == (UNDECIDABLE, "gradsim 0.200, ekfac 0.400, bif 0.120")
    assert judged(tmp_path, "Pythia-14M: two implementations").verdict == HOLDS
    assert judged(tmp_path, "BIF matches EK-FAC").verdict == UNDECIDABLE, "another task"


# ---- settings, draws and costs ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.4, 0.38, 0.36), HOLDS),
        ((0.4, 0.1, 0.3), FAILS),
        ((0.4, 0.3, 0.35), UNDECIDABLE),
        ((0.04, 0.01, 0.02), UNDECIDABLE),  # all within their own intervals of nothing
    ],
)
def test_stable_settings(tmp_path: Path, values: Sequence[float], expected: str) -> None:
    cells: list[dict] = [
        {"burn_in": 100, "gamma": gamma, "lds": value, "ci_high": value + 0.05, "rhat": 1.01}
        for gamma, value in zip((1e3, 1e4, 1e5), values)
    ]
    cells += [{"burn_in": 0, "gamma": 1e3, "lds": 0.01, "rhat": 3.0}, {"burn_in": 100, "gamma": 1e6, "lds": None}]
    record = {
        "task": "cifar10", "protocol": "paper", "alpha": 0.1, "run_id": "s", "method": "bif",
        "axes": {"burn_in": [0, 100], "gamma": [1e3, 1e4, 1e5, 1e6]}, "cells": cells,
        "options": GIVEN_SETTINGS["cifar10", "bif-paper"], **SIZES,
    }  # fmt: skip
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    assert judged(tmp_path, "LDS is stable over settings").verdict == expected
    assert judged(tmp_path, "LDS is stable where the loss converges").verdict == expected
    # A setting whose loss does not converge counts for the first alone.
    cells.append({"burn_in": 100, "gamma": 1e2, "lds": -0.3, "ci_high": -0.29, "rhat": 1.7})
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    assert judged(tmp_path, "LDS is stable over settings").verdict == FAILS
    assert judged(tmp_path, "LDS is stable where the loss converges").verdict == expected


def write_curve(
    folder: Path, method: str, axis: str, points: Sequence[tuple[float, float]], protocol: str = "paper", **other: float
) -> None:
    given = claims.GIVEN_TRAK if method == "trak" else GIVEN_SETTINGS["cifar10", "bif-paper"]
    curve = {"method": method, "label": method, "axis": axis, "normalised": False, "options": {**given, **other}}
    curve["points"] = [
        {"value": v, "seconds": 1.0, "lds": lds, "ci_low": lds - 0.02, "ci_high": lds + 0.02} for v, lds in points
    ]
    record = {"task": "cifar10", "protocol": protocol, "alpha": 0.1, "run_id": "b", "device": "H", **SIZES}
    record["curves"] = [curve]
    (folder / "budget.json").write_text(json.dumps(record))


DRAWS, CHECKPOINTS = "100 to 1,000 draws suffice", "TRAK gains from checkpoints"


@pytest.mark.parametrize(
    ("name", "method", "axis", "points", "expected"),
    [
        *((DRAWS, "bif", "draws", ((400, 0.1), (1000, at_most), (10_000, 0.4)), verdict)
          for at_most, verdict in ((0.2, HOLDS), (-0.2, FAILS), (0.01, UNDECIDABLE))),
        *((CHECKPOINTS, "trak", "checkpoints", ((1, 0.3), (5, most)), verdict)
          for most, verdict in ((0.4, HOLDS), (0.2, FAILS), (0.31, UNDECIDABLE))),
    ],
)  # fmt: skip
def test_curves(tmp_path: Path, name: str, method: str, axis: str, points: Any, expected: str) -> None:
    write_curve(tmp_path, method, axis, points)
    assert judged(tmp_path, name).verdict == expected


def test_a_curve_counts_for_the_settings_it_was_made_with(tmp_path: Path) -> None:
    for protocol, other, counts_as in (
        ("paper", {"draws": 2500}, claims.PRIMARY),
        ("paper", {"step_size": 1e-4}, claims.SHOWN),
        ("paper", {"control_variate": True}, claims.SHOWN),
        ("scratch", {}, claims.SCRATCH),
    ):
        write_curve(tmp_path, "bif", "draws", ((400, 0.1), (10_000, 0.4)), protocol, **other)
        (found,) = judged(tmp_path, DRAWS).found
        assert found.counts_as == counts_as


@pytest.mark.parametrize(
    ("method", "bif", "expected"),
    [("bif_devinterp", 50.0, HOLDS), ("bif_devinterp", 3.0, FAILS), ("bif", 50.0, UNDECIDABLE)],
)
def test_five_times_faster_is_about_the_papers_sampler(tmp_path: Path, method: str, bif: float, expected: str) -> None:
    rows = [
        {"method": name, "label": name, "settings": "", "seconds": seconds, "fit_seconds": 0.0,
         "score_seconds": seconds, "all_seconds": [0.9 * seconds, seconds, 1.1 * seconds], "agrees": 1.0,
         "peak_memory_bytes": 1, "num_train": 1, "num_queries": 1}
        for name, seconds in ((method, bif), ("ekfac", 10.0))
    ]  # fmt: skip
    question = {"task": {"name": "cifar10"}, "alpha_attribution": 0.1}
    record = {"rows": rows, "question": question, "device": "H", "description": ""}
    (tmp_path / "speed.json").write_text(json.dumps(record))
    assert judged(tmp_path, "EK-FAC five times faster on ResNet-9").verdict == expected


def test_the_suite_from_the_rates_that_ship(tmp_path: Path) -> None:
    """The package's own rows; smaller models decide nothing about the largest."""
    lines = (ROOT / "bench" / "scaling" / "rates.csv").read_text().splitlines(keepends=True)
    names = ("BIF a hundred times faster at 2.8 B", "41 GiB of factors", "EK-FAC's cost is its fit")
    (tmp_path / "scaling.csv").write_text("".join(lines))
    assert {judged(tmp_path, name).verdict for name in names} == {HOLDS}
    small = [line for line in lines if not line.startswith(("2.8b,", "6.9b,", "12b,"))]
    (tmp_path / "scaling.csv").write_text("".join(small))
    assert {judged(tmp_path, name).verdict for name in names} == {UNDECIDABLE}


@pytest.mark.parametrize(("drawn", "expected"), [(0.8, HOLDS), (1.0, FAILS), (0.995, UNDECIDABLE)])
def test_two_draws_of_the_labels_are_held_against_exact_ones(tmp_path: Path, drawn: float, expected: str) -> None:
    cells = [
        {"metric": "overlap", "label": label, "against": other, "value": mean, "ci_low": mean - 0.01, "ci_high": mean}
        for label, other, mean in (("ekfac-library", "ekfac-again", drawn), ("exact", "exact-again", 1.0))
    ]
    record = {"config": {"task": {"name": "digits"}}, "detail": {"cells": cells}}
    (tmp_path / "answers.json").write_text(json.dumps(record))
    assert judged(tmp_path, "EK-FAC differs between repeats").verdict == expected


def test_the_limit_is_reached_as_the_posterior_narrows(tmp_path: Path) -> None:
    (tmp_path / "limit").mkdir()
    for power, expected in ((1.0, HOLDS), (0.1, FAILS)):
        exact = [{"n_beta": n, "distance": n**-power} for n in (10.0, 100.0, 1000.0)]
        (tmp_path / "limit" / "limit.json").write_text(json.dumps({"exact": exact}))
        assert judged(tmp_path, "BIF is the damped influence function in the limit").verdict == expected


def test_the_page_is_checked_against_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lds(tmp_path / "cifar10", {"bif-paper": 0.2, "ekfac-library": 0.4})
    assert main(["claims", "--results", str(tmp_path)]) == 0
    text = (tmp_path / "reproduction.md").read_text()
    assert "| **does not hold** |" in text
    assert main(["claims", "--results", str(tmp_path), "--check"]) == 0
    (tmp_path / "reproduction.md").write_text(text.replace("does not hold", "holds"))
    assert main(["claims", "--results", str(tmp_path), "--check"]) == 1
    assert main(["claims", "--results", str(tmp_path / "none")]) == 2


def test_this_repository_s_page_and_cells_are_what_its_records_say_of_every_quoted_claim() -> None:
    evidence = Evidence(ROOT / "results")
    found = judge_all(evidence)
    assert (ROOT / "results" / "reproduction.md").read_text() == page(evidence, found), "tda-bench publish claims"
    assert (ROOT / "results" / "reproduction.csv").read_text() == claims.cells_csv(found), "tda-bench publish claims"
    verdicts = [one.verdict for one in found]
    said = " ".join((ROOT / "results" / "README.md").read_text().split())
    counts = (verdicts.count(one) for one in (HOLDS, FAILS, UNDECIDABLE))
    assert "{} of {} hold here, {} do not, and {} cannot".format(next(counts), len(found), *counts) in said
    assert verdicts.count(UNDECIDABLE) <= 6
    known = claims.claims()
    assert len({one["name"] for one in known}) == len(known)
    for one in known:
        assert {"quote", "label", "test", "rule", "missing"} <= set(one)
        assert len(f"{one['quote']} ({one['label']})".split()) <= 25, "a cell of the page"
