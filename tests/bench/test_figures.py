"""Figures come from records alone: the same bytes each time, machines and settings kept apart, and what is missing is
named."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text

from bench.figures import draw_figures
from bench.figures.agreement import cell_text
from bench.figures.command import main
from bench.figures.drawing import Drawing, full_grids
from bench.figures.ensembles import without_ensembles
from bench.figures.kinds import KINDS
from bench.figures.paper import PAPER, reproduce_table
from bench.figures.pareto import pareto_front
from bench.figures.retraining import best_scores
from bench.figures.scaling import read_scaling
from bench.figures.table import clearly_best, escaped, pairs_by_cell
from bench.publish.plots.style import FORMATS, PaperSize
from bench.records import ELSEWHERE, Results, load_results, without_curves, without_scored_again
from bench.tables import setting_text
from tests.bench.test_records import change_record
from tests.helpers.synthetic_answers import write_agreement, write_removal
from tests.helpers.synthetic_results import write_budget, write_examples, write_run, write_scaling, write_sweep

USUAL = PaperSize()


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def draw(name: str, folder: Path | Results, size: PaperSize = USUAL) -> list[Drawing]:
    (kind,) = [kind for kind in KINDS if kind.name == name]
    with matplotlib.rc_context(size.settings()):
        return list(kind.draw(load_results(folder) if isinstance(folder, Path) else folder, size))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write_run(folder / "cifar10", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    return folder


def write_long_tokens(folder: Path) -> None:
    folder.mkdir(parents=True)
    matrix = np.random.default_rng(1).normal(size=(60, 70)).round(3)
    pair = {"query": 1, "train": 2, "query_tokens": [f" w{k}" for k in range(60)], "train_tokens": ["x$y"] * 70}
    pair |= {"bif": matrix.tolist(), "ekfac": matrix[0].tolist()}
    content = {"kind": "tokens", "description": "long", "seed": 1, "scores": "normalised BIF", "pairs": [pair]}
    (folder / "examples.json").write_text(json.dumps(content))


def write_limit(folder: Path) -> None:
    folder.mkdir(parents=True)
    regression = {"copies": 100, "num_train": 16, "num_queries": 4}
    config = {"regression": regression, "sampler": "sgld", "gradient": "full batch", "damping": 0.05, "thinning": 25}
    config |= {"step_times_precision": 0.04, "burn_in": 8, "draws_of_a_copy": 32, "seeds": [1]}
    sampled = [
        {"n_beta": n, "draws": draws, "distance": 1 / n + draws**-0.5, "low": 1 / n, "high": 1 / n + 2 * draws**-0.5}
        for n in (10.0, 100.0)
        for draws in (100, 1000, 3200)
    ]
    slopes = {name: {"theory": -1.0, "measured": -0.9} for name in ("n_beta", "draws")}
    record = {"run_id": "limit0000000", "description": "regression", "config": config, "sampled": sampled}
    exact = [{"n_beta": n, "distance": 1 / n} for n in (10.0, 100.0)]
    (folder / "limit.json").write_text(json.dumps({**record, "exact": exact, "slopes": slopes}))


def write_everything(folder: Path) -> None:
    few: dict[str, Any] = {"methods": ("bif", "bif@n_beta=200"), "seeds": (1, 2), "alphas": (0.1,)}
    averaged: dict[str, Any] = {"methods": ("bif", "bif@models=2", "bif@models=4"), "seeds": (1,), "alphas": (0.1,)}
    write_run(folder / "averaged", run_id="averaged0000", task="digits", shares=(1.0,), **averaged)
    write_run(folder / "cifar10", shares=(0.1, 1.0), **few)
    place = write_run(folder / "p", run_id="pythia000001", task="pythia14m", shares=(1.0,), seeds=(1,), alphas=(0.5,))
    change_record(place, {"ceiling": None, "reliability": None, "num_replicates": 1})
    learnt = ("datamodel@retrains=500", "datamodel@prior=ekfac,retrains=500", "datamodel@prior=ekfac,retrains=1000")
    asked: dict[str, Any] = {"methods": ("ekfac", *learnt), "shares": (1.0,), "seeds": (1,), "alphas": (0.1, 0.3, 0.5)}
    write_run(folder / "learnt", run_id="learnt000001", task="digits", linear_ceiling=True, **asked)
    write_sweep(folder / "sweep")
    write_one_setting(folder / "one")
    write_budget(folder / "budget")
    write_scaling(folder / "scaling")
    write_examples(folder / "examples")
    write_long_tokens(folder / "long")
    write_agreement(folder / "agreement")
    write_removal(folder / "removal")
    write_limit(folder / "limit")


def test_a_budget_is_drawn_with_points_that_failed_and_settings_of_either_kind(tmp_path: Path) -> None:
    write_budget(tmp_path / "budget")
    path = tmp_path / "budget" / "budget.json"
    record = json.loads(path.read_text())
    failed = {"value": 128, "seconds": None, "lds": None, "ci_low": None, "ci_high": None, "reason": "no memory"}
    record["curves"] += [
        {"method": "trak", "label": "broken", "axis": "checkpoints", "normalised": False, "points": [failed]},
        *(
            {
                "method": "trak", "label": "tuned", "axis": "checkpoints", "normalised": kind,
                "options": {"ridge": 1 + kind},
                "points": [failed | {"seconds": 1.0, "lds": 0.2, "ci_low": 0.1, "ci_high": 0.3}],
            }
            for kind in (False, True)
        ),
    ]  # fmt: skip
    path.write_text(json.dumps(record))
    (drawing,) = draw("budget", tmp_path)
    assert "tuned (raw): ridge=1; tuned (train-normalised): ridge=2." in drawing.caption


def test_every_kind_is_drawn_and_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    write_everything(tmp_path / "results")
    again = [kind.name for kind in KINDS][::3]  # every third one, in other processes: drawing is most of this test
    for out, more in (("a", ["--processes", "1"]), ("b", ["--processes", "2", "--only", *again])):
        arguments = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / out), "--formats", "svg"]
        assert main([*arguments, *more]) == 0
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    second.pop("figures.json")
    assert len(second) > 10
    assert second.items() <= first.items()
    index = json.loads((tmp_path / "a" / "figures.json").read_text())
    assert {entry["kind"] for entry in index.values()} == {kind.name for kind in KINDS}
    assert {file for entry in index.values() for file in entry["files"]} == set(first) - {"figures.json"}
    for stem, entry in index.items():
        words = stem.split("-")
        assert all(one != other for one, other in pairwise(words)), stem  # no doubled words
        assert stem.startswith(entry["kind"].removesuffix("-normalised"))
        assert entry["title"]
    table = reproduce_table(index)
    assert (
        "| `fig:retraining` | LDS of four methods on CIFAR-10 | [lds-cifar10-paper](figures/lds-cifar10-paper.svg) |"
        in table
    )
    assert "not on the paper's task yet; nearest: [tokens-" in table
    assert table.count("\n") == 2 + len(PAPER) + sum(not kind.paper for kind in KINDS)


def test_removal_curves_have_their_controls_and_settings(tmp_path: Path) -> None:
    write_removal(tmp_path / "removal")
    (drawing,) = draw("removal", tmp_path)
    assert drawing.figure is not None
    (axis,) = drawing.figure.axes
    curves = {one.get_label(): [round(y, 3) for y in one.lines[0].get_ydata()] for one in axis.containers}
    assert curves == {"BIF": [0.0, 0.4, 0.8], "EK-FAC": [0.0, 0.3, 0.6], "random removal": [0.0, 0.0, 0.0]}
    assert "EK-FAC: damping=0.1" in drawing.caption
    assert "one retrain a set" in drawing.caption
    assert "random removal at 20 %: 30 of 50" in drawing.caption


@pytest.mark.parametrize(
    ("value", "long", "short"),
    [
        (1.0, "1.00", "1"),
        (0.64, "0.64", ".64"),
        (-0.001, "0.00", ".00"),
        (-0.31, "-0.31", "-.31"),
        (-1.0, "-1.00", "-1"),
    ],
)
def test_cells_of_a_matrix(value: float, long: str, short: str) -> None:
    assert cell_text(value, "0") == long
    assert cell_text(value, "") == short


def test_every_figure_of_the_paper_has_ours_or_a_reason() -> None:
    labels = [item.label for item in PAPER]
    assert len(set(labels)) == len(labels)
    drawn = {label for kind in KINDS for label in kind.paper}
    assert drawn < set(labels)
    for item in PAPER:
        assert bool(item.ours) == (item.label in drawn), item.label
        assert item.ours or item.why, item.label
    assert "| `fig:intro` | the idea of the BIF, drawn | none: an illustration without data |" in reproduce_table()
    assert "not yet: needs scaling.csv" in reproduce_table()


def test_a_record_is_linked_where_it_is_known() -> None:
    index = {"lds-cifar10-paper": {"kind": "lds", "files": ["lds-cifar10-paper.png"], "runs": ["aaaa", "bbbb"]}}
    table = reproduce_table(index, "figures", {"aaaa": "cifar10/aaaa/run.json"})
    assert "(figures/lds-cifar10-paper.png) | [`aaaa`](cifar10/aaaa/run.json), `bbbb` |" in table


def test_a_notebook_gets_a_figure_of_a_folder_or_of_a_result(results: Path) -> None:
    class Saved:
        def save(self, folder: str) -> None:
            write_run(Path(folder), shares=(0.1,), seeds=(1,))

    for source in (results, str(results), Saved()):
        assert draw_figures(source).axes
    with pytest.raises(ValueError, match="allows no figure of the kind scaling, which needs"):
        draw_figures(results, "scaling")
    with pytest.raises(ValueError, match='unknown figure "none"; available: lds'):
        draw_figures(results, "none")


def test_every_format_has_the_same_bytes_twice(results: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert (
            main(["--results", str(results), "--out", str(tmp_path / out), "--only", "lds", "--formats", *FORMATS]) == 0
        )
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b")
    assert {f"lds-cifar10-paper.{ending}" for ending in FORMATS} <= set(first)


def test_drawing_into_the_results_does_not_change_them_and_takes_away_what_is_old(results: Path) -> None:
    only = ["--results", str(results), "--only", "lds", "--formats", "svg"]
    assert main(only) == 0
    before = digests(results / "figures")
    assert main(only) == 0
    assert digests(results / "figures") == before
    write_run(results / "more", run_id="more00000000", task="digits", shares=(1.0,), seeds=(1,), alphas=(0.1,))
    assert main(only) == 0
    assert (results / "figures" / "lds-digits-paper.svg").exists()
    for record in results.rglob("run.json"):
        record.unlink()
    (results / "figures" / "mine.svg").write_text("not ours")
    assert main(["--results", str(results), "--formats", "svg"]) == 0
    assert not (results / "figures" / "lds-digits-paper.svg").exists()
    assert (results / "figures" / "mine.svg").exists()


def test_every_image_says_what_it_shows(results: Path) -> None:
    main(["--results", str(results), "--only", "lds", "lds-normalised", "pareto", "--formats", "svg"])
    index = json.loads((results / "figures" / "figures.json").read_text())
    entry = index["lds-cifar10-paper"]
    assert entry["runs"] == ["aaaabbbbcccc"]
    assert entry["facts"]["scores"] == ["raw"]
    for fact in ("2 seeds (1, 2)", "100 subsets", "8,000 queries", "0 undefined", "end of the 2 seeds' 95 % intervals"):
        assert fact in entry["caption"]
    for stem, kind in (
        ("lds-cifar10-paper", "raw scores"),
        ("lds-cifar10-paper-normalised", "train-normalised scores"),
    ):
        svg = (results / "figures" / f"{stem}.svg").read_text()
        names = ["EK-FAC", "BIF", "TRAK", "GradSim", "random", "noise ceiling", "chance"]
        facts = ["2 seeds' 95 %", "100 subsets", "cifar10", "protocol paper", "report queries", kind]
        for label in names + facts:
            assert label in svg
    svg = (results / "figures" / "pareto-cifar10-paper-nvidia-h200.svg").read_text()
    for label in (
        "filled: raw scores",
        "hollow: train-normalised",
        "beaten by no other method on both axes",
        "NVIDIA H200",
    ):
        assert label in svg


def test_settings_stand_on_the_image_and_differing_ones_in_the_legend(tmp_path: Path) -> None:
    for number, draws in enumerate((100, 250)):
        options = {"bif": {"draws": draws, "gamma": 1e5}}
        write_run(tmp_path, run_id=f"run{number}", methods=("bif",), options=options, shares=(0.1,), seeds=(1,))
    (drawing,) = draw("lds", tmp_path)
    assert drawing.figure is not None
    names = [text.get_text() for text in drawing.figure.legends[0].texts]
    assert names == ["BIF, draws=100", "BIF, draws=250", "chance", "noise ceiling"]
    words = " ".join(text.get_text() for text in drawing.figure.texts)
    assert "BIF (all): gamma=100000" in words
    (axis,) = drawing.figure.axes
    looks = {(line.get_color(), line.get_marker()) for line in axis.lines if str(line.get_marker()) in "os"}
    assert len({colour for colour, _ in looks}) == 2


def test_a_borrowed_ceiling_is_said_and_a_missing_one_too(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"task": "pythia14m", "shares": (1.0,), "alphas": (0.5,)}
    place = write_run(tmp_path, run_id="without00000", seeds=(1, 2), **kept)
    change_record(place, {"ceiling": None, "reliability": None, "num_replicates": 1})
    (drawing,) = draw("lds", tmp_path)
    assert "Ceiling unknown: no replicates." in drawing.caption
    assert "Dashed" not in drawing.caption
    replicated = write_run(tmp_path, run_id="replicated00", seeds=(1,), methods=("random",), **kept)
    measured = {"ceiling": 0.6**0.5, "reliability": 0.6, "num_replicates": 2, "num_subsets_replicated": 25}
    change_record(replicated, measured)
    (drawing,) = draw("lds", tmp_path)
    assert drawing.runs == ["replicated00", "without00000"]
    assert "Ceiling from replicates in run replicated00 (25 subsets)" in drawing.caption
    assert len(drawing.figure.axes) == 2  # type: ignore[union-attr]  # two truths, two panels
    (table,) = draw("llm", tmp_path)
    assert table.table is not None
    assert table.table["ceiling's run"].str.contains("replicated00").all()


def test_a_ceiling_whose_interval_touches_zero_says_so(results: Path) -> None:
    change_record(results / "cifar10" / "aaaabbbbcccc", {"ceiling": 0.2, "reliability": 0.04, "ci_low": 0.0})
    (drawing,) = draw("lds", results)
    assert "The ceiling's interval touches 0 at alpha 0.1, 0.5 of 0.1" in drawing.caption


def test_a_figure_by_seed_says_where_a_seeds_own_ceiling_touches_zero(results: Path) -> None:
    path = results / "cifar10" / "aaaabbbbcccc" / "run.json"
    record = json.loads(path.read_text())
    record["ceilings"][0]["ci_low"] = 0.0  # of many seeds one, which the mean bears
    path.write_text(json.dumps(record))
    assert "touches 0" not in draw("lds", results)[0].caption
    assert "A seed's ceiling's interval touches 0 at alpha" in draw("seeds", results)[0].caption


@pytest.mark.parametrize(
    "size", [USUAL, pytest.param(PaperSize(5.5, 9), marks=pytest.mark.slow)], ids=("usual", "narrow and large")
)
def test_words_neither_overlap_nor_leave_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: PaperSize
) -> None:
    write_everything(tmp_path)
    written: list[Text] = []
    plain_draw = Text.draw

    def keep(self: Text, renderer: Any, *rest: Any, **options: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            written.append(self)
        plain_draw(self, renderer, *rest, **options)

    monkeypatch.setattr(Text, "draw", keep)
    for drawing in all_drawings(tmp_path, size):
        if drawing.figure is None:
            continue
        with matplotlib.rc_context(size.settings()):
            written.clear()
            FigureCanvasAgg(drawing.figure).draw()
            whole = drawing.figure.bbox.padded(1)
            boxes = [(text.get_text(), text.get_window_extent()) for text in dict.fromkeys(written)]
            for position, (text, box) in enumerate(boxes):
                assert whole.contains(box.x0, box.y0), (drawing.stem, text)
                assert whole.contains(box.x1, box.y1), (drawing.stem, text)
                for other, beside in boxes[position + 1 :]:
                    assert not box.padded(-0.3).overlaps(beside.padded(-0.3)), (drawing.stem, text, other)


def all_drawings(folder: Path, size: PaperSize) -> Iterator[Drawing]:
    results = load_results(folder)
    for kind in KINDS:
        if kind.name not in ("lds-normalised", "seeds"):  # drawn by the same code
            yield from draw(kind.name, results, size)


def test_width_and_letters_are_as_asked(results: Path, tmp_path: Path) -> None:
    from PIL import Image

    sizes = []
    for number, more in enumerate(([], ["--width", "5.5", "--font-size", "10"])):
        out = tmp_path / str(number)
        only = ["--only", "lds", "--formats", "png", "svg", *more]
        assert main(["--results", str(results), "--out", str(out), *only]) == 0
        sizes.append(Image.open(out / "lds-cifar10-paper.png").size[0])
    assert sizes == [1380, 1100]
    assert "10px" in (tmp_path / "1" / "lds-cifar10-paper.svg").read_text()


def test_methods_can_be_chosen(results: Path, tmp_path: Path) -> None:
    only = ["--only", "lds", "table", "--methods", "bif", "ekfac", "--formats", "svg", "--out", str(tmp_path / "out")]
    assert main(["--results", str(results), *only]) == 0
    svg = (tmp_path / "out" / "lds-cifar10-paper.svg").read_text()
    assert "EK-FAC" in svg
    assert "GradSim" not in svg
    assert set(pd.read_csv(tmp_path / "out" / "table-cifar10-paper.csv")["method"]) == {"BIF", "EK-FAC"}


# ---- tables ----


def test_bold_is_what_no_paired_interval_takes_back(results: Path) -> None:
    loaded = load_results(results)
    cell = loaded.rows.query("alpha == 0.1 and alpha_attribution == 0.1 and not normalised")
    assert clearly_best(cell, pairs_by_cell(loaded.pairs, "cifar10-paper")) == "EK-FAC"
    tied = loaded.pairs.copy()
    near = (tied["series"] == "BIF") & (tied["against"] == "EK-FAC")
    tied.loc[near, ["ci_low", "ci_high"]] = [-0.1, 0.01]  # BIF minus EK-FAC: 0 is inside
    assert clearly_best(cell, pairs_by_cell(tied, "cifar10-paper")) is None
    assert clearly_best(cell, pairs_by_cell(loaded.pairs[~near], "cifar10-paper")) is None  # nobody compared them
    (drawing,) = draw("table", results)
    assert r"\mathbf{" in drawing.latex
    assert drawing.latex.count(r"\begin{tabular}") == 2
    assert drawing.table is not None
    assert set(drawing.table[drawing.table["best"] == "yes"]["method"]) == {"EK-FAC"}


def test_latex_is_escaped() -> None:
    assert escaped(r"a_b & 5% \input{x} ~^#$") == (
        r"a\_b \& 5\% \textbackslash{}input\{x\} \textasciitilde{}\textasciicircum{}\#\$"
    )


# ---- what may not be mixed ----


def test_seconds_of_two_machines_never_share_an_axis(results: Path) -> None:
    for number, device in enumerate(("CPU aarch64", "NVIDIA A100")):
        write_run(
            results / "other", run_id=f"other000000{number}", shares=(0.1, 1.0), seeds=(7 + number,), device=device,
            alphas=(0.1,),
        )  # fmt: skip
    write_scaling(results / "scaling", devices=("NVIDIA H200", "NVIDIA A100"))
    for kind, count in (("seconds", 3), ("pareto", 3), ("scaling", 2)):
        drawings = draw(kind, results)
        assert len(drawings) == count
        for drawing in drawings:
            assert len([name for name in ("H200", "A100", "CPU aarch64") if name in drawing.caption]) == 1


def test_seconds_are_of_runs_that_attribute_several_shares(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="one000000000", shares=(0.1,), seeds=(1,), alphas=(0.1,))
    assert not draw("seconds", tmp_path)
    write_run(tmp_path, run_id="several00000", shares=(0.01, 1.0), seeds=(1,), alphas=(0.1,))
    (drawing,) = draw("seconds", tmp_path)
    assert drawing.runs == ["several00000"]
    assert "The fastest of a method's runs" in drawing.caption


def test_ensembles_are_curves_of_one_figure_and_no_crowd_elsewhere(tmp_path: Path) -> None:
    numbers = (2, 4, 8)
    names = [
        name for method in ("bif", "ekfac", "gradsim") for name in (method, *(f"{method}@models={k}" for k in numbers))
    ]
    write_run(tmp_path, run_id="averaged0000", methods=tuple(names), shares=(0.1,), seeds=(1,), alphas=(0.1,))
    (drawing,) = draw("ensembles", tmp_path)
    assert drawing.runs == ["averaged0000"]
    of_models, of_seconds = drawing.figure.axes
    curves = [line for line in of_models.get_lines() if len(line.get_xdata()) == 4]
    assert [list(line.get_xdata()) for line in curves] == 3 * [[1, 2, 4, 8]]
    assert of_seconds.get_xlabel().startswith("seconds")
    assert not len(without_ensembles(load_results(tmp_path)).rows)
    few = tmp_path / "few"
    write_run(few, run_id="few000000000", methods=("bif", "bif@models=2"), shares=(0.1,), seeds=(1,), alphas=(0.1,))
    assert len(without_ensembles(load_results(few)).rows)


def test_scores_of_one_kind_alone_are_the_better_ones() -> None:
    """By what both kinds have: raw scores at an easier alpha are no reason for raw ones."""
    rows = pd.DataFrame(
        [
            ("one", "both", False, 0.1, 0.3), ("one", "both", True, 0.1, 0.4), ("one", "both", True, 0.7, 0.1),
            ("tuned", "for raw", False, 0.1, 0.2),
            ("tuned", "for normalised", False, 0.1, 0.3), ("tuned", "for normalised", True, 0.1, 0.5),
            ("two settings", "first", False, 0.1, 0.1), ("two settings", "first", True, 0.1, 0.1),
            ("two settings", "second", False, 0.1, 0.2), ("two settings", "second", True, 0.1, 0.1),
        ],
        columns=["label", "series", "normalised", "alpha", "lds"],
    ).assign(truth="t", seed=1)  # fmt: skip
    found = best_scores(rows)
    assert list(zip(found["series"], found["normalised"], found["alpha"])) == [
        ("both", True, 0.1), ("both", True, 0.7), ("for normalised", True, 0.1),
        ("first", False, 0.1), ("second", False, 0.1),
    ]  # fmt: skip


def test_no_panel_is_empty() -> None:
    """Shares with other alphas are a figure of their own; the one with most keeps the plain name."""
    asked = {0.01: (0.1,), 0.1: (0.1, 0.5), 0.2: (0.1, 0.5), 1.0: (0.1,)}
    rows = pd.DataFrame(
        [{"alpha_attribution": share, "truth": "t", "alpha": alpha} for share in asked for alpha in asked[share]]
    )
    found = {suffix: sorted(set(some["alpha_attribution"])) for suffix, some in full_grids(rows, "alpha")}
    assert found == {"": [0.1, 0.2], "-alpha-attribution-0-01-1": [0.01, 1.0]}


def test_a_run_of_many_datamodels_is_one_figure_and_no_panel_elsewhere(tmp_path: Path) -> None:
    """Made by other code of the task, it is a truth of its own: its methods would stand in a second row of panels."""
    kept: dict[str, Any] = {"shares": (0.1,), "seeds": (1,), "alphas": (0.1,)}
    write_run(tmp_path, run_id="usual0000000", methods=("bif", "ekfac"), task_settings={"source": "old"}, **kept)
    many = tuple(f"datamodel@retrains={count}" for count in range(100, 800, 100))
    known = {label: {"retrains": 100 * (1 + k)} for k, label in enumerate(many)}
    methods = ("bif", *many)
    write_run(tmp_path, run_id="retrained000", methods=methods, options=known, task_settings={"source": "new"}, **kept)
    (drawing,) = draw("retraining", tmp_path)
    assert drawing.runs == ["retrained000"]
    assert set(without_curves(load_results(tmp_path)).rows["run_id"]) == {"usual0000000"}
    alone = tmp_path / "alone"
    write_run(alone, run_id="retrained000", methods=methods, options=known, **kept)
    assert set(without_curves(load_results(alone)).rows["method"]) == {"bif"}
    same = tmp_path / "same"
    write_run(same, run_id="usual0000000", methods=("bif", "ekfac"), **kept)
    write_run(same, run_id="retrained000", methods=("same_class", *methods), options=known, **kept)
    rows = without_curves(load_results(same)).rows
    assert set(zip(rows["run_id"], rows["method"])) == {
        ("usual0000000", "bif"), ("usual0000000", "ekfac"), ("retrained000", "same_class"),
    }, "of the same truth, what nobody else measured"  # fmt: skip


def test_a_stored_truth_scored_again_is_shown_where_nothing_else_is(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="given0000000", methods=("bif", "mine"), device=ELSEWHERE)
    assert set(without_scored_again(load_results(tmp_path)).rows["run_id"]) == {"given0000000"}
    write_run(tmp_path, run_id="usual0000000", methods=("bif",), task_settings={"source": "new"})
    assert set(without_scored_again(load_results(tmp_path)).rows["run_id"]) == {"usual0000000"}


def test_other_task_settings_have_a_figure_of_their_own(results: Path) -> None:
    write_run(results / "cifar10", run_id="more00000000", shares=(0.1,), seeds=(1,), task_settings={"epochs": 2})
    stems = {drawing.stem: drawing for drawing in draw("lds", results)}
    assert set(stems) == {"lds-cifar10-paper", "lds-cifar10-paper-epochs-2"}
    assert "epochs=2" in stems["lds-cifar10-paper-epochs-2"].caption
    assert stems["lds-cifar10-paper-epochs-2"].runs == ["more00000000"]


def test_two_settings_are_drawn_with_their_difference(tmp_path: Path) -> None:
    write_run(tmp_path, methods=("bif", "bif@n_beta=200", "ekfac"), shares=(0.1,), seeds=(1,))
    (drawing,) = draw("difference", tmp_path)
    assert drawing.stem == "difference-cifar10-paper-bif"
    assert drawing.figure is not None
    raw, normalised, below, below_normalised = drawing.figure.axes
    assert raw.get_title().startswith("raw scores\n")
    assert normalised.get_title().startswith("train-normalised scores\n")
    assert "LDS minus that of BIF, paired" in drawing.caption  # the method's own defaults
    pairs = load_results(tmp_path).pairs.query("series == 'BIF' and against == 'BIF, n_beta=200' and not normalised")
    for axis in (below, below_normalised):
        (line,) = [found for found in axis.containers if isinstance(found, ErrorbarContainer)]
        assert line.has_yerr
        np.testing.assert_allclose(line.lines[0].get_ydata(), -pairs.sort_values("alpha")["difference"])
    assert len(raw.containers) == len(normalised.containers) == 2


def test_settings_are_held_against_published_ones_and_many_panels_make_two_figures(tmp_path: Path) -> None:
    many = ("bif", "bif@n_beta=200", "bif@n_beta=900")
    place = write_run(tmp_path, methods=many, shares=(0.01, 0.1, 1.0), seeds=(1,))
    path = place / "run.json"
    path.write_text(path.read_text().replace("bif@n_beta=900", "bif-paper"))
    raw, normalised = draw("difference", tmp_path)
    assert (raw.stem, normalised.stem) == ("difference-cifar10-paper-bif", "difference-cifar10-paper-bif-normalised")
    assert "LDS minus that of bif-paper, paired" in raw.caption
    assert raw.figure is not None
    assert len(raw.figure.axes) == 6
    assert len(raw.figure.axes[-1].containers) == 2  # of three settings two differences, not three


def test_points_stay_in_the_band_of_their_share(tmp_path: Path) -> None:
    write_run(tmp_path, shares=(0.1,), seeds=(1,))
    (drawing,) = draw("lds", tmp_path)
    assert drawing.figure is not None
    for line in drawing.figure.axes[0].containers:
        if isinstance(line, ErrorbarContainer):
            away = np.abs(line.lines[0].get_xdata() - np.array([0.1, 0.3, 0.5, 0.7]))  # type: ignore[arg-type, operator]
            assert away.max() < 0.15 * 0.2


def test_two_shares_are_two_panels_with_the_methods_below_each_other(results: Path) -> None:
    (drawing,) = draw("lds", results)
    assert drawing.figure is not None
    assert len(drawing.figure.axes) == 4  # two shares attributed, two retrained on
    names = [text.get_text() for text in drawing.figure.axes[0].get_yticklabels()]
    assert names == ["BIF", "EK-FAC", "TRAK", "GradSim", "random"]
    legend = [text.get_text() for text in drawing.figure.legends[0].texts]
    assert legend == ["chance", "noise ceiling"]


def test_a_series_of_fewer_seeds_says_so_wherever_it_is_named(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"shares": (0.1,)}
    write_run(tmp_path, run_id="many00000000", methods=("ekfac", "random"), seeds=(1, 2), **asked)
    write_run(tmp_path, run_id="few000000000", methods=("bif",), seeds=(1,), **asked)
    for kind in ("lds", "pareto"):
        (drawing,) = draw(kind, tmp_path)
        assert drawing.figure is not None
        names = [text.get_text() for text in drawing.figure.legends[0].texts]
        assert names[:3] == ["BIF (1 seed)", "EK-FAC", "random"]


def test_pareto_front() -> None:
    points = [(1.0, 0.1), (2.0, 0.3), (3.0, 0.2), (4.0, 0.4), (1.0, 0.05), (5.0, float("nan"))]
    assert pareto_front(points) == [(1.0, 0.1), (2.0, 0.3), (4.0, 0.4)]


# ---- scaling and sweeps ----


def test_the_committed_scaling_table_can_be_drawn() -> None:
    """Its columns of words are known as such, those that only a GPU's sweep fills too."""
    assert len(read_scaling(Path(__file__).resolve().parents[2] / "results" / "scaling" / "scaling.csv"))


