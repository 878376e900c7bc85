"""Figures come from records alone: the same bytes each time, machines kept apart, and what is missing is named."""

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text

from bench import figures, style
from bench.results import bars_of, load_results, over_seeds
from bench.tables import setting_text
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
    for fact in ("2 seeds (1, 2)", "100 subsets", "8,000 queries", "0 undefined", "end of the 2 seeds' 95 % intervals"):
        assert fact in entry["caption"]
    svg = (results / "figures" / "lds-cifar10-paper.svg").read_text()
    for label in ("EK-FAC", "BIF", "TRAK", "GradSim", "random", "ceiling", "end of the 2 seeds' 95 % intervals"):
        assert label in svg


def test_few_seeds_show_their_own_intervals_and_five_their_standard_error() -> None:
    scores = np.array([0.40, 0.402, 0.41, 0.42, 0.43])
    cell = pd.DataFrame({"lds": scores, "ci_low": scores - 0.02, "ci_high": scores + 0.03})
    error = scores.std(ddof=1) / np.sqrt(5)
    assert over_seeds(cell) == pytest.approx((scores.mean(), scores.mean() - error, scores.mean() + error))
    assert over_seeds(cell[:2]) == pytest.approx((0.401, 0.38, 0.432))
    assert over_seeds(cell[:1]) == pytest.approx((0.40, 0.38, 0.43))
    assert bars_of({5}) == "standard error over 5 seeds"
    assert bars_of({1}) == "95 % interval of the one seed"
    assert bars_of({2, 5}) == "standard error over 5 seeds; with 2, lowest to highest end of their 95 % intervals"


def change_record(place: Path, ceiling: dict[str, Any], **config: Any) -> None:
    record = json.loads((place / "run.json").read_text())
    record["config"] |= config
    record["ceilings"] = [known | ceiling for known in record["ceilings"]]
    for row in record["rows"]:
        row["ceiling"] = ceiling["ceiling"]
    (place / "run.json").write_text(json.dumps(record))


def test_a_ceiling_comes_from_the_same_ground_truth_in_another_run_and_from_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    kept: dict[str, Any] = {"task": "pythia14m", "shares": (1.0,), "alphas": (0.5,)}
    without = write_run(folder / "lm", run_id="without00000", seeds=(1, 2), **kept)
    change_record(without, {"ceiling": None, "reliability": None, "num_replicates": 1})
    replicated = write_run(folder / "lm", run_id="replicated00", seeds=(1,), methods=("random",), **kept)
    measured = {"ceiling": 0.6**0.5, "reliability": 0.6, "num_replicates": 2, "num_subsets_replicated": 25}
    change_record(replicated, measured)
    rows = load_results(folder).rows
    rows = rows[rows["method"] == "bif"]
    found = rows[rows["seed"] == 1]
    # Two replicates of reliability r are as good as one of reliability r / (2 - r).
    assert found["ceiling"].to_list() == pytest.approx(2 * [(0.6 / 1.4) ** 0.5])
    assert set(found["ceiling_from"]) == {"replicated00"}
    assert rows[rows["seed"] == 2]["ceiling"].isna().all()
    (drawing,) = figures.draw_lds(load_results(folder))
    assert drawing.runs == ["replicated00", "without00000"]
    assert "Ceiling from replicates in run replicated00 (25 subsets)" in drawing.caption
    (table,) = figures.draw_llm(load_results(folder))
    assert table.table is not None
    assert table.table["ceiling's run"].str.contains("replicated00").all()
    same: dict[str, Any] = {"query_split": "report", "task": {"name": "pythia14m"}, "scheme": None}
    for other in ({"query_split": "all"}, {"task": {"name": "pythia14m", "epochs": 2}}, {"scheme": "half"}, {}):
        change_record(replicated, measured, **{**same, **other})
        rows = load_results(folder).rows
        assert rows[rows["method"] == "bif"]["ceiling"].isna().all() == bool(other)


def test_a_run_without_replicates_says_so(tmp_path: Path) -> None:
    place = write_run(tmp_path / "lm", task="pythia14m", shares=(1.0,), alphas=(0.5,), seeds=(1,))
    change_record(place, {"ceiling": None, "reliability": None, "num_replicates": 1})
    (drawing,) = figures.draw_lds(load_results(tmp_path))
    assert "Ceiling unknown: no replicates." in drawing.caption
    assert "Dashed" not in drawing.caption


