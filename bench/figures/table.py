"""LDS of every method on one ground as a table: CSV, Markdown and LaTeX. `python -m bench.figures --only table`.

In LaTeX a number is bold where it is the highest of its column and every paired difference to the others there excludes
0, over as many seeds as there are; a tie within the paired interval has no bold number, nor has a rival that no run has
beside it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

import bench.figures.words as words
from bench.figures.difference import differences_between
from bench.figures.drawing import Drawing
from bench.publish.plots.style import PaperSize, in_order
from bench.records import (
    MANY_SEEDS,
    Results,
    bars_of,
    ceiling_over_seeds,
    linear_ceiling_over_seeds,
    over_seeds,
)
from bench.tables import interval, number

LANGUAGE_TASKS = ("pythia14m", "tinylm")
PAPER_LLM_TABLE = {"gradsim": 0.198, "ekfac": 0.221, "bif": 0.110}  # tab:LLM_LDS_scores
Pairs = Mapping[Any, pd.DataFrame]  # by CELL_KEYS
CELL_KEYS = ["alpha_attribution", "truth", "alpha", "normalised"]
SPECIAL = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
}  # fmt: skip


def draw_table(results: Results, size: PaperSize) -> Iterator[Drawing]:
    yield from _tables(results, "table", language=False)


def draw_llm(results: Results, size: PaperSize) -> Iterator[Drawing]:
    """The paper's tab:LLM_LDS_scores."""
    yield from _tables(results, "llm", language=True)


def _tables(results: Results, kind: str, language: bool) -> Iterator[Drawing]:
    rows = results.rows[results.rows["task"].isin(LANGUAGE_TASKS) == language]
    for ground, group in rows.groupby("ground", sort=True):
        pairs = pairs_by_cell(results.pairs, str(ground))
        lines = lds_lines(group, pairs)
        if not (group["task"] == "pythia14m").any():
            lines = lines.drop(columns="paper")
        if not words.has_linear_ceiling(group, ["series"]):
            lines = lines.drop(columns=["linear ceiling", "LDS / linear ceiling"])
        description, about = words.first_value(group, "description"), words.first_value(group, "ground_words")
        title = f"{description}: LDS{' of finetuning' if language else ''}"
        bars = f"Interval: {bars_of(group.groupby([*CELL_KEYS, 'series']).size())}."
        bold = "Best: highest of its column, and every paired difference to the others excludes 0."
        sentences = f"{bars} {bold} {words.ceiling_caption(group, 'Ceiling:', ['series'])}{words.sizes(group)}"
        caption = f"LDS; {description}, {about}. {sentences} {words.settings_text(group)}"
        latex = latex_table(group, pairs, caption.replace("Best:", "Bold:"), f"tab:{kind}-{ground}")
        facts = words.facts_of(group, [False, True])
        runs = words.run_ids(group, ceilings=True)
        yield Drawing(f"{kind}-{ground}", title, caption, runs, table=lines, latex=latex, facts=facts)


def pairs_by_cell(pairs: pd.DataFrame, ground: str) -> Pairs:
    if not len(pairs):
        return {}
    return dict(list(pairs[pairs["ground"] == ground].groupby(CELL_KEYS)))


def in_their_order(cell: pd.DataFrame) -> list[str]:
    """Series in the order of their methods."""
    return [
        str(name)
        for method in in_order(cell["method"])
        for name in sorted(cell[cell["method"] == method]["series"].unique())
    ]


