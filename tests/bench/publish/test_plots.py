"""Figures come from records alone: the same bytes each time, machines and settings kept apart, and what is missing is
named. tests/golden/plots.json holds digests of what is drawn from the committed results."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench.inspect.tokens import matrix_shown
from bench.publish.__main__ import main as publish
from bench.publish.plots import KINDS, draw_figures, frame, kind_called, style, without_crowds
from bench.publish.plots.examples import pair_drawing
from bench.publish.plots.frame import MOST_NAMES, MOST_PANELS, Drawing, panels, seconds_axis
from bench.publish.plots.lds import names_of_panels, one_of_each, pareto_front, points, seen, without_studies
from bench.publish.plots.scaling import can_draw, draw_cheaper, measured_fits
from bench.records import ELSEWHERE, Results, load_results, without_curves, without_scored_again
from bench.scaling.estimate import PAPER_FITTED
from bench.scaling.rows import read_rows
from bench.scaling.suite import SUITE
from tests.bench.test_records import change_record, edited
from tests.helpers.scaling_laws import LAW, bif_law, ekfac_law, rows_by_law
from tests.helpers.synthetic_results import write_budget, write_examples, write_question, write_run, write_scaling

SIZES = ("14m", "70m", "160m", "410m", "1.4b", "2.8b")
ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "plots.json"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def draw(name: str, folder: Path | Results) -> list[Drawing]:
    with matplotlib.rc_context(style.settings()):
        return list(kind_called(name).draw(load_results(folder) if isinstance(folder, Path) else folder))


def main(words: Sequence[str]) -> int:
    return publish(["figures", *words])


def error_bars(axis: Any) -> list[Any]:
    return [found for found in axis.containers if isinstance(found, ErrorbarContainer)]


def labelled(drawing: Drawing, label: str) -> list[Any]:
    """Lines of the first panel."""
    return [line for line in drawing.figure.axes[0].lines if line.get_label() == label]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    write_run(folder / "cifar10", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    return folder


def drawn_data(figure: Figure) -> str:
    """Every point with the ends of its bar, every plain line and every picture, to six digits, panel by panel."""
    lines = []
    for number, axis in enumerate(figure.axes):
        barred = set()
        for container in error_bars(axis):
            line, caps, bars = container.lines
            barred |= {line, *caps}
            ends = [np.asarray(segment).ravel() for one in bars for segment in one.get_segments()]
            values = [line.get_xdata(), line.get_ydata(), *ends]
            lines.append(f"{number} {line.get_label()} {_digits(values)}")
        for line in set(axis.lines) - barred:
            lines.append(f"{number} line {_digits([line.get_xdata(), line.get_ydata()])}")
        for image in (*axis.images, *axis.collections):
            if (pixels := image.get_array()) is not None:
                lines.append(f"{number} image {_digits([np.ma.filled(pixels.astype(float), np.nan)])}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]


def _digits(values: list[Any]) -> str:
    return " ".join(f"{value:.6g}" for some in values for value in np.asarray(some, dtype=float).ravel().tolist())


@pytest.mark.slow
def test_what_the_committed_results_show_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest that changes on purpose is changed in plots.json in the same commit, with a reason."""
    monkeypatch.setattr(frame, "fix_layout", lambda _: None)
    monkeypatch.setattr(frame, "place_labels", lambda _: None)
    results = load_results(ROOT / "results")
    found = {}
    for kind in KINDS:
        for drawing in draw(kind.name, without_crowds(results, kind)):
            found[drawing.stem] = drawn_data(drawing.figure)
            assert sum(len(legend.texts) for legend in drawing.figure.legends) <= MOST_NAMES, drawing.stem
            panels = [axis for axis in drawing.figure.axes if axis.get_label() != "<colorbar>"]
            assert len(panels) <= MOST_PANELS, drawing.stem
    assert found == json.loads(GOLDEN.read_text())


def test_every_committed_picture_is_in_the_index_and_on_a_page() -> None:
    folder = ROOT / "results" / "figures"
    index = json.loads((folder / "figures.json").read_text())
    files = {file for entry in index.values() for file in entry["files"]}
    assert files == {path.name for path in folder.iterdir()} - {"figures.json"}
    assert len(files) <= 45
    pages = "".join(path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "results").rglob("*.md")))
    assert all(f"figures/{file}" in pages for file in files)


