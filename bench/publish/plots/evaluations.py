"""What other questions than LDS answer: which methods agree, and what happens without the most helpful examples.

`agreement`: Spearman's correlation and top overlap of every two methods, a matrix a panel. `removal`: how a query's
loss changes when its most helpful examples are left out, against how many are. Both from answers.json.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from bench.answers import ANSWERS_FILE
from bench.evaluations.agreement import AGREEMENT, matrices_of, matrix_of
from bench.identity import file_slug, series_label
from bench.publish.plots.frame import MOST_NAMES, MOST_PANELS, Drawing, finish, handles_of, logarithmic, panel_row
from bench.publish.plots.style import INK, QUIET, looks
from bench.records import Results
from bench.schema import AnswersRecord

REMOVAL = "removal"
CONTROL = "control"  # the origin of a row that no method made
DASHES = ((0, (1, 1.5)), (0, (4, 2)))


def draw_agreement(results: Results) -> Iterator[Drawing]:
    for _, record in results.read(ANSWERS_FILE, AnswersRecord):
        if record["question"] != AGREEMENT:
            continue
        methods = {one.get("label"): one.get("name", "") for one in record["config"].get("methods", [])}
        groups: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
        cells = record.get("detail", {}).get("cells", [])
        for (seed, share, normalised, metric, at), some in matrices_of(cells).items():
            groups.setdefault((seed, share, normalised), {})[metric, at] = some
        for (seed, share, normalised), panels in groups.items():
            count = max(len(matrix_of(some)[0]) for some in panels.values())
            shown = list(panels.items())[:MOST_PANELS]
            figure, axes = panel_row(len(shown), max(1.8, 0.55 + 0.21 * count), share_y=False, across=2)
            for axis, ((metric, at), some) in zip(axes, shown, strict=True):
                _matrix(axis, methods, some)
                axis.set_title("Spearman" if metric == "Spearman" else f"top {100 * (at or 0):.2g} %")
            kind = "train-normalised" if normalised else "raw"
            task, protocol = (str(record["config"]["task"].get(name, "")) for name in ("name", "protocol"))
            what = f"{record.get('description') or task}: which methods agree"
            about = [f"protocol {protocol}", record["truth"], f"alpha_attribution {share:g}", f"seed {seed}"]
            widest = max(
                (cell["ci_high"] - cell["ci_low"]) / 2
                for some in panels.values()
                for cell in some
                if cell["ci_low"] is not None and cell["ci_high"] is not None
            )
            note = (
                "Spearman's correlation of scores over the examples, and the shared part of the most helpful ones; "
                f"means over queries, 95 % intervals at most \u00b1{widest:.3f}; {kind} scores."
            )
            finish(figure, what, about, [note])
            caption = (
                f"How alike methods rank the attributed examples; {', '.join(about)}. {note} Two random orders "
                "share as much of their top as it is large."
            )
            parts = [AGREEMENT, task, protocol, f"seed-{seed}", f"share-{share:g}", record["run_id"][:6]]
            stem = file_slug("-".join([*parts, *(["normalised"] if normalised else [])]), 120)
            facts = {"task": [task], "protocol": [protocol], "scores": [kind]}
            yield Drawing(stem, what, caption, [record["run_id"]], figure, facts)


def _matrix(axis: Axes, methods: dict[Any, str], cells: Any) -> None:
    labels, matrix = matrix_of(cells)
    names = [series_label(methods.get(label, label), label) for label in labels]
    axis.imshow(matrix, vmin=-1.0, vmax=1.0, cmap="RdBu_r", aspect="auto")
    axis.grid(False)
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    axis.tick_params(length=0)
    for row in range(len(labels)):
        for column in range(len(labels)):
            value = float(matrix[row, column])
            text = "-" if math.isnan(value) else cell_text(value)
            colour = "white" if abs(value) > 0.6 else INK
            axis.text(column, row, text, ha="center", va="center", fontsize=5.5, color=colour)


def cell_text(value: float) -> str:
    """Two decimals without the zero before them, and no sign where there is nothing; a whole 1 is as short."""
    if abs(value) >= 0.995:
        return f"{value:.0f}"
    return f"{value:.2f}".replace("-0.00", "0.00").replace("0.", ".", 1)


# ---- removal ----


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
