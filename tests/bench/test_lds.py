"""The command as a user meets it: what it prints, what it keeps, and how it takes bad input and accidents."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from threadpoolctl import threadpool_limits

from bench.cli import lds_main as main
from bench.rows import COLUMNS
from bench.runner import Session
from bench.tables import pairs_over_seeds_text
from retrain.source import source_fingerprint
from retrain.store import Store

PLANTED = "tests.helpers.planted:Planted"
HAS_GPU = torch.cuda.is_available()


@dataclass
class Command:
    """`python -m bench.lds` as a user runs it, in a folder of its own."""

    words: list[str]
    folder: Path
    capture: pytest.CaptureFixture[str]
    errors: str = ""  # of the last run, on stderr

    def run(self, *more: str, code: int = 0) -> str:
        assert main([*self.words, *more]) == code
        said, self.errors = self.capture.readouterr()
        assert "Traceback" not in self.errors
        return said

    def rows(self, *more: str, code: int = 0) -> list[dict[str, Any]]:
        return json.loads(self.run(*more, "--json", code=code))

    def count(self, kind: str = "retrain") -> int:
        return sum(1 for _ in Store(self.folder / "cache").entries(kind))


@pytest.fixture
def lds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """A run of a second: ridge regression, exact retrains."""
    words = [
        "--task", PLANTED, "--alpha", "0.5", "--subsets", "12", "--replicates", "1", "--methods", "gradsim", "random",
        "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "runs"), "--cluster", "inline", "--device", "cpu",
    ]  # fmt: skip
    return Command(words, tmp_path, capsys)


# ---- what it prints and keeps ----


def test_some_subsets_replicated_are_enough_for_a_ceiling(lds: Command) -> None:
    """12 subsets, the first 6 twice: 18 retrains; the planted retrains are exact, so the ceiling is 1."""
    once, rows = lds.rows(), lds.rows("--replicates", "2", "--replicated-subsets", "6")
    assert lds.count() == 18
    assert [row["num_subsets"] for row in rows] == [12] * 4
    assert rows[0]["ceiling"] == pytest.approx(1.0)
    assert rows[0]["lds"] == pytest.approx(once[0]["lds"], abs=1e-6)
    assert once[0]["ceiling"] is None


def test_rows_have_the_documented_columns_and_one_row_a_method_normalisation_alpha_and_seed(lds: Command) -> None:
    rows = lds.rows()
    assert [list(row) for row in rows] == [COLUMNS] * 4
    assert {(row["method"], row["normalised"]) for row in rows} == set(product(("gradsim", "random"), (False, True)))
    place = lds.folder / "runs" / rows[0]["run_id"]
    record = json.loads((place / "run.json").read_text())
    assert record["device"].startswith("CPU")
    assert record["versions"]["torch"]
    assert "--alpha 0.5" in record["command"]
    frame = pd.read_csv(place / "lds.csv")
    assert (list(frame.columns), len(frame)) == (COLUMNS, 4)
    gradsim = frame[(frame.method == "gradsim") & ~frame.normalised].iloc[0]
    assert gradsim.lds > 0.3, "the sign is right and the subsets match the losses"
    assert gradsim.ci_low < gradsim.lds < gradsim.ci_high
    words = ["--alpha", "0.3", "0.6", "--seeds", "1", "2"]
    assert {(row["alpha"], row["seed"]) for row in lds.rows(*words)} == set(product((0.3, 0.6), (1, 2)))
    said = lds.run(*words)
    assert max(len(line) for line in said.splitlines() if "record:" not in line) <= 100
    assert all(text in lds.run(*words, "--wide") for text in ("per seed", "across queries", "fit s"))


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


def test_changing_what_matters_recomputes_only_that(lds: Command) -> None:
    noisier = ["--set", f"{PLANTED}.noise=3.0"]  # another task is another truth
    for more, retrains in ([], 12), (["--subsets", "15"], 15), (["--replicates", "2"], 27), (noisier, 39):
        lds.run(*more)
        assert lds.count() == retrains, more


def test_a_second_run_computes_nothing_and_another_sum_over_subsets_is_another_prediction(
    lds: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lds.rows()
    monkeypatch.setattr("tests.helpers.planted.Planted.train", lambda *_, **__: pytest.fail("retrained"))
    monkeypatch.setattr("bench.scoring.metered", lambda *_: pytest.fail("scored again"))
    assert lds.rows() == first
    real = source_fingerprint
    edited = lambda *modules: "edited" if "bench.prediction" in modules else real(*modules)  # noqa: E731
    monkeypatch.setattr("bench.scoring.source_fingerprint", edited)
    lds.run()
    assert lds.count("predictions") == 4, "two methods, summed by two codes"
    assert lds.count("scores") == 2


def test_an_offset_of_all_scores_changes_nothing_on_any_number_of_threads_inline_or_local(lds: Command) -> None:
    """LDS to the last digit; in float32, sums lose it from offsets of 1e4 on."""
    shifted = "{of}-shifted=tests.helpers.bad_methods:Shifted@of={of},offset={offset}"
    found = []
    for turn, (cluster, threads, offset) in enumerate([("inline", 1, "0"), ("inline", 2, "1e6"), ("local", 2, "-1e6")]):
        methods = [shifted.format(of=one, offset=offset) for one in ("gradsim", "bif")]
        words = ["--methods", *methods, "--subsets", "40", "--cluster", cluster, "--jobs", "1"]
        words += ["--cache", str(lds.folder / str(turn))]
        torch.set_num_threads(threads)
        try:
            with threadpool_limits(threads):
                found.append(lds.rows(*words)[: len(methods)])
        finally:
            torch.set_num_threads(1)
    for rows in zip(*found, strict=True):
        assert rows[0]["lds"] is not None
        for name in ("label", "lds", "ci_low", "ci_high", "num_undefined"):
            assert len({row[name] for row in rows}) == 1, (rows[0]["label"], name)


def test_dry_run_and_collect_start_nothing_and_force_computes_again(lds: Command, refused: Callable[..., str]) -> None:
    assert "0 of 12 retrains cached, 12 to do" in lds.run("--dry-run", "--queries", "999", "--replicated-subsets", "99")
    lds.run("--collect", code=1)
    assert "12 of 12 subsets are missing" in lds.errors
    assert lds.count() == 0
    assert not list((lds.folder / "runs").glob("*/run.json")), "no record of nothing"
    for words in (["--collect", "--force"], ["--collect", "--rescore"], ["--dry-run", "--json"]):
        assert all(word in refused(main, [*lds.words, *words]) for word in words)
    first = lds.rows()
    out = lds.run("--dry-run")
    assert "12 of 12 retrains cached" in out
    assert "gradsim: cached" in out
    assert lds.rows("--collect")[0]["num_subsets"] == 12
    store = Store(lds.folder / "cache")
    before = {info.key: info.modified() for info in store.entries("retrain")}
    time.sleep(0.02)
    again = lds.rows("--force")
    after = {info.key: info.modified() for info in store.entries("retrain")}
    assert set(after) == set(before)
    assert all(after[key] > before[key] for key in after)
    assert [row["lds"] for row in again] == [row["lds"] for row in first]


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
        pytest.param(["--device", "cuda"], "--device cpu", marks=pytest.mark.skipif(HAS_GPU, reason="there is a GPU")),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(extra: list[str], words: str, lds: Command, refused: Any) -> None:
    assert words in refused(main, [*lds.words, *extra])


# ---- methods that go wrong ----


def test_methods_that_fail_are_named_and_the_others_finish(lds: Command) -> None:
    reasons = {
        "Raises": "RuntimeError: the sky fell", "CannotHere": "too few examples; expected more",
        "Transposed": "expected (20, 200)", "Meddles": "changed the model",
    }  # fmt: skip
    bad = [f"tests.helpers.bad_methods:{name}" for name in reasons]
    assert {row["method"] for row in lds.rows("--methods", *bad, "gradsim", code=1)} == {"gradsim"}
    for method, words in zip(bad, reasons.values()):
        assert any(method in line and words in line for line in lds.errors.splitlines()), method
    assert lds.count("scores") == 1, "only what worked is cached"


def test_methods_that_write_into_their_data_are_named_and_spoil_nobody(lds: Command) -> None:
    options = {
        "target=train": "the training examples", "target=train,through=data,stage=fit": "the training examples",
        "target=queries,through=numpy": "the queries", "target=task": "the queries",
    }  # fmt: skip
    clean = lds.rows("--methods", "gradsim", "--cache", str(lds.folder / "clean"))
    bad = [f"bad{number}=tests.helpers.bad_methods:Scribbles@{words}" for number, words in enumerate(options)]
    rows = lds.rows("--methods", *bad, "gradsim", code=1)
    assert [row["lds"] for row in rows] == [row["lds"] for row in clean]
    lines = [line for line in lds.errors.splitlines() if "bad" in line]
    for line, what in zip(lines, options.values(), strict=True):
        assert f"changed {what}; expected them untouched" in line
    assert [lds.count(kind) for kind in ("scores", "predictions", "fit", "part")] == [1, 1, 0, 0]


def test_what_cannot_fit_is_refused_before_anything_is_retrained(
    lds: Command, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Method by method, and the others go on; where none is left, nothing is retrained at all."""
    too_large = ["--methods", "bif@draws=20000000000", "trak@projection=1000000000"]
    line = refused(main, [*lds.words, *too_large])
    assert "no method is left to run: bif" in line
    assert "trak needs" in line
    assert lds.count() == 0
    retrain = Session.retrain
    said_before: list[str] = []

    def watched(session: Session) -> Any:
        said_before.extend(record.getMessage() for record in caplog.records)
        return retrain(session)

    monkeypatch.setattr(Session, "retrain", watched)
    assert "gradsim" in lds.run(*too_large, "gradsim", code=1)
    not_started = [line for line in said_before if "was not started" in line]
    assert [line.split("@")[0] for line in not_started] == ["bif", "trak"]
    assert lds.errors.count("was not started") >= 2, "and once more below the table"
    assert lds.count() == 12


