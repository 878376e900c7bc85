"""Removal curves: how a query's loss changes when its most helpful examples are left out, against how many are.

`python -m bench.figures --only removal`, from what `bench.evaluations removal` wrote; a panel for each seed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from bench.answers import ANSWERS_FILE
from bench.figures.drawing import Drawing, frame, logarithmic, panel_row
from bench.identity import file_slug, series_label
from bench.publish.plots.style import QUIET, PaperSize, looks
from bench.records import Results
from bench.schema import AnswersRecord

REMOVAL = "removal"
CONTROL = "control"  # the origin of a row that no method made
DASHES = ((0, (1, 1.5)), (0, (4, 2)))


def draw_removal(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for _, record in results.read(ANSWERS_FILE, AnswersRecord):
        if record["question"] != REMOVAL:
            continue
        rows = [
            row
            for row in record["rows"]
            if row["metric"] == REMOVAL
            and (row["origin"] == CONTROL or results.shows(row["method"], row["label"]))
            and row["value"] is not None
        ]
        for normalised in sorted({row["normalised"] for row in rows}):
            here = [row for row in rows if row["normalised"] == normalised]
            if len({row["at"] for row in here}) > 1:  # one amount is no curve
                yield _drawing(record, here, normalised, size)


def _drawing(record: Mapping[str, Any], rows: Sequence[dict[str, Any]], normalised: bool, size: PaperSize) -> Drawing:
    seeds = sorted({(row["alpha_attribution"], row["seed"]) for row in rows})
    figure, axes = panel_row(len(seeds), size, height=2.6)
    shapes = looks([(r["method"], series_label(r["method"], r["label"])) for r in rows if r["origin"] != CONTROL])
    controls = list(dict.fromkeys(row["label"] for row in rows if row["origin"] == CONTROL))
    for number, label in enumerate(controls):
        line = DASHES[number % len(DASHES)]
        shapes[label] = {"color": QUIET, "marker": "x+"[number % 2], "linestyle": line, "label": label}
    for axis, (share, seed) in zip(axes, seeds, strict=True):
        _panel(axis, [row for row in rows if (row["alpha_attribution"], row["seed"]) == (share, seed)], shapes)
        if len(seeds) > 1:
            axis.set_title(f"seed {seed}, alpha_attribution {share:g}")
    axes[0].set_ylabel("change of the query's loss")
    kind = "train-normalised" if normalised else "raw"
    task, protocol = (str(record["config"]["task"].get(name, "")) for name in ("name", "protocol"))
    what = f"{record.get('description') or task}: leaving out each query's most helpful examples"
    about = [f"task {task}, protocol {protocol}", f"{kind} scores", record["truth"]]
    if len(seeds) == 1:
        about.append(f"alpha_attribution {seeds[0][0]:g}, seed {seeds[0][1]}")
    told = dict.fromkeys(
        f"{series_label(row['method'], row['label'])}: {row['settings'].replace(',', ', ')}"
        for row in rows
        if row["settings"]
    )
    notes = [
        "Mean over queries of the loss after retraining without them, less the mean loss with nothing removed. Bars: "
        "95 % intervals over queries and models. Grey: as many at random, or at random from the query's own class.",
        _of_fewer(rows),
        f"Settings. {'; '.join(told)}." if told else "",
    ]
    frame(figure, size, what, about, filter(None, notes), axes, (), list(shapes))
    caption = f"Removal curves; {', '.join(about)}. {' '.join(filter(None, notes))}"
    parts = [REMOVAL, task, protocol, record["run_id"][:6], *(["normalised"] if normalised else [])]
    facts = {"task": [task], "protocol": [protocol], "scores": [kind]}
    return Drawing(file_slug("-".join(parts), 120), what, caption, [record["run_id"]], figure, facts=facts)


def _panel(axis: Axes, rows: Sequence[dict[str, Any]], shapes: Mapping[str, dict[str, Any]]) -> None:
    for name, shape in shapes.items():
        own = [row for row in rows if name in (series_label(row["method"], row["label"]), row["label"])]
        own.sort(key=lambda row: row["at"])
        if not own:
            continue
        values = [row["value"] for row in own]
        ends = [[abs(_end(row, name) - row["value"]) for row in own] for name in ("ci_low", "ci_high")]
        axis.errorbar([100 * row["at"] for row in own], values, yerr=ends, elinewidth=0.7, **shape)
    axis.axhline(0.0, color=QUIET, linewidth=0.6)
    logarithmic(axis, "x")
    axis.set_xlabel("% of the attributed examples left out")


def _end(row: Mapping[str, Any], name: str) -> float:
    """Of the interval; the value itself where one query has none."""
    return row["value"] if row[name] is None else row[name]


def _of_fewer(rows: Sequence[Mapping[str, Any]]) -> str:
    """A control's class may have too few examples for some queries: its point is a mean over the others."""
    fewer = {
        f"{row['label']} at {100 * row['at']:.2g} %: {asked - row['num_undefined']} of {asked}"
        for row in rows
        if row["num_undefined"] and (asked := row["num_queries"])
    }
    return f"A mean over some queries alone: {'; '.join(sorted(fewer))}." if fewer else ""