def lds_lines(group: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    lines: list[dict[str, Any]] = []
    for (share, _, alpha, normalised), block in group.groupby(CELL_KEYS, sort=True):
        best = clearly_best(block, pairs)
        for series in in_their_order(block):
            cell = block[block["series"] == series]
            mean, low, high = over_seeds(cell)
            ceiling, linear = ceiling_over_seeds(cell), linear_ceiling_over_seeds(cell)
            method = cell["method"].iloc[0]
            paper = PAPER_LLM_TABLE.get(method) if not normalised else None
            lines.append(
                {
                    "method": series,
                    "scores": words.kind_of_scores(bool(normalised)).removesuffix(" scores"),
                    "alpha_attribution": f"{share:g}",
                    "alpha": f"{alpha:g}",
                    "LDS": number(mean),
                    "interval": spread_text(mean, low, high, cell),
                    "best": "yes" if series == best else "",
                    "spread over queries": number(float(cell["spread"].mean())),
                    "ceiling": number(ceiling.value) + (" (its interval touches 0)" if ceiling.touches_zero else ""),
                    "LDS / ceiling": "-" if ceiling.touches_zero else number(mean / ceiling.value, 2),
                    "linear ceiling": number(linear),
                    "LDS / linear ceiling": number(mean / linear, 2) if linear > 0 else "-",
                    "paper": number(paper),
                    "seeds": str(cell["seed"].nunique()),
                    "subsets": words.span(cell["num_subsets"]),
                    "replicates": words.span(cell["num_replicates"]),
                    "queries": words.span(cell["num_queries"]),
                    "undefined": str(int(cell["num_undefined"].sum())),
                    "settings": cell["settings"].iloc[0],
                    "run": ", ".join(words.run_ids(cell)),
                    "ceiling's run": ", ".join(sorted(cell["ceiling_from"].fillna(cell["run_id"]).unique()))
                    if ceiling.value > 0
                    else "-",
                }
            )
    return pd.DataFrame(lines)


def spread_text(mean: float, low: float, high: float, cell: pd.DataFrame) -> str:
    """The 95 % interval of a seed or the mean one of a few; from five seeds on, the standard error over them."""
    if len(cell) >= MANY_SEEDS:
        return f"± {number(high - mean)} (s.e., {len(cell)} seeds)"
    return interval(low, high)


def clearly_best(block: pd.DataFrame, pairs: Pairs) -> str | None:
    """The series of one cell that beats each other one by more than the paired interval; None where none does."""
    means = {series: over_seeds(cell)[0] for series, cell in block.groupby("series")}
    finite = {series: mean for series, mean in means.items() if math.isfinite(mean)}
    if len(finite) < 2:
        return None
    best = max(sorted(finite), key=lambda series: finite[series])
    where = block.iloc[0]
    here = pairs.get(tuple(where[name] for name in CELL_KEYS))
    if here is None:
        return None
    for rival in finite:
        if rival != best:
            found = differences_between(here, where["ground"], best, rival, bool(where["normalised"]))
            if not len(found):
                return None
            mean, low, _ = over_seeds(found, "difference")
            # From five seeds on the bar is one standard error: twice that is the interval.
            if not (mean - 2 * (mean - low) if len(found) >= MANY_SEEDS else low) > 0:
                return None
    return best


# ---- LaTeX ----


def latex_table(group: pd.DataFrame, pairs: Pairs, caption: str, label: str) -> str:
    """A float with one tabular for each share of the training set and truth; needs booktabs."""
    attributed = r"$\alpha_{\mathrm{attribution}}"
    lines = [r"% needs \usepackage{booktabs}", r"\begin{table}[t]", r"\centering\small"]
    for (share, truth), panel in group.groupby(["alpha_attribution", "truth"], sort=True):
        alphas = sorted(panel["alpha"].unique())
        lines += [
            rf"\begin{{tabular}}{{ll{'c' * len(alphas)}}}",
            r"\toprule",
            rf"\multicolumn{{{2 + len(alphas)}}}{{l}}{{{attributed} = {share:g}$, {escaped(truth)}}} \\",
            rf" & & \multicolumn{{{len(alphas)}}}{{c}}{{$\alpha_{{\mathrm{{retrain}}}}$}} \\",
            "method & scores & " + " & ".join(f"{alpha:g}" for alpha in alphas) + r" \\",
        ]
        for normalised, block in panel.groupby("normalised", sort=True):
            lines.append(r"\midrule")
            best = {alpha: clearly_best(cell, pairs) for alpha, cell in block.groupby("alpha")}
            kind = words.kind_of_scores(bool(normalised)).removesuffix(" scores")
            for series in in_their_order(block):
                cells = [latex_cell(block, series, alpha, best.get(alpha) == series) for alpha in alphas]
                lines.append(f"{escaped(series)} & {kind} & " + " & ".join(cells) + r" \\")
        ceilings = [ceiling_over_seeds(panel[panel["alpha"] == alpha]) for alpha in alphas]
        if any(ceiling.seeds for ceiling in ceilings):
            shown = [number(c.value) + ("$^*$" if c.touches_zero else "") for c in ceilings]
            lines += [r"\midrule", "noise ceiling & & " + " & ".join(shown) + r" \\"]
        linear = [linear_ceiling_over_seeds(panel[panel["alpha"] == alpha]) for alpha in alphas]
        if any(map(math.isfinite, linear)):
            lines.append("linear ceiling & & " + " & ".join(map(number, linear)) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    lines += [rf"\caption{{{escaped(caption)}}}", rf"\label{{{label}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def latex_cell(block: pd.DataFrame, series: str, alpha: float, bold: bool) -> str:
    cell = block[(block["series"] == series) & (block["alpha"] == alpha)]
    if not len(cell):
        return "--"
    mean, low, high = over_seeds(cell)
    if not math.isfinite(mean):
        return "--"
    digits = f"{round(mean, 3) + 0.0:.3f}"  # no minus before a zero
    value = rf"\mathbf{{{digits}}}" if bold else digits
    if len(cell) >= MANY_SEEDS:
        return rf"${value} \pm {high - mean:.3f}$"
    return f"${value}\\;[{number(low)}, {number(high)}]$"


def escaped(text: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def markdown_table(table: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(table.columns) + " |", "| " + " | ".join("---" for _ in table.columns) + " |"]
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in table.to_numpy()]
    return "\n".join(lines) + "\n"