def test_words_neither_overlap_nor_leave_the_figure(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_run(results / "lm", run_id="pythia000001", task="pythia14m", shares=(1.0,), seeds=(1,), alphas=(0.5,))
    change_record(place, {"ceiling": None, "reliability": None, "num_replicates": 1})
    write_sweep(results / "sweep")
    write_one_setting(results / "one")
    write_budget(results / "budget")
    write_scaling(results / "scaling")
    written: list[Text] = []
    draw = Text.draw

    def keep(self: Text, renderer: Any, *rest: Any, **options: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            written.append(self)
        draw(self, renderer, *rest, **options)

    monkeypatch.setattr(Text, "draw", keep)
    kinds = (figures.draw_lds, figures.draw_pareto, figures.draw_sweep, figures.draw_budget, figures.draw_scaling)
    settings: Any = {**matplotlib.rcParamsDefault, "backend": "agg", **style.RC}
    with matplotlib.rc_context(settings):
        for drawing in (drawing for kind in kinds for drawing in kind(load_results(results))):
            assert drawing.figure is not None
            written.clear()
            FigureCanvasAgg(drawing.figure).draw()
            whole = drawing.figure.bbox.padded(1)
            boxes = [(text.get_text(), text.get_window_extent()) for text in dict.fromkeys(written)]
            for position, (text, box) in enumerate(boxes):
                assert whole.contains(box.x0, box.y0), (drawing.stem, text)
                assert whole.contains(box.x1, box.y1), (drawing.stem, text)
                for other, beside in boxes[position + 1 :]:
                    assert not box.padded(-0.3).overlaps(beside.padded(-0.3)), (drawing.stem, text, other)


def test_the_legend_of_projected_points_is_hollow(tmp_path: Path) -> None:
    write_scaling(tmp_path / "scaling")
    table = pd.read_csv(tmp_path / "scaling" / "scaling.csv")
    for projected, colour, said in ((True, "white", "Hollow: projected"), (False, "#0072b2", "Filled: measured")):
        table.assign(projected=projected).to_csv(tmp_path / "scaling" / "scaling.csv", index=False)
        (drawing,) = figures.draw_scaling(load_results(tmp_path))
        assert drawing.figure is not None
        key = drawing.figure.legends[0].legend_handles[0]
        assert key is not None
        assert key.get_markerfacecolor() == colour  # type: ignore[attr-defined]
        assert said in drawing.caption
        assert ("Hollow" in drawing.caption) == projected


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


FACTS = {"method": "ekfac", "task": "digits", "protocol": "scratch", "alpha": 0.1, "split": "tune", "run_id": "s"}


def write_one_setting(folder: Path, **more: Any) -> None:
    cells = [
        {"damping": value, "lds": lds, "ci_low": lds - 0.03, "ci_high": lds + 0.04, "lds_normalised": lds + 0.01}
        for value, lds in ((1e-8, 0.59), (1e-3, 0.58), (1.0, 0.56))
    ]
    record = {**FACTS, "seed": 1, "num_subsets": 100, "replicates": 2, "axes": {"damping": [1e-8, 1e-3, 1.0]}, **more}
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({**record, "cells": cells}))


def test_a_sweep_of_one_setting_shows_intervals_zero_and_n(tmp_path: Path) -> None:
    write_one_setting(tmp_path / "a")
    write_one_setting(tmp_path / "b", num_queries=1000)
    drawing, counted = figures.draw_sweep(load_results(tmp_path))
    assert drawing.figure is not None
    (axis,) = drawing.figure.axes
    assert axis.get_ylim()[0] <= 0
    raw, normalised = (found for found in axis.containers if isinstance(found, ErrorbarContainer))
    assert raw.has_yerr
    assert not normalised.has_yerr
    for fact in ("1 seed, 100 subsets, 2 replicates.", "seed 1", "for raw scores only"):
        assert fact in drawing.caption
    assert "2 replicates, 1,000 queries." in counted.caption


def test_an_empty_pattern_of_parameters_is_called_all() -> None:
    assert [setting_text(value) for value in ("", "attention", 1e-8, True)] == ["all", "attention", "1e-08", "True"]


def test_a_sweep_of_one_setting_is_a_line_and_settings_may_be_words(tmp_path: Path) -> None:
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
        record = {**FACTS, "axes": axes, "cells": cells}
        (tmp_path / "results" / name / "sweep.json").write_text(json.dumps(record))
    out = tmp_path / "out"
    arguments = ["--results", str(tmp_path / "results"), "--out", str(out), "--only", "sweep", "--formats", "svg"]
    assert figures.main(arguments) == 0
    assert "damping" in (out / "sweep-one.svg").read_text()
    words = (out / "sweep-two.svg").read_text()
    assert "difference" in words
    assert "control_variate True" in words
    assert "1 values diverged" in (out / "figures.json").read_text()
