"""Which methods agree: Spearman's correlation and top overlap of every two, as a matrix a panel.

`python -m bench.figures --only agreement`, from what `bench.evaluations agreement` wrote.
"""

import math
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes

from bench.answers import ANSWERS_FILE
from bench.evaluations.agreement import AGREEMENT, matrices_of, matrix_of
from bench.figures.drawing import Drawing, frame, panel_row
from bench.identity import file_slug, series_label
from bench.publish.plots.style import INK, PaperSize
from bench.records import Results
from bench.schema import AnswersRecord

FEW_NAMES = 6  # methods whose numbers fit beside each other as they are


def draw_agreement(results: Results, size: PaperSize) -> Iterator[Drawing]:
    for _, record in results.read(ANSWERS_FILE, AnswersRecord):
        if record["question"] != AGREEMENT:
            continue
        methods = {one.get("label"): one.get("name", "") for one in record["config"].get("methods", [])}
        cells = [
            cell
            for cell in record.get("detail", {}).get("cells", [])
            if all(results.shows(methods.get(cell[name], ""), cell[name]) for name in ("label", "against"))
        ]
        groups: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
        for (seed, share, normalised, metric, at), some in matrices_of(cells).items():
            groups.setdefault((seed, share, normalised), {})[metric, at] = some
        for (seed, share, normalised), panels in groups.items():
            many = max(len(matrix_of(some)[0]) for some in panels.values()) > FEW_NAMES
            figure, axes = panel_row(len(panels), size, height=2.8 if many else 2.3, share_y=many)
            for axis, ((metric, at), some) in zip(axes, panels.items(), strict=True):
                _panel(axis, methods, some, size.points(4.6 if many else 5.5), "" if many else "0")
                axis.set_title("Spearman" if metric == "Spearman" else f"top {100 * (at or 0):.2g} %")
            kind = "train-normalised" if normalised else "raw"
            what = f"{record.get('description') or record['config']['task']['name']}: which methods agree"
            task = record["config"]["task"]["name"]
            protocol = str(record["config"]["task"].get("protocol", ""))
            about = [f"protocol {protocol}", record["truth"], f"alpha_attribution {share:g}", f"seed {seed}"]
            widest = max(
                (cell["ci_high"] - cell["ci_low"]) / 2
                for some in panels.values()
                for cell in some
                if cell["ci_low"] is not None and cell["ci_high"] is not None
            )
            notes = [
                "Spearman's correlation of scores over the examples, and the shared part of the most helpful ones; "
                f"means over queries, 95 % intervals at most \u00b1{widest:.3f}; {kind} scores."
            ]
            frame(figure, size, what, about, notes)
            caption = (
                f"How alike methods rank the attributed examples; {', '.join(about)}. {notes[0]} Two random orders "
                "share as much of their top as it is large."
            )
            parts = [AGREEMENT, task, protocol, f"seed-{seed}", f"share-{share:g}", record["run_id"][:6]]
            stem = file_slug("-".join([*parts, *(["normalised"] if normalised else [])]), 120)
            facts = {"task": [task], "protocol": [protocol], "scores": [kind]}
            yield Drawing(stem, what, caption, [record["run_id"]], figure, facts=facts)


def _panel(axis: Axes, methods: dict[Any, str], cells: Any, letters: float, zero: str) -> None:
    """`zero`: what stands before a decimal point."""
    labels, matrix = matrix_of(cells)
    names = [series_label(methods.get(label, label), label) for label in labels]
    axis.imshow(matrix, vmin=-1.0, vmax=1.0, cmap="RdBu_r")
    axis.grid(False)
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set_yticks(range(len(names)), names)
    for row, column in ((r, c) for r in range(len(labels)) for c in range(len(labels))):
        value = float(matrix[row, column])
        text = "-" if math.isnan(value) else cell_text(value, zero)
        colour = "white" if abs(value) > 0.6 else INK
        axis.text(column, row, text, ha="center", va="center", fontsize=letters, color=colour)


def cell_text(value: float, zero: str) -> str:
    """Two decimals after `zero`, and no sign where there is nothing; without a zero, a whole 1 is as short."""
    if not zero and abs(value) >= 0.995:
        return f"{value:.0f}"
    return f"{value:.2f}".replace("-0.00", "0.00").replace("0.", f"{zero}.", 1)
