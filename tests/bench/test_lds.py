"""The command as a user meets it: what it prints, what it keeps, and how it takes bad input and accidents."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits

from bench.cli import lds_main as main
from bench.rows import COLUMNS, undefined_reason
from bench.runner import Session
from bench.tables import ceiling_text, pairs_over_seeds_text
from retrain.source import source_fingerprint
from retrain.store import Store

PLANTED = "tests.helpers.planted:Planted"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A run of a second: ridge regression, exact retrains."""
    return [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "12", "--replicates", "1", "--methods", "gradsim", "random",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs"), "--cluster", "inline", "--device", "cpu",
    ]  # fmt: skip


def rows_of(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> list[dict]:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def count(cache: Path, kind: str = "retrain") -> int:
    return sum(1 for _ in Store(cache).entries(kind))


# ---- what it prints and keeps ----


def test_some_subsets_replicated_are_enough_for_a_ceiling(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """12 subsets, the first 6 twice: 18 retrains; the planted retrains are exact, so the ceiling is 1."""
    once = rows_of(arguments, capsys)
    arguments[arguments.index("--replicates") + 1] = "2"
    assert main([*arguments, "--replicated-subsets", "6"]) == 0
    assert "12 subsets x 2 (6 of them)" in capsys.readouterr().out
    assert count(tmp_path / "cache") == 18
    rows = rows_of([*arguments, "--replicated-subsets", "6"], capsys)
    assert [row["num_subsets"] for row in rows] == [12] * 4
    assert rows[0]["ceiling"] == pytest.approx(1.0)
    assert rows[0]["lds"] == pytest.approx(once[0]["lds"], abs=1e-6)
    assert once[0]["ceiling"] is None


def test_rows_have_the_documented_columns_and_one_row_a_method_and_normalisation(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = rows_of(arguments, capsys)
    assert [list(row) for row in rows] == [COLUMNS] * 4
    assert {(row["method"], row["normalised"]) for row in rows} == {
        (name, flag) for name in ("gradsim", "random") for flag in (False, True)
    }
    run_id = rows[0]["run_id"]
    record = json.loads((tmp_path / "runs" / run_id / "run.json").read_text())
    assert record["device"].startswith("CPU")
    assert record["versions"]["torch"]
    assert "--alpha 0.5" in record["command"]
    frame = pd.read_csv(tmp_path / "runs" / run_id / "lds.csv")
    assert list(frame.columns) == COLUMNS
    assert len(frame) == 4
    gradsim = frame[(frame.method == "gradsim") & ~frame.normalised].iloc[0]
    assert gradsim.lds > 0.3, "the sign is right and the subsets match the losses"
    assert gradsim.ci_low < gradsim.lds < gradsim.ci_high


def test_several_alphas_and_seeds_give_a_row_each(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*arguments, "--alpha", "0.3", "0.6", "--seeds", "1", "2"]
    assert {(row["alpha"], row["seed"]) for row in rows_of(words, capsys)} == {
        (a, s) for a in (0.3, 0.6) for s in (1, 2)
    }
    for more, headers in (
        ([], ("s.e.", "95 % span", "of ceiling")),
        (["--wide"], ("per seed", "across queries", "fit s")),
    ):
        assert main([*words, *more]) == 0
        said = capsys.readouterr().out
        assert all(text in said for text in headers)
        assert more or max(len(line) for line in said.splitlines() if "record:" not in line) <= 100


def test_pairs_over_seeds_are_turned_the_same_way() -> None:
    where = {"alpha": 0.1, "alpha_attribution": 1.0, "normalised": False}
    seeds = [
        where | {"label": "a", "against": "b", "difference": 0.03, "ci_low": 0.01, "ci_high": 0.05},
        where | {"label": "b", "against": "a", "difference": 0.01, "ci_low": 0.002, "ci_high": 0.02},
        where | {"label": "a", "against": "random", "difference": 0.5, "ci_low": 0.4, "ci_high": 0.6},
        where | {"alpha": 0.5, "label": "a", "against": "b", "difference": 9.0, "ci_low": 8.0, "ci_high": 10.0},
    ]
    *_, line = pairs_over_seeds_text(seeds, 0.1, 1.0).splitlines()
    assert line.split() == ["a", "-", "b", "raw", "+0.010", "[-0.020,", "+0.050]", "+0.030", "-0.010", "-"]


def test_changing_what_matters_recomputes_only_that(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    noisier = ["--set", f"{PLANTED}.noise=3.0"]  # another task is another truth
    for more, retrains in ([], 12), (["--subsets", "15"], 15), (["--replicates", "2"], 27), (noisier, 39):
        rows_of([*arguments, *more], capsys)
        assert count(tmp_path / "cache") == retrains, more


def test_a_second_run_computes_nothing_and_another_sum_over_subsets_is_another_prediction(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rows_of(arguments, capsys)
    monkeypatch.setattr("tests.helpers.planted.Planted.train", lambda *_, **__: pytest.fail("retrained"))
    monkeypatch.setattr("bench.scoring.metered", lambda *_: pytest.fail("scored again"))
    assert rows_of(arguments, capsys) == first
    real = source_fingerprint
    edited = lambda *modules: "edited" if "bench.prediction" in modules else real(*modules)  # noqa: E731
    monkeypatch.setattr("bench.scoring.source_fingerprint", edited)
    rows_of(arguments, capsys)
    assert count(tmp_path / "cache", "predictions") == 4, "two methods, summed by two codes"
    assert count(tmp_path / "cache", "scores") == 2


def test_an_offset_of_all_scores_changes_nothing_on_any_number_of_threads_inline_or_local(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """LDS to the last digit; in float32, sums lose it from offsets of 1e4 on."""
    first = arguments.index("--methods") + 1
    methods = ("gradsim", "bif")
    shifted = "{of}-shifted=tests.helpers.bad_methods:Shifted@of={of},offset={offset}"
    words = [*arguments[:first], *methods, *arguments[first + 2 :]]
    words[words.index("--subsets") + 1] = "40"
    ways = [("inline", 1, "0"), ("inline", 2, "1e6"), ("local", 2, "-1e6")]
    found = []
    for turn, (cluster, threads, offset) in enumerate(ways):
        words[first : first + len(methods)] = [shifted.format(of=one, offset=offset) for one in methods]
        words[words.index("--cluster") + 1] = cluster
        words[words.index("--cache") + 1] = str(tmp_path / f"cache-{turn}")
        torch.set_num_threads(threads)
        try:
            with threadpool_limits(threads):
                found += [rows_of(words, capsys)[: len(methods)]]
        finally:
            torch.set_num_threads(1)
    for rows in zip(*found, strict=True):
        assert rows[0]["lds"] is not None
        for name in ("label", "lds", "ci_low", "ci_high", "num_undefined"):
            assert len({row[name] for row in rows}) == 1, (rows[0]["label"], name)


def test_dry_run_and_collect_start_nothing_and_force_computes_again(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert main([*arguments, "--dry-run"]) == 0
    assert "0 of 12 retrains cached, 12 to do" in capsys.readouterr().out
    assert main([*arguments, "--collect"]) == 1
    assert "12 of 12 subsets are missing" in capsys.readouterr().err
    assert count(tmp_path / "cache") == 0
    assert not list((tmp_path / "runs").glob("*/run.json")), "no record of nothing"
    for option in ("--force", "--rescore"):
        said = refused(main, [*arguments, "--collect", option])
        assert f"{option} makes things again and --collect starts nothing" in said
    said = refused(main, [*arguments, "--dry-run", "--json"])
    assert "--dry-run says in words what would be computed; leave out --json" in said
    first = rows_of(arguments, capsys)
    assert main([*arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "12 of 12 retrains cached" in out
    assert "gradsim: cached" in out
    assert rows_of([*arguments, "--collect"], capsys)[0]["num_subsets"] == 12
    before = {info.key: info.modified() for info in Store(tmp_path / "cache").entries("retrain")}
    time.sleep(0.02)
    again = rows_of([*arguments, "--force"], capsys)
    after = {info.key: info.modified() for info in Store(tmp_path / "cache").entries("retrain")}
    assert set(after) == set(before)
    assert all(after[key] > before[key] for key in after)
    assert [row["lds"] for row in again] == [row["lds"] for row in first]


# ---- bad input: one line, exit code 2 ----


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--alpha", "0"], "out of range"),
        (["--alpha-attribution", "2"], "above 0 and at most 1"),
        (["--scores", "scores.npy"], "--scores needs --ground-truth FOLDER"),
        (["--subsets", "2"], "at least 3"),
        (["--task", "cifra10"], "available: "),
        (["--methods", "efkac"], "did you mean ekfac?"),
        (["--methods", "tests.helpers.planted:Planted"], "is not a baselines.method.Method"),
        (["--cache", "/dev/null/cache"], "/dev/null"),
        (["--set", "bif.chains=4"], "neither the task"),
        (["--set", "gradsim.nonsense=4"], "available: "),
        (["--set", f"{PLANTED}.num_train=many"], "expected int"),
        (["--methds", "bif"], "unrecognized arguments: --methds bif"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    extra: list[str], words: str, arguments: list[str], refused: Callable[..., str]
) -> None:
    assert words in refused(main, [*arguments, *extra])


def test_more_than_there_is_is_noted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--queries", "999", "--replicated-subsets", "99", "--dry-run"]) == 0
    error = capsys.readouterr().out
    assert "--queries 999: there are 20 (report), and all are used" in error
    assert "--replicated-subsets 99: there are 12 subsets, and all are replicated" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_what_to_do(arguments: list[str], refused: Callable[..., str]) -> None:
    assert "--device cpu" in refused(main, [*arguments, "--device", "cuda"])


# ---- methods that go wrong ----


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", "RuntimeError: the sky fell"),
        ("CannotHere", "too few examples; expected more"),
        ("Transposed", "expected (20, 200)"),
        ("Meddles", "changed the model"),
    ],
)
def test_a_method_that_fails_is_named_and_the_others_finish(
    name: str, words: str, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = f"tests.helpers.bad_methods:{name}"
    assert main([*arguments, "--json", "--methods", bad, "gradsim"]) == 1
    captured = capsys.readouterr()
    assert {row["method"] for row in json.loads(captured.out)} == {"gradsim"}
    assert bad in captured.err
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert count(tmp_path / "cache", "scores") == 1, "only what worked is cached"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("target=train", "the training examples"),
        ("target=train,through=data,stage=fit", "the training examples"),
        ("target=queries,through=numpy", "the queries"),
        ("target=task", "the queries"),
    ],
)
def test_a_method_that_writes_into_its_data_is_named_and_spoils_nobody(
    options: str, words: str, arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = arguments.index("--methods") + 1
    alone = [*arguments[:first], "gradsim", *arguments[first + 2 :]]
    clean = rows_of(alone, capsys)
    both = [*arguments[:first], f"bad=tests.helpers.bad_methods:Scribbles@{options}", *alone[first:]]
    both[both.index("--cache") + 1] = str(tmp_path / "other")
    assert main([*both, "--json"]) == 1
    captured = capsys.readouterr()
    assert [row["lds"] for row in json.loads(captured.out)] == [row["lds"] for row in clean]
    (line,) = [line for line in captured.err.splitlines() if "bad" in line]
    assert f"changed {words}; expected them untouched" in line
    assert [count(tmp_path / "other", kind) for kind in ("scores", "predictions", "fit", "part")] == [1, 1, 0, 0]


def test_what_cannot_fit_is_refused_before_anything_is_retrained(
    arguments: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Method by method, and the others go on; where none is left, nothing is retrained at all."""
    too_large = ["bif@draws=20000000000", "trak@projection=1000000000"]
    first = arguments.index("--methods") + 1
    alone = [*arguments[:first], *too_large, *arguments[first + 2 :]]
    assert main(alone) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no method is left to run: bif" in line
    assert "trak needs" in line
    assert count(tmp_path / "cache") == 0

    retrain = Session.retrain
    said_before: list[str] = []

    def watched(session: Session) -> Any:
        said_before.extend(record.getMessage() for record in caplog.records)
        return retrain(session)

    monkeypatch.setattr(Session, "retrain", watched)
    assert main([*arguments[:first], *too_large, *arguments[first:]]) == 1
    refused = [line for line in said_before if "was not started" in line]
    assert [line.split("@")[0] for line in refused] == ["bif", "trak"]
    assert all(re.search(r"needs [\d.]+ GiB at once .* GiB are free on cpu", line) for line in refused)
    printed = capsys.readouterr()
    assert "gradsim" in printed.out
    assert printed.err.count("was not started") >= 2, "and once more below the table"
    assert count(tmp_path / "cache") == 12


def test_nan_scores_are_reported_and_never_averaged_away(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [*arguments, "--json", "--methods", "tests.helpers.bad_methods:GivesNaN"]
    assert main(words) == 1
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    assert row["num_undefined"] == 3
    assert row["lds"] is not None
    assert "3 scores that are not finite" in captured.err
    assert row["note"].startswith("3 scores are not finite")
    (info,) = Store(tmp_path / "cache").entries("scores")
    before = info.modified()
    time.sleep(0.02)
    assert main(words) == 1
    assert info.modified() > before, "evidence, not a result: it is made again"
    capsys.readouterr()
    assert main([*arguments, "--methods", words[-1], "gradsim", "--queries", "3"]) == 1
    captured = capsys.readouterr()
    assert "LDS of tests.helpers.bad_methods:GivesNaN is undefined for every query at alpha 0.5, seed 1" in captured.err
    assert "LDS of gradsim" not in captured.err
    assert "nan" not in captured.out


def test_why_an_lds_is_undefined_and_a_ceiling_unknown() -> None:
    varied, same = np.arange(8.0).reshape(4, 2), np.ones((4, 2))
    assert undefined_reason(varied, same) == "its predictions are the same for all 4 subsets"
    assert undefined_reason(same, varied) == "the retrained losses are the same for all 4 subsets"
    assert undefined_reason(varied, same * np.nan) == "its predictions are not finite"
    ceiling = {"ceiling": np.nan, "num_replicates": 2, "num_subsets_replicated": 3}
    assert "same for all subsets" in ceiling_text([ceiling])
    assert "2 subsets were retrained on twice; needs 3" in ceiling_text([ceiling | {"num_subsets_replicated": 2}])
    assert "needs --replicates 2" in ceiling_text([ceiling | {"num_replicates": 1, "num_subsets_replicated": 0}])


# ---- accidents ----


def test_a_full_disk_costs_the_record_and_not_the_table(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.records.write_whole", full)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "gradsim" in captured.out
    assert "cannot be written: No space left on device; the same command writes it" in captured.err
    assert "Traceback" not in captured.err
    monkeypatch.undo()
    assert main(arguments) == 0


@pytest.mark.parametrize("kind", ["retrain", "model", "predictions", "scores"])
def test_a_damaged_entry_is_named_and_made_again(
    kind: str, arguments: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = rows_of(arguments, capfd)
    info = next(iter(Store(tmp_path / "cache").entries(kind)))
    file = info.path / "arrays.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.write_bytes(content)
    assert [row["lds"] for row in rows_of(arguments, capfd)] == [row["lds"] for row in first]
    assert list((tmp_path / "cache" / "quarantine").rglob("*.safetensors"))


def test_a_failure_whose_traceback_cannot_be_kept_is_one_short_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the failure lies in the cache, which may be what fails; the run's own failures.log has it then."""
    monkeypatch.setattr("retrain.jobs.tracker._log_traceback", lambda *_: None)
    arguments[arguments.index("--methods") + 1] = "tests.helpers.bad_methods:Raises"
    assert main(arguments) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("python -m bench.lds:")]
    assert "the sky" in line
    assert "Traceback" not in line
    (kept,) = tmp_path.glob("runs/*/failures.log")
    assert "bad_methods.py" in kept.read_text()