def test_the_legend_of_projected_points_is_hollow(tmp_path: Path) -> None:
    write_scaling(tmp_path / "scaling")
    table = pd.read_csv(tmp_path / "scaling" / "scaling.csv")
    for projected, colour, said in ((True, "white", "Hollow: projected"), (False, "#0072b2", "Filled: measured")):
        table.assign(projected=projected).to_csv(tmp_path / "scaling" / "scaling.csv", index=False)
        (drawing,) = draw("scaling", tmp_path)
        assert drawing.figure is not None
        key = drawing.figure.legends[0].legend_handles[0]
        assert key is not None
        assert key.get_markerfacecolor() == colour  # type: ignore[attr-defined]
        assert said in drawing.caption
        assert ("Hollow" in drawing.caption) == projected


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
    drawing, counted = draw("sweep", tmp_path)
    assert drawing.figure is not None
    (axis,) = drawing.figure.axes
    assert axis.get_ylim()[0] <= 0
    raw, normalised = (found for found in axis.containers if isinstance(found, ErrorbarContainer))
    assert raw.has_yerr
    assert not normalised.has_yerr
    for fact in ("1 seed, 100 subsets, 2 replicates.", "seed 1", "for raw scores only"):
        assert fact in drawing.caption
    assert "2 replicates, 1,000 queries." in counted.caption


