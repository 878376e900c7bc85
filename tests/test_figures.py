"""Figures come from records alone: the same bytes each time, machines kept apart, and what is missing is named."""

import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest

from bench import figures
from bench.results import load_results
from tests.synthetic_results import write_budget, write_run, write_scaling, write_sweep


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write_run(folder / "cifar10", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    return folder


def test_every_figure_is_drawn_and_twice_gives_the_same_bytes(results: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    write_run(more / "cifar10", shares=(0.1, 1.0), seeds=(1,), alphas=(0.1,))
    write_run(more / "pythia", run_id="pythia000001", task="pythia14m", shares=(1.0,), seeds=(1,), alphas=(0.5,))
    write_sweep(more / "sweep")
    write_budget(more / "budget")
    write_scaling(more / "scaling")
    rest = ["seconds", "pareto", "llm", "sweep", "budget", "scaling"]
    for out in ("a", "b"):
        folder = ["--out", str(tmp_path / out)]
        assert figures.main(["--results", str(results), *folder, "--only", "lds", "--formats", *figures.FORMATS]) == 0
        assert figures.main(["--results", str(more), *folder, "--only", *rest, "--formats", "svg"]) == 0
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    assert first == second
    kinds = {name.split("-")[0].split(".")[0] for name in first}
    assert kinds == {"lds", *rest, "figures"}
    assert {"lds-cifar10-paper.svg", "lds-cifar10-paper.pdf", "lds-cifar10-paper.png"} <= set(first)


def test_drawing_into_the_results_does_not_change_them(results: Path) -> None:
    assert figures.main(["--results", str(results), "--only", "lds", "--formats", "svg"]) == 0
    before = digests(results / "figures")
    assert figures.main(["--results", str(results), "--only", "lds", "--formats", "svg"]) == 0
    assert digests(results / "figures") == before


def test_captions_carry_n_and_the_runs(results: Path) -> None:
    figures.main(["--results", str(results), "--only", "lds", "--formats", "svg"])
    index = json.loads((results / "figures" / "figures.json").read_text())
    entry = index["lds-cifar10-paper"]
    assert entry["runs"] == ["aaaabbbbcccc"]
    for fact in ("2 seeds (1, 2)", "100 subsets", "8,000 queries", "0 undefined", "standard error over seeds"):
        assert fact in entry["caption"]
    svg = (results / "figures" / "lds-cifar10-paper.svg").read_text()
    for label in ("EK-FAC", "BIF", "TRAK", "GradSim", "random", "ceiling"):
        assert label in svg


def test_without_results_it_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    assert figures.main(["--results", str(folder)]) == 0
    said = capsys.readouterr().out
    for kind in figures.KINDS:
        assert f"{kind.name}: missing, needs {kind.needs}" in said
        assert kind.command in said
    assert [path.name for path in (folder / "figures").iterdir()] == ["figures.json"]


def test_seconds_of_two_machines_never_share_an_axis(results: Path) -> None:
    for number, device in enumerate(("CPU aarch64", "NVIDIA A100")):
        write_run(
            results / "other", run_id=f"other000000{number}", shares=(0.1, 1.0), seeds=(7 + number,), device=device
        )
    write_scaling(results / "scaling", devices=("NVIDIA H200", "NVIDIA A100"))
    for kind, count in ((figures.draw_seconds, 3), (figures.draw_pareto, 3), (figures.draw_scaling, 2)):
        drawings = list(kind(load_results(results)))
        assert len(drawings) == count
        for drawing in drawings:
            machines = [name for name in ("H200", "A100", "CPU aarch64") if name in drawing.caption]
            assert len(machines) == 1


def test_the_same_experiment_twice_counts_once(results: Path) -> None:
    write_run(results / "again", run_id="zzzz00000000", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    rows = load_results(results).rows
    assert len(rows) == 2 * 2 * 2 * 5 * 2


def test_a_folder_named_after_its_task_is_an_experiment_of_its_own(results: Path) -> None:
    """Its ground truth may have other replicates or queries: its methods never share a panel with the task's."""
    before = len(load_results(results).rows)
    write_run(results / "cifar10-more", run_id="more00000000", shares=(0.1,), seeds=(1, 2), alphas=(0.1, 0.5))
    rows = load_results(results).rows
    assert set(rows["name"]) == {"cifar10", "cifar10-more"}
    assert len(rows) == before + 2 * 2 * 5 * 2
    stems = {drawing.stem for drawing in figures.draw_lds(load_results(results))}
    assert {"lds-cifar10-paper", "lds-cifar10-more-paper"} <= stems


def test_queries_that_settings_were_chosen_on_are_not_shown(results: Path) -> None:
    write_run(results / "tuning", run_id="tune00000000", seeds=(99,), split="tune")
    assert 99 not in set(load_results(results).rows["seed"])


def test_pareto_front() -> None:
    points = [(1.0, 0.1), (2.0, 0.3), (3.0, 0.2), (4.0, 0.4), (1.0, 0.05), (5.0, float("nan"))]
    assert figures.pareto_front(points) == [(1.0, 0.1), (2.0, 0.3), (4.0, 0.4)]


def test_damaged_files_are_named_and_the_rest_is_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (results / "broken").mkdir()
    (results / "broken" / "run.json").write_text('{"run_id": ')
    (results / "strange").mkdir()
    (results / "strange" / "run.json").write_text('{"run_id": "x"}')
    (results / "scaling").mkdir()
    pd.DataFrame([{"model": "14m"}]).to_csv(results / "scaling" / "scaling.csv", index=False)
    (results / "sweep").mkdir()
    (results / "sweep" / "sweep.json").write_text('{"axes": {}}')
    only = ["--only", "lds", "scaling", "sweep", "--formats", "svg"]
    assert figures.main(["--results", str(results), *only]) == 1
    said = capsys.readouterr()
    assert "lds-cifar10-paper.svg" in said.out
    for name in ("broken/run.json", "strange/run.json", "scaling.csv: lacks the columns", "sweep.json: lacks"):
        assert name in said.err


def test_bad_arguments_are_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--only", "nothing"], 'unknown figure "nothing"; available: lds'),
        (["--results", "/nowhere"], "is no folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            figures.main(["--results", str(results), *arguments])
        said = capsys.readouterr().err
        assert stop.value.code == 2
        assert text in said
        assert said.count("\n") == 1


def test_a_sweep_of_one_setting_is_a_line_and_settings_may_be_words(tmp_path: Path) -> None:
    facts = {"method": "ekfac", "task": "digits", "protocol": "scratch", "alpha": 0.1, "split": "tune", "run_id": "s"}
    one = [{"damping": value, "lds": lds, "lds_normalised": lds} for value, lds in ((1e-8, 0.5), (1.0, None))]
    two = [
        {"gradient": word, "control_variate": flag, "lds": 0.3, "traces": [[1.0, 2.0]]}
        for word in ("minibatch", "difference")
        for flag in (False, True)
    ]
    for name, axes, cells in (
        ("one", {"damping": [1e-8, 1.0]}, one),
        ("two", {"gradient": ["minibatch", "difference"], "control_variate": [False, True]}, two),
    ):
        (tmp_path / "results" / name).mkdir(parents=True)
        record = {**facts, "axes": axes, "cells": cells}
        (tmp_path / "results" / name / "sweep.json").write_text(json.dumps(record))
    out = tmp_path / "out"
    arguments = ["--results", str(tmp_path / "results"), "--out", str(out), "--only", "sweep", "--formats", "svg"]
    assert figures.main(arguments) == 0
    assert "damping" in (out / "sweep-one.svg").read_text()
    words = (out / "sweep-two.svg").read_text()
    assert "difference" in words
    assert "control_variate True" in words
    assert "1 values diverged" in (out / "figures.json").read_text()