def test_a_series_looks_alike_everywhere_and_an_axis_of_time_is_in_units_of_time() -> None:
    assert len({(colour, marker) for _, colour, marker in style.METHODS.values()}) == len(style.METHODS)
    assert len({label for label, _, _ in style.METHODS.values()}) == len(style.METHODS)
    alone = style.looks([("bif", "bif-paper")])["bif-paper"]
    assert style.looks([("bif", "BIF"), ("bif", "bif-long"), ("bif", "bif-paper")])["bif-paper"] == alone
    assert style.looks([("bif", "BIF, n_beta=200"), ("bif", "BIF")])["BIF"] == style.look("bif")
    many = style.looks([("bif", f"BIF, draws={count}") for count in range(40)])
    assert len({(one["color"], one["marker"]) for one in many.values()}) == 40
    assert style.look("package.module:MyMethod")["label"] == "MyMethod"
    for low, high, expected in ((0.02, 50, "0.1 s"), (2, 4e8, "1 min"), (1.1, 1.3, "1 s")):
        figure = style.new_figure(3, 2)
        axis = figure.subplots()
        axis.plot([low, high], [0, 1])
        seconds_axis(axis, "x")
        figure.draw_without_rendering()
        ticks = [text.get_text() for text in axis.get_xticklabels()]
        assert expected in ticks
        assert not any("M" in text for text in ticks)


def write_long_tokens(folder: Path) -> dict[str, Any]:
    """A pair of more tokens than a figure has room for."""
    matrix = np.random.default_rng(1).normal(size=(60, 70)).round(3)
    kept, part = matrix_shown(matrix, None)
    words = {"query_tokens": [f" w{k}" for k in range(60)], "train_tokens": ["x$y"] * 70}
    pair = {"query": 1, "train": 2, **words, "bif": kept.tolist(), "ekfac": matrix[0].tolist(), **part}
    content = {
        "kind": "tokens", "task": "long", "description": "long", "scores": "normalised BIF", "pairs": [pair], "seed": 1,
        "protocol": "scratch", "methods": ["bif"], "settings": {}, "rule": "", "num_draws": 100,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "examples.json").write_text(json.dumps(content))
    return content


def test_of_a_long_pair_what_was_kept_is_drawn_under_its_own_tokens(tmp_path: Path) -> None:
    content = write_long_tokens(tmp_path / "long")
    (pair,), whole = content["pairs"], np.random.default_rng(1).normal(size=(60, 70)).round(3)
    drawing = pair_drawing(content, pair)
    assert "24 x 24 tokens around the strongest pair" in drawing.caption
    rows, columns = (slice(*pair["part"][side]) for side in ("query", "train"))
    image = np.array(drawing.figure.axes[0].get_images()[0].get_array())
    assert (image == whole[rows, columns]).all()
    assert drawing.figure.axes[0].get_yticklabels()[0].get_text() == f" w{rows.start}"


def write_gaussian(folder: Path, alphas: tuple[float, ...] = (0.5,)) -> None:
    """bif_gaussian twice and BIF of two lengths, LDS within class rising with the draws; EK-FAC's line."""
    within, options = {"kfac": 0.6}, dict[str, dict[str, Any]]()
    for own in ({"n_beta": 0.0, "rise": 0.1}, {"n_beta": 20.0, "rise": 0.1, "damping": 5.0}):
        whole = f"bif_gaussian@n_beta={own['n_beta']:g}"
        curve = {whole: 0.5, f"{whole}: 100 draws": 0.2, f"{whole}: 300 draws": 0.3}
        curve |= {f"{whole}: odd part": 0.45, f"{whole}: even part": 0.25}
        within |= curve
        options |= {label: {"draws": 1000, **own} for label in curve}
    for draws, found in ((75, 0.4), (25, 0.3)):
        within[f"bif@draws={draws}"] = found
        options[f"bif@draws={draws}"] = {"draws": draws, "chains": 4}
    write_run(
        folder, run_id="drawn0000001", task="smooth_digits", methods=tuple(within), within=within, options=options,
        shares=(1.0,), alphas=alphas, seeds=(1,),
    )  # fmt: skip