def test_nan_scores_are_reported_and_never_averaged_away(lds: Command) -> None:
    bad = "tests.helpers.bad_methods:GivesNaN"
    (row,) = lds.rows("--methods", bad, code=1)
    assert row["num_undefined"] == 3
    assert row["lds"] is not None
    assert "3 scores that are not finite" in lds.errors
    assert row["note"].startswith("3 scores are not finite")
    (info,) = Store(lds.folder / "cache").entries("scores")
    before = info.modified()
    time.sleep(0.02)
    lds.run("--methods", bad, code=1)
    assert info.modified() > before, "evidence, not a result: it is made again"
    assert " nan" not in lds.run("--methods", bad, "gradsim", "--queries", "3", code=1)
    assert f"LDS of {bad} is undefined for every query at alpha 0.5, seed 1" in lds.errors
    assert "LDS of gradsim" not in lds.errors


def test_a_full_disk_costs_the_record_and_not_the_table(lds: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bench.records.write_whole", full)
    assert "gradsim" in lds.run(code=1)
    assert "cannot be written: No space left on device; the same command writes it" in lds.errors
    monkeypatch.undo()
    lds.run()


def test_damaged_entries_of_every_kind_are_made_again(lds: Command) -> None:
    first, store = lds.rows(), Store(lds.folder / "cache")
    damaged = [entry for kind in ("retrain", "model", "predictions", "scores") for entry in store.entries(kind)]
    for entry in damaged:
        file = entry.path / "arrays.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 0xFF
        file.write_bytes(content)
    assert [row["lds"] for row in lds.rows()] == [row["lds"] for row in first]
    assert len(list((lds.folder / "cache" / "quarantine").rglob("*.safetensors"))) == len(damaged)


def test_a_failure_whose_traceback_cannot_be_kept_is_one_short_line(lds: Command, monkeypatch: Any) -> None:
    """The log of the failure lies in the cache, which may be what fails; the run's own failures.log has it then."""
    monkeypatch.setattr("retrain.jobs.tracker._log_traceback", lambda *_: None)
    lds.run("--methods", "tests.helpers.bad_methods:Raises", "random", code=1)
    (line,) = [line for line in lds.errors.splitlines() if line.startswith("python -m bench.lds:")]
    assert "the sky" in line
    (kept,) = lds.folder.glob("runs/*/failures.log")
    assert "bad_methods.py" in kept.read_text()