def test_a_grid_has_a_colour_bar_and_says_what_diverged(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    first, _ = draw("sweep", tmp_path)
    assert first.stem == "sweep-cifar10-paper-bif-burn-in-n-beta-gamma-alpha-0-1-burn-in-0"
    assert first.figure is not None
    assert first.figure.axes[-1].get_ylabel() == "LDS"
    assert sum(text.get_text() == "diverged" for axis in first.figure.axes for text in axis.texts) == 1


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
    assert main(arguments) == 0
    assert "damping" in (out / "sweep-digits-scratch-ekfac-damping-alpha-0-1.svg").read_text()
    words = (out / "sweep-digits-scratch-ekfac-gradient-control-variate-alpha-0-1.svg").read_text()
    assert "difference" in words
    assert "control_variate True" in words
    assert "1 values diverged" in (out / "figures.json").read_text()


# ---- the command ----


def test_without_results_it_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    assert main(["--results", str(folder)]) == 0
    said = capsys.readouterr().out
    for kind in KINDS:
        assert f"{kind.name}: missing, needs {kind.needs}" in said
        assert kind.command_for(str(folder)) in said
        assert "--out results/" not in kind.command_for(str(folder))
    assert [path.name for path in (folder / "figures").iterdir()] == ["figures.json"]


def test_damaged_files_are_named_and_the_rest_is_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("broken", '{"run_id": '), ("strange", '{"run_id": "x"}')):
        (results / name).mkdir()
        (results / name / "run.json").write_text(text)
    (results / "scaling").mkdir()
    pd.DataFrame([{"model": "14m"}]).to_csv(results / "scaling" / "scaling.csv", index=False)
    (results / "sweep").mkdir()
    (results / "sweep" / "sweep.json").write_text('{"axes": {}}')
    only = ["--only", "lds", "scaling", "sweep", "--formats", "svg"]
    assert main(["--results", str(results), *only]) == 1
    said = capsys.readouterr()
    assert "lds-cifar10-paper.svg" in said.out
    for name in (
        "broken/run.json",
        "strange/run.json",
        "scaling.csv: lacks the columns",
        "sweep.json: its content has no",
    ):
        assert name in said.err


def test_bad_arguments_are_one_line(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in (
        (["--only", "nothing"], 'unknown figure "nothing"; available: lds'),
        (["--results", "/nowhere"], "is no folder"),
        (["--methods", "nothing"], '--methods names "nothing", which no run has; there are: bif'),
        (["--width", "900"], '"900" is out of range; expected 2.5 to 40 inches'),
        (["--font-size", "big"], '"big" is out of range'),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["--results", str(results), *arguments])
        said = capsys.readouterr().err
        assert stop.value.code == 2
        assert text in said
        assert said.count("\n") == 1


def test_drawing_stops_when_it_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group: the workers leave it to the driver, which ends them and says one line."""
    write_run(tmp_path / "runs")
    slow = """
import os, signal, sys, time
import bench.figures.command as command
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background would ignore
def draw_kind(*call):
    os.write(1, b"drawing\\n")  # at once: printed, two lines can mix
    time.sleep(60)
command.draw_kind = draw_kind
sys.exit(command.main(["--results", "runs", "--processes", "2"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["drawing\n"] * 2  # both are there: none is being forked
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("python -m bench.figures: interrupted")
    assert "Traceback" not in errors