def test_a_gaussian_and_chains_are_drawn_over_their_draws(tmp_path: Path) -> None:
    write_gaussian(tmp_path)
    (drawing,) = draw("draws", tmp_path)
    (axis,) = drawing.figure.axes
    gaussian = "BIF, K-FAC's Gaussian"
    curves = {one.get_label(): one.lines[0].get_xydata().tolist() for one in error_bars(axis)}
    halved = [[100, 0.1], [300, 0.15], [1000, 0.25]]  # at alpha 0.5 the synthetic records have half of it
    assert curves.pop(f"{gaussian}, rise 0.1") == halved
    assert curves.pop(f"{gaussian}, damping 5, n_beta 20") == halved
    assert curves.pop("BIF") == [[100, 0.15], [300, 0.2]]
    assert {label: ends[0][1] for label, ends in curves.items()} == {"_odd part": 0.225, "_even part": 0.125}
    assert [line.get_ydata()[0] for line in axis.lines if line.get_label() == "EK-FAC (kfac)"] == [0.3]


def test_the_legend_says_which_panel_has_what_the_other_has_not() -> None:
    _, axes = panels(2)
    for axis, own in zip(axes, ("damping 20", "damping 100"), strict=True):
        for name in (own, "BIF", "_hidden"):
            axis.plot([0], [0], label=name)
    named = [name for _, name in names_of_panels(axes, ["subset", "full"])]
    assert named == ["damping 20 (subset)", "BIF", "damping 100 (full)"]


def test_a_panel_that_the_other_would_flatten_has_an_axis_of_its_own(tmp_path: Path) -> None:
    for other, shared in ((0.4, True), (0.9, False)):
        write_gaussian(tmp_path / f"{other:g}", alphas=(0.5, other))
        (drawing,) = draw("draws", tmp_path / f"{other:g}")
        first, second = (axis.get_ylim() for axis in drawing.figure.axes)
        assert (first == second) == shared


def write_everything(folder: Path) -> None:
    few: dict[str, Any] = {"methods": ("bif", "bif@n_beta=200"), "seeds": (1, 2), "alphas": (0.1,)}
    averaged: dict[str, Any] = {"methods": ("bif", "bif@models=2", "bif@models=4"), "alphas": (0.1,)}
    write_run(folder / "averaged", run_id="averaged0000", task="digits", shares=(1.0,), seeds=(1,), **averaged)
    write_run(folder / "cifar10", shares=(0.1, 1.0), **few)
    place = write_run(folder / "p", run_id="pythia000001", task="pythia14m", shares=(1.0,), seeds=(1,), alphas=(0.5,))
    change_record(place, {"ceiling": None, "reliability": None, "num_replicates": 1})
    learnt = ("datamodel@retrains=500", "datamodel@prior=ekfac,retrains=500", "datamodel@prior=ekfac,retrains=1000")
    asked: dict[str, Any] = {"methods": ("ekfac", *learnt), "shares": (1.0,), "seeds": (1,), "alphas": (0.1, 0.3, 0.5)}
    write_run(folder / "learnt", run_id="learnt000001", task="digits", linear_ceiling=True, **asked)
    write_gaussian(folder / "drawn")
    write_budget(folder / "budget")
    write_scaling(folder / "scaling")
    write_examples(folder / "examples")
    write_long_tokens(folder / "long")
    write_question(folder / "question", seeds=(1,))


