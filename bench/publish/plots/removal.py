"""How a query's loss changes when its most helpful examples are left out, against how many are: from answers.json."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from bench.identity import file_slug, series_label
from bench.publish.plots.frame import MOST_NAMES, MOST_PANELS, Drawing, finish, handles_of, logarithmic, panel_row
from bench.publish.plots.style import QUIET, looks
from bench.records import ANSWERS_FILE, Results
from bench.schema import AnswersRecord

REMOVAL = "removal"
CONTROL = "control"  # the origin of a row that no method made
DASHES = ((0, (1, 1.5)), (0, (4, 2)))


def draw_removal(results: Results) -> Iterator[Drawing]:
    for _, record in results.read(ANSWERS_FILE, AnswersRecord):
        rows = [row for row in record["rows"] if row["metric"] == REMOVAL and row["value"] is not None]
        if record["question"] != REMOVAL:
            continue
        for normalised in sorted({row["normalised"] for row in rows}):
            here = [row for row in rows if row["normalised"] == normalised]
            if len({row["at"] for row in here}) > 1:  # one amount is no curve
                yield _removal(record, here, normalised)


def _removal(record: Mapping[str, Any], rows: Sequence[dict[str, Any]], normalised: bool) -> Drawing:
    seeds = sorted({(row["alpha_attribution"], row["seed"]) for row in rows})[:MOST_PANELS]
    figure, axes = panel_row(len(seeds), 2.8)
    shapes = looks((r["method"], series_label(r["method"], r["label"])) for r in rows if r["origin"] != CONTROL)
    controls = list(dict.fromkeys(row["label"] for row in rows if row["origin"] == CONTROL))
    for number, label in enumerate(controls):
        line = DASHES[number % len(DASHES)]
        shapes[label] = {"color": QUIET, "marker": "x+"[number % 2], "linestyle": line, "label": label}
    for axis, (share, seed) in zip(axes, seeds, strict=True):
        own = [row for row in rows if (row["alpha_attribution"], row["seed"]) == (share, seed)]
        _removal_panel(axis, own, shapes)
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
    finish(figure, what, about, filter(None, notes), handles_of(axes, list(shapes))[:MOST_NAMES])
    caption = f"Removal curves; {', '.join(about)}. {' '.join(filter(None, notes))}"
    parts = [REMOVAL, task, protocol, record["run_id"][:6], *(["normalised"] if normalised else [])]
    facts = {"task": [task], "protocol": [protocol], "scores": [kind]}
    return Drawing(file_slug("-".join(parts), 120), what, caption, [record["run_id"]], figure, facts)


def _removal_panel(axis: Axes, rows: Sequence[dict[str, Any]], shapes: Mapping[str, dict[str, Any]]) -> None:
    for name, shape in shapes.items():
        own = [row for row in rows if name in (series_label(row["method"], row["label"]), row["label"])]
        own.sort(key=lambda row: row["at"])
        if not own:
            continue
        values = [row["value"] for row in own]
        ends = [
            [0.0 if row[end] is None else abs(row[end] - row["value"]) for row in own] for end in ("ci_low", "ci_high")
        ]
        axis.errorbar([100 * row["at"] for row in own], values, yerr=ends, elinewidth=0.7, **shape)
    axis.axhline(0.0, color=QUIET, linewidth=0.6)
    logarithmic(axis, "x")
    axis.set_xlabel("% of the attributed examples left out")


def _of_fewer(rows: Sequence[Mapping[str, Any]]) -> str:
    """A control's class may have too few examples for some queries: its point is a mean over the others."""
    fewer = {
        f"{row['label']} at {100 * row['at']:.2g} %: {asked - row['num_undefined']} of {asked}"
        for row in rows
        if row["num_undefined"] and (asked := row["num_queries"])
    }
    return f"A mean over some queries alone: {'; '.join(sorted(fewer))}." if fewer else ""