def assert_words_are_apart(figure: Figure, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do they overlap, nor do they leave the figure."""
    written: list[Text] = []
    plain_draw = Text.draw

    def keep(self: Text, renderer: Any, *rest: Any, **options: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            written.append(self)
        plain_draw(self, renderer, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", keep)
        FigureCanvasAgg(figure).figure.draw_without_rendering()
    whole = figure.bbox.padded(1)
    boxes = [(text.get_text(), text.get_window_extent()) for text in dict.fromkeys(written)]
    for position, (text, box) in enumerate(boxes):
        assert whole.contains(box.x0, box.y0), (name, text)
        assert whole.contains(box.x1, box.y1), (name, text)
        for other, beside in boxes[position + 1 :]:
            assert not box.padded(-0.3).overlaps(beside.padded(-0.3)), (name, text, other)


def test_every_kind_is_drawn_and_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_everything(tmp_path / "results")
    save = style.save

    def save_and_look(figure: Figure, path: Path) -> Path:
        saved = save(figure, path)
        if path.parent.name == "a":
            assert_words_are_apart(figure, path.name, monkeypatch)
        return saved

    monkeypatch.setattr(style, "save", save_and_look)
    again = [kind.name for kind in KINDS][::3]  # drawing is most of this test
    for out, more in (("a", []), ("b", ["--only", *again])):
        assert main(["--results", str(tmp_path / "results"), "--out", str(tmp_path / out), *more]) == 0
    first, second = digests(tmp_path / "a"), digests(tmp_path / "b")
    second.pop("figures.json")
    assert len(second) > 8
    assert second.items() <= first.items()
    index = json.loads((tmp_path / "a" / "figures.json").read_text())
    assert {entry["kind"] for entry in index.values()} == {kind.name for kind in KINDS}
    assert {file for entry in index.values() for file in entry["files"]} == set(first) - {"figures.json"}
    for stem, entry in index.items():
        assert all(one != other for one, other in pairwise(stem.split("-"))), "no doubled words"
        assert stem.startswith(entry["kind"])
        assert entry["title"]


def test_a_notebook_gets_a_figure_of_a_folder_or_of_a_result(results: Path) -> None:
    class Saved:
        def save(self, folder: str) -> None:
            write_run(Path(folder), shares=(0.1,), seeds=(1,))

    for source in (results, str(results), Saved()):
        assert draw_figures(source).axes
    for kind, said in (("scaling", "allows no figure of the kind scaling"), ("none", 'unknown figure "none"')):
        with pytest.raises(ValueError, match=said):
            draw_figures(results, kind)


def test_every_seed_is_a_dot_beside_the_mean(tmp_path: Path) -> None:
    write_run(tmp_path, methods=("bif",), shares=(0.1,), seeds=(1, 2, 3))
    drawing, _ = draw("lds", tmp_path)
    (axis,) = drawing.figure.axes
    (dots,) = labelled(drawing, "_seeds")
    rows = load_results(tmp_path).rows.query("not normalised")
    np.testing.assert_allclose(np.sort(dots.get_ydata()), np.sort(rows["lds"]))
    (mean,) = error_bars(axis)
    np.testing.assert_allclose(mean.lines[0].get_ydata(), rows.groupby("alpha")["lds"].mean())


def test_a_linear_ceiling_of_one_seed_alone_is_not_drawn_over_seeds(tmp_path: Path) -> None:
    def lines() -> list[Any]:
        return labelled(draw("lds", tmp_path)[0], "_linear ceiling")

    place = write_run(tmp_path, shares=(0.1,), seeds=(1, 2), alphas=(0.1, 0.5), linear_ceiling=True)
    assert len(lines()) == 1
    with edited(place / "run.json") as record:
        for ceiling in record["ceilings"]:
            if ceiling["seed"] == 2:
                ceiling["linear_high"] = 1.0
    assert lines() == []


def test_seconds_of_two_machines_never_share_an_axis(results: Path) -> None:
    known: dict[str, Any] = {"shares": (0.1, 1.0), "alphas": (0.1,)}
    for number, device in enumerate(("CPU aarch64", "NVIDIA A100")):
        write_run(results / "other", run_id=f"other000000{number}", seeds=(7 + number,), device=device, **known)
    write_scaling(results / "scaling", devices=("NVIDIA H200", "NVIDIA A100"))
    for kind, count in (("front", 8), ("scaling", 4)):
        drawings = draw(kind, results)
        assert len(drawings) == count
        for drawing in drawings:
            assert len([name for name in ("H200", "A100", "CPU aarch64") if name in drawing.caption]) == 1


def test_a_run_of_many_datamodels_is_one_figure_and_no_panel_elsewhere(tmp_path: Path) -> None:
    """Made by other code of the task, it is a truth of its own: its methods would stand in a second row of panels."""
    kept: dict[str, Any] = {"shares": (0.1,), "seeds": (1,), "alphas": (0.1,)}
    known = {f"datamodel@retrains={count}": {"retrains": count} for count in range(100, 800, 100)}
    usual = {"run_id": "usual0000000", "methods": ("bif", "ekfac"), **kept}
    retrained = {"run_id": "retrained000", "methods": ("bif", *known), "options": known, **kept}
    write_run(tmp_path, **usual, task_settings={"source": "old"})
    write_run(tmp_path, **retrained, task_settings={"source": "new"})
    (drawing,) = draw("retraining", tmp_path)
    assert drawing.runs == ["retrained000"]
    assert max(len(line.get_xydata()) for line in labelled(drawing, "_joined")) == len(known)
    assert set(without_curves(load_results(tmp_path)).rows["run_id"]) == {"usual0000000"}
    write_run(tmp_path / "alone", **retrained)
    assert set(without_curves(load_results(tmp_path / "alone")).rows["method"]) == {"bif"}
    write_run(tmp_path / "same", **usual)
    write_run(tmp_path / "same", **retrained | {"methods": ("same_class", "bif", *known)})
    rows = without_curves(load_results(tmp_path / "same")).rows
    of_the_same_truth = {"usual0000000 bif", "usual0000000 ekfac", "retrained000 same_class"}
    assert set(rows["run_id"] + " " + rows["method"]) == of_the_same_truth, "of it, what nobody else measured"


def test_a_study_is_in_no_other_picture_where_other_runs_are(tmp_path: Path) -> None:
    """A curve over draws, or settings given by hand."""
    write_gaussian(tmp_path)
    place = {"task": "smooth_digits", "shares": (1.0,), "alphas": (0.5,), "seeds": (1,)}
    with edited(write_run(tmp_path, run_id="byhand000000", **place) / "run.json") as record:
        record["experiment"] = {"settings": "default"}
    results = load_results(tmp_path)
    assert len(without_studies(results)) == len(results.rows)
    write_run(tmp_path, run_id="usual0000000", **place)
    assert set(without_studies(load_results(tmp_path))["run_id"]) == {"usual0000000"}


def test_a_stored_truth_scored_again_is_shown_where_nothing_else_is(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="given0000000", methods=("bif", "mine"), device=ELSEWHERE)
    assert set(without_scored_again(load_results(tmp_path)).rows["run_id"]) == {"given0000000"}
    write_run(tmp_path, run_id="usual0000000", methods=("bif",), task_settings={"source": "new"})
    assert set(without_scored_again(load_results(tmp_path)).rows["run_id"]) == {"usual0000000"}


# ---- seconds, and within class ----


def test_points_of_a_method_its_models_and_its_better_scores(tmp_path: Path) -> None:
    write_question(tmp_path, shares=(0.1,), seeds=(1,), alphas=(0.1,))
    path = tmp_path / "question-fixed-subset" / "run.json"
    with edited(path) as record:
        for row in record["rows"]:
            if row["lds_within_groups"]:
                row["lds_within_groups"] += 0.1 * row["normalised"]
    rows = load_results(tmp_path).rows.query("scheme == 'fixed'")
    found = points(rows).set_index(["name", "reference", "models"])
    assert found.loc[("EK-FAC (kfac)", "subset", 8), "value"] == pytest.approx(0.9 * 0.74 + 0.1)
    assert found.loc[("EK-FAC (kfac)", "full", 1), "value"] == pytest.approx(0.9 * 0.14)
    assert found.loc[("labels alone", "full", 1), ["value", "alone"]].tolist() == [0.0, True]
    assert not found.loc["BIF"].isna().any().any()
    kept = one_of_each(points(rows[rows["reference"] == "full"]))
    assert {"BIF", "EK-FAC"} <= set(kept["name"])
    assert not {"bif-paper", "ekfac-library"} & set(kept["name"])


def test_pareto_front_and_how_much_more_data_a_reference_has_seen() -> None:
    points = [(1.0, 0.1), (2.0, 0.3), (3.0, 0.2), (4.0, 0.4), (1.0, 0.05), (5.0, float("nan"))]
    assert pareto_front(points) == [(1.0, 0.1), (2.0, 0.3), (4.0, 0.4)]
    known = {("full", 0.1): 100, ("full", 0.5): 20, ("attributed", 0.5): 2, ("subset", 0.1): 1}
    for (reference, alpha), times in known.items():
        assert seen({"reference": reference, "alpha_attribution": 0.1, "alpha": alpha}) == pytest.approx(times)


def test_the_front_picture_has_every_method_and_a_ceiling(tmp_path: Path) -> None:
    write_question(tmp_path, shares=(0.1,), seeds=(1,), alphas=(0.1,))
    older: dict[str, Any] = {"shares": (0.1,), "seeds": (1,), "alphas": (0.1,), "protocols": ("scratch",)}
    write_run(tmp_path, run_id="older0000000", methods=("tracin",), finished="2026-01-01T00:00:00Z", **older)
    fixed = next(one for one in draw("front", tmp_path) if "balanced" not in one.stem)
    (axis,) = fixed.figure.axes
    shown = {text.get_text() for text in axis.texts}
    assert {"labels alone", "random", "BIF", "bif-paper", "EK-FAC (kfac)", "TRAK", "x8", "noise ceiling"} <= shown
    assert "TracIn" not in shown, "a row without LDS within groups"
    assert len(labelled(fixed, "_paper")) == 3  # bif-paper, ekfac-library, gradsim
    (ceiling,) = labelled(fixed, "_noise ceiling")
    known = json.loads((tmp_path / "question-fixed-full" / "run.json").read_text())["ceilings"][0]
    assert ceiling.get_ydata()[0] == pytest.approx(known["ceiling_within_groups"])  # type: ignore[index]


def test_records_of_one_setting_are_drawn_together_and_named(tmp_path: Path) -> None:
    """BIF in one record, EK-FAC in another, by another version of the task's code."""
    known: dict[str, Any] = {"protocols": ("scratch",), "shares": (0.1,), "alphas": (0.1,), "scheme": "balanced"}
    chains = {f"bif@reference=subset,draws={draws}": 0.1 + draws / 1000 for draws in (50, 370)}
    known["options"] = {label: {"draws": int(label.rpartition("=")[2]), "chains": 4} for label in chains}
    first = {"kfac@reference=subset": 0.6, "same_class": None}
    for name, within, seeds in (("a", first, (1, 2)), ("b", chains, (1,))):
        own = {"methods": tuple(within), "within": within, "seeds": seeds, "task_settings": {"source": name}}
        write_run(tmp_path / name, run_id=name * 12, **own, **known)
    (drawing,) = draw("front", tmp_path)
    assert "Records of one setting: a (2 seeds), b (1 seed)." in drawing.caption
    assert drawing.runs == ["a" * 12, "b" * 12]
    shown = {text.get_text() for text in drawing.figure.axes[0].texts}
    assert {"EK-FAC (kfac)", "labels alone", "BIF, draws=370 (1 seed)"} <= shown
    assert not labelled(drawing, "_joined"), "no course of time"


def test_scaling_is_drawn_from_the_committed_table_and_from_rows_alone() -> None:
    """Its columns of words are known as such; and what was measured is told from what was not."""
    rows = [row for row in read_rows(ROOT / "results" / "scaling" / "scaling.csv") if row["method"] == "ekfac"]
    found = measured_fits([row for row in rows if not row["error"]], 18)
    whole, part = ({fit for _, fit in found[hollow]} for hollow in (False, True))
    assert whole == {400, 2000, 10000}
    assert part == {400}
    assert {size for size, _ in found[True]} == {row["parameters"] for row in rows if row["model"] == "2.8b"}
    rows = pd.DataFrame(rows_by_law(SIZES))
    assert can_draw(rows)
    assert not can_draw(rows[rows["method"] == "bif"])
    with matplotlib.rc_context(style.settings()):
        axes = list(style.new_figure(style.WIDTH, 2.8).subplots(1, 2, sharey=True))
        said = draw_cheaper(axes, rows)
    for count in (18, 1800):
        asked = replace(LAW, fit_examples=PAPER_FITTED, queries=count)
        ratio = ekfac_law(SUITE["2.8b"], asked) / bif_law(SUITE["2.8b"], asked)
        assert f"{ratio:,.0f} times as long" in said
    assert axes[0].get_xscale() == axes[0].get_yscale() == "log"
    stars = [line for axis in axes for line in axis.lines if line.get_marker() == "*"]
    largest = (SUITE["2.8b"].num_parameters, PAPER_FITTED)
    assert [tuple(float(v[0]) for v in line.get_data()) for line in stars] == [largest] * 2


def test_drawing_into_the_results_does_not_change_them_and_takes_away_what_is_old(results: Path) -> None:
    only = ["--results", str(results), "--only", "lds"]
    assert main(only) == 0
    before = digests(results / "figures")
    assert main(only) == 0
    assert digests(results / "figures") == before
    write_run(results / "more", run_id="more00000000", task="digits", shares=(1.0,), seeds=(1,), alphas=(0.1, 0.5))
    assert main(only) == 0
    assert (results / "figures" / "lds-digits-paper.png").exists()
    for record in results.rglob("run.json"):
        record.unlink()
    (results / "figures" / "mine.png").write_text("not ours")
    assert main(["--results", str(results)]) == 0
    assert not (results / "figures" / "lds-digits-paper.png").exists()
    assert (results / "figures" / "mine.png").exists()


def test_damaged_files_are_named_and_the_rest_is_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = {
        "broken/run.json": '{"run_id": ', "strange/run.json": '{"run_id": "x"}', "scaling/scaling.csv": "model\n14m\n",
        "budget/budget.json": '{"curves": {}}',
    }  # fmt: skip
    for name, text in damaged.items():
        (results / name).parent.mkdir()
        (results / name).write_text(text)
    assert main(["--results", str(results), "--only", "lds", "scaling", "budget"]) == 1
    said = capsys.readouterr()
    assert "lds-cifar10-paper.png" in said.out
    assert all(name in said.err for name in damaged)
