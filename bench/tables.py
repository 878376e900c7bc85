"""Every table that people read, as text or Markdown, and how numbers are written in them.

`table` and `markdown_table` take a header and rows of text. `show` is what a run prints: a block for
every (alpha_attribution, alpha), methods by score, in 100 columns; `wide` adds the spread over queries, undefined ones,
LDS across queries, and the seconds of fit and score apart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tabulate import tabulate

import bench.metrics as metrics
from bench.metrics.linear import is_known, pooled_linear_ceiling
from bench.publish import compare

if TYPE_CHECKING:  # tables of records are read without torch, and numbers are written without pandas
    import pandas as pd

Key = TypeVar("Key")
Item = TypeVar("Item")
MAX_WIDTH = 160  # of a table that has as many columns as somebody asked for
SCORES_CALLED = {False: "raw", True: "norm."}
SCORE_KINDS = {"raw": (False,), "normalised": (True,), "both": (False, True)}  # as options say it -> whether normalised


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items that are alike in something, in the order in which they come."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def seeds_text(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def short_number(value: float | None) -> str:
    """Three digits that count, of any size; thousands as people write them: -11,200."""
    if value is None or not math.isfinite(value):
        return "-"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e7 else f"{value:.3g}"


def interval(low: float | None, high: float | None, digits: int = 3) -> str:
    return f"[{number(low, digits)}, {number(high, digits)}]"


def bytes_text(num_bytes: float | None) -> str:
    if num_bytes is None or not math.isfinite(num_bytes):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB", "MiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Three digits below two minutes, then the two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if round(seconds) < 3600:
        return "{} min {:02d} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(seconds / 60), 60))
    return "{:,} d {} h".format(*divmod(round(seconds / 3600), 24))


def setting_text(value: Any) -> str:
    """An option's value as people write it; an empty pattern of parameters takes all of them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value) or "all"
    return f"{value:g}"


RELATIVE = "relative_"


def relative_of(options: Iterable[str]) -> set[str]:
    """What these options take the place of when given: a damping that of `relative_damping`."""
    return {f"{RELATIVE}{option}" for option in options}


def in_place_of(options: Iterable[str]) -> set[str]:
    """These, and what they take the place of: a damping that of `relative_damping`, and the other way round."""
    given = set(options)
    return given | relative_of(given) | {option.removeprefix(RELATIVE) for option in given}


def acting(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the relative options that do nothing because the absolute one is given."""
    idle = relative_of(name for name, value in options.items() if value is not None)
    return {name: value for name, value in options.items() if name not in idle}


# ---- the three ways to write a table ----


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int | Sequence[int] = 1) -> str:
    """Columns aligned; the first `left` (or the columns of these numbers) to the left, the others to the right."""
    lefts = set(range(left) if isinstance(left, int) else left)
    align = ["left" if i in lefts else "right" for i in range(len(header))]
    rule = ["-" * max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    # Cells are text: nothing in them is taken for a number. As a row, a header gets no padding of its own.
    text = tabulate([header, rule, *rows], tablefmt="plain", colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def tables(header: Sequence[str], rows: Sequence[Sequence[str]], width: int = MAX_WIDTH) -> str:
    """One table, or, where it were too wide, several below each other: each has the first column and some others."""
    columns = [max(len(line[i]) for line in [header, *rows]) + 2 for i in range(len(header))]
    parts: list[list[int]] = [[]]
    for i in range(1, len(header)):
        if parts[-1] and columns[0] + sum(columns[j] for j in parts[-1]) + columns[i] - 2 > width:
            parts.append([])
        parts[-1].append(i)
    chosen = [[0, *part] for part in parts]
    return "\n\n".join(table([header[i] for i in some], [[row[i] for i in some] for row in rows]) for some in chosen)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Not padded: a page's line changes where its number does, and nowhere else."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


# ---- what a run prints ----


@dataclass
class RunRows:
    """What a run came to, as plain data: lists of dictionaries, as they stand in a record."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    tracebacks: dict[str, str] = field(default_factory=dict)  # label -> of what failed


MEASURED = (
    "lds", "ci_low", "ci_high", "spread", "lds_across_queries", "fit_seconds", "score_seconds", "peak_memory_bytes",
)  # fmt: skip


def recorded_text(record: Mapping[str, Any], version: str = "", wide: bool = False) -> str:
    """The tables of a run.json, as the run printed them: a number that it has no value for is NaN again."""

    def with_nan(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
        return [{**row, **{name: math.nan for name in names if row.get(name) is None}} for row in rows]

    out = RunRows(
        with_nan(record["rows"], MEASURED), with_nan(record["pairs"], ("difference", "ci_low", "ci_high", "p_value")),
        with_nan(record["ceilings"], ("ceiling",)), record["diagnostics"],
    )  # fmt: skip
    return show(out, record.get("description") or "", record["rows"][0]["protocol"], version, wide)


def show(out: RunRows, description: str, protocol: str, version: str = "", wide: bool = False) -> str:
    """The tables; the words above each say what they are of: the task's version where it is known."""
    import pandas as pd

    frame, pairs = pd.DataFrame(out.rows), out.pairs
    if frame.empty:
        return "no rows: no method finished"
    notes = remarks(frame, wide)
    if not wide:
        frame = primary(frame)
        made = set(zip(frame["label"], frame["normalised"]))
        pairs = [pair for pair in pairs if {(pair[name], pair["normalised"]) for name in ("label", "against")} <= made]
    parts = []
    for (alpha_attribution, alpha), group in frame.groupby(["alpha_attribution", "alpha"], sort=True):
        first = group.iloc[0]
        seeds = sorted(group["seed"].unique())
        ceilings = [c for c in out.ceilings if c["alpha"] == alpha and c["alpha_attribution"] == alpha_attribution]
        kept = f"alpha {alpha:g} of {alpha_attribution:g} of the training set,"
        asked = f"{description}, protocol {protocol}: {kept}"
        if version:
            asked = textwrap.fill(f"{description}, task {version}: {kept}", 100, break_on_hyphens=False)
        parts.append(
            f"\n{asked}\n"
            f"{first['num_subsets']} subsets x {replicates_text(ceilings[0], first)}, {first['num_queries']} queries, "
            f"{seeds_text(seeds)}; {ceiling_text(ceilings)}"
            f"{within_ceiling_text(ceilings)}{linear_ceiling_text(ceilings)}"
        )
        parts.append(lds_table(group, ceilings, wide))
        text = pairs_text if len(seeds) == 1 else pairs_over_seeds_text
        parts.append(text(pairs, alpha, alpha_attribution))
    parts += settings_lines(frame)
    parts += list(dict.fromkeys(filter(None, map(chains_line, out.diagnostics))))
    parts += ["\n" + "\n".join(notes)] if notes else []
    return "\n".join(part for part in parts if part)


def primary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a method: the raw one, except of a label that has none.

    Raw is the recommendation: over the committed records, normalising gains 0.04 at most in a task's mean LDS, and on
    some tasks it loses 0.4 (METHODS.md).
    """
    raw = set(frame[~frame["normalised"].astype(bool)]["label"])
    return frame[[not normalised or label not in raw for label, normalised in zip(frame["label"], frame["normalised"])]]


def remarks(frame: pd.DataFrame, wide: bool) -> list[str]:
    """What a reader of the table must know, a line each."""
    lines = []
    normalised = frame[frame["normalised"].astype(bool)]
    negative = frame[(frame["ci_high"] < 0) & (frame["lds"] < -0.05)]
    if not wide and len(normalised) and len(normalised) < len(frame):
        lines.append("scores as they are (raw); --wide has the normalised ones, too")
    if wide and (lacking := sorted(set(frame["label"]) - set(normalised["label"]))):
        lines.append(f"no normalised row of {', '.join(lacking)}: no train_scale was given")
    for label in dict.fromkeys(negative[negative["method"] != "random"]["label"]):
        lines.append(f"{label}: LDS is clearly negative; is its sign flipped? Scores of helpful examples are negative")
    for label, rows in frame[frame["num_undefined"] > 0].groupby("label", sort=False):
        row = rows.iloc[0]
        told = f": {row['note']}" if isinstance(row.get("note"), str) and row["note"] else ""
        lines.append(f"{label}: LDS is undefined for {row['num_undefined']} of {row['num_queries']} queries{told}")
    return lines


def settings_lines(frame: pd.DataFrame) -> list[str]:
    """One line for each method with settings of its own: a number without them says little."""
    lines = []
    for (label, settings, origin), rows in frame.groupby(["label", "settings", "origin"], sort=False):
        kinds = sorted(set(rows["normalised"]))
        alike = len(kinds) == 2 or len(set(frame[frame["label"] == label]["settings"])) == 1
        if settings or origin != "default":
            only = "" if alike else f", {SCORES_CALLED[kinds[0]]}"
            lines.append(f"{label}{only}: {settings or 'defaults'} ({origin})")
    return [f"\nsettings  {lines[0]}", *(f"          {line}" for line in lines[1:])] if lines else []


def chains_line(line: dict[str, Any]) -> str:
    if line.get("rhat") is None:
        return ""
    dropped = f"; dropped {'; '.join(line['dropped_chains'])}" if line.get("dropped_chains") else ""
    mixing = f"; {line['mixing']}" if line.get("mixing") else ""
    return (
        f"{line['label']} chains, seed {line['seed']}: R-hat {line['rhat']:.3f}, ESS {number(line['ess'], 0)} of "
        f"{line['num_draws']} draws (mean loss); per example, median R-hat {number(line['rhat_examples_median'])}, "
        f"ESS {number(line['ess_examples_median'], 0)}{dropped}{mixing}"
    )


def replicates_text(ceiling: dict[str, Any], row: Any) -> str:
    """How often subsets were retrained on: "2", or "2 (25 of them)" where only some were replicated."""
    replicated, times = ceiling["num_subsets_replicated"], ceiling["num_replicates"]
    text = f"{times} ({replicated} of them)" if times > 1 and replicated < row["num_subsets"] else str(times)
    how = {"fresh": ", fresh initialisations", "replayed": ", replayed"}
    return text + how.get(ceiling.get("initialisation", ""), "")


def ceiling_text(ceilings: Sequence[dict[str, Any]]) -> str:
    if unknown := [c for c in ceilings if not math.isfinite(c["ceiling"])]:
        replicated = unknown[0]["num_subsets_replicated"]
        if unknown[0]["num_replicates"] < 2:
            reason = "needs --replicates 2"
        elif replicated < metrics.MINIMUM_SUBSETS:
            reason = f"{replicated} subsets were retrained on twice; needs {metrics.MINIMUM_SUBSETS}"
        else:
            reason = "the retrained losses are not finite, or the same for all subsets"
        return f"noise ceiling unknown ({reason})"
    pooled = pooled_ceiling_of(ceilings)
    text = f"noise ceiling {pooled.ceiling:.3f} {interval(pooled.ci_low, pooled.ci_high)}"
    text += " (of the seeds' mean reliability)" if len(ceilings) > 1 else ""
    return text + ("\nits interval touches 0: no share of it is given" if pooled.touches_zero else "")


def within_ceiling_text(ceilings: Sequence[dict[str, Any]]) -> str:
    """A line of its own, of a task with groups."""
    if any(c.get("ceiling_within_groups") is None for c in ceilings):
        return ""
    names = {"reliability": "reliability_within_groups", "ci_low": "ceiling_within_groups_low"}
    names["ci_high"] = "ceiling_within_groups_high"
    pooled = pooled_ceiling_of([{short: c[name] for short, name in names.items()} for c in ceilings])
    if not math.isfinite(pooled.ceiling):
        return ""
    zero = ", which touches 0" if pooled.touches_zero else ""
    ends = interval(pooled.ci_low, pooled.ci_high)
    return f"\nwithin {ceilings[0]['group_name']}: noise ceiling {pooled.ceiling:.3f} {ends}{zero}"


def linear_ceiling_text(ceilings: Sequence[dict[str, Any]]) -> str:
    """A line of its own below the noise ceiling; nothing where too few subsets were retrained on to tell."""
    value = linear_ceiling_of(ceilings)
    if not math.isfinite(value):
        return ""
    ends = f" {interval(ceilings[0]['linear_low'], ceilings[0]['linear_high'])}" if len(ceilings) == 1 else ""
    subsets = f"{ceilings[0]['linear_subsets']:,} subsets{' a seed' if len(ceilings) > 1 else ''}"
    text = f"\nlinear ceiling {value:.3f}{ends}: what the best additive score could have (from {subsets})"
    if any(c.get("unlimited_ceiling") is None for c in ceilings):
        return text
    ends = f" {interval(ceilings[0]['unlimited_low'], ceilings[0]['unlimited_high'])}" if len(ceilings) == 1 else ""
    reached = metrics.best_spearman(float(np.mean([c["unlimited_share"] for c in ceilings])))
    far = f"{ceilings[0]['unlimited_from']:,} retrains"
    return f"{text}\n  its check: {reached:.3f}{ends}, where regression on {far} is heading without a prior"


def linear_ceiling_of(ceilings: Sequence[dict[str, Any]]) -> float:
    """NaN unless every seed's is known well enough, and there is more than noise to explain."""
    if not ceilings or not all(map(is_known, ceilings)):
        return math.nan
    noise = pooled_ceiling_of(ceilings)
    if noise.num_seeds and noise.touches_zero:
        return math.nan
    return pooled_linear_ceiling([c["linear_share"] for c in ceilings], noise.ceiling)


def pooled_ceiling_of(ceilings: Sequence[dict[str, Any]]) -> metrics.PooledCeiling:
    """Of the mean reliability: a seed whose own is near 0 then counts as what it is."""
    names = ("reliability", "ci_low", "ci_high")
    columns = [[math.nan if c.get(name) is None else c[name] for c in ceilings] for name in names]
    return metrics.pooled_ceiling(*columns)


def share_text(value: float, ceiling: float) -> str:
    return number(value / ceiling, 2) if ceiling > 0 else "-"


def divisor(ceilings: Sequence[dict[str, Any]]) -> float:
    """The pooled ceiling; 0, by which nothing is divided, where a seed's is unknown or its interval touches 0."""
    pooled = pooled_ceiling_of(ceilings) if ceilings else None
    return 0.0 if pooled is None or pooled.num_unknown or pooled.touches_zero else pooled.ceiling


def lds_table(group: pd.DataFrame, ceilings: Sequence[dict[str, Any]], wide: bool) -> str:
    """A line a method. Of several seeds: means, from the lowest to the highest end of the seeds' 95 % intervals."""
    several, linear, ceiling = group["seed"].nunique() > 1, linear_ceiling_of(ceilings), divisor(ceilings)
    within = [f"within {ceilings[0]['group_name']}"] if ceilings and "group_name" in ceilings[0] else []
    header = ["method", "scores", "LDS", *(["s.e.", "95 % span"] if several else ["95 % interval"]), *within]
    header += ["of ceiling", *(["of linear"] if math.isfinite(linear) else []), "seconds", "memory"]
    if wide:
        ends = ["95 % within"] if within and not several else []
        header += ["per seed"] if several else [*ends, "spread"]
        header += ["undefined", "across queries", *(["s.e."] if several else []), "fit s", "score s"]
    rows = []
    for (label, normalised), block in group.groupby(["label", "normalised"], sort=several):
        mean, error = metrics.mean_and_standard_error(block["lds"].to_numpy())
        fit, score = block["fit_seconds"], block["score_seconds"]
        line = [label, SCORES_CALLED[normalised], number(mean), *([number(error)] if several else [])]
        line.append(interval(block["ci_low"].min(), block["ci_high"].max()))
        if within:  # a method that has an LDS and nothing within groups knows the groups alone
            inside = float(block["lds_within_groups"].astype(float).mean())
            line.append("nothing" if math.isfinite(mean) and not math.isfinite(inside) else number(inside))
        line += [share_text(mean, ceiling), *([share_text(mean, linear)] if math.isfinite(linear) else [])]
        line += [number((fit + score).median(), 1), bytes_text(block["peak_memory_bytes"].max())]
        if wide:
            across, across_error = metrics.mean_and_standard_error(block["lds_across_queries"].to_numpy())
            first = block.iloc[0]
            if several:
                line.append(" ".join(number(value) for value in block.sort_values("seed")["lds"]))
            else:
                line += [interval(first["within_groups_low"], first["within_groups_high"])] if within else []
                line.append(number(first["spread"]))
            line += [str(block["num_undefined"].sum()), number(across), *([number(across_error)] if several else [])]
            line += [number(fit.median(), 1), number(score.median(), 1)]
        rows.append((normalised, mean, line))
    rows.sort(key=lambda row: (row[0], math.isnan(row[1]), -row[1]))
    return table(header, [line for _, _, line in rows], left=2)


def pairs_worth_showing(pairs: list[dict[str, Any]], alpha: float, alpha_attribution: float) -> list[dict[str, Any]]:
    place = (alpha, alpha_attribution)
    here = [pair for pair in pairs if (pair["alpha"], pair["alpha_attribution"]) == place]
    here = [pair for pair in here if "random" not in (pair["label"], pair["against"])]
    return [pair for pair in here if math.isfinite(pair["difference"])]


def pairs_text(pairs: list[dict[str, Any]], alpha: float, alpha_attribution: float) -> str:
    """Is one method really ahead of another, on the same subsets and queries?"""
    shown = pairs_worth_showing(pairs, alpha, alpha_attribution)
    within = bool(shown) and "difference_within_groups" in shown[0]
    lines = []
    for pair in shown:
        line = [f"{pair['label']} - {pair['against']}", SCORES_CALLED[pair["normalised"]], f"{pair['difference']:+.3f}"]
        line += [f"[{pair['ci_low']:+.3f}, {pair['ci_high']:+.3f}]", f"{pair['p_value']:.2g}"]
        if within:
            difference = pair["difference_within_groups"]
            known = difference is not None and math.isfinite(difference)
            line.append(f"{difference:+.3f} ({pair['p_value_within_groups']:.2g})" if known else "-")
        lines.append(line)
    header = ["paired difference", "scores", "LDS", "95 % interval", "p", *(["within groups (p)"] if within else [])]
    return "\n" + table(header, lines, left=2) if lines else ""


def pairs_over_seeds_text(pairs: list[dict[str, Any]], alpha: float, alpha_attribution: float) -> str:
    """The same over several seeds, with the interval of `bench.publish.compare`."""
    found: dict[tuple[bool, str, str], list[compare.Measured]] = {}
    for pair in pairs_worth_showing(pairs, alpha, alpha_attribution):
        first, second, kind = pair["label"], pair["against"], pair["normalised"]
        value, low, high = (float(pair[name]) for name in ("difference", "ci_low", "ci_high"))
        if (kind, second, first) in found:  # the better one comes first, and that may change from seed to seed
            found[kind, second, first].append(compare.turned((value, low, high)))
        else:
            found.setdefault((kind, first, second), []).append((value, low, high))
    lines = []
    for (kind, first, second), seeds in found.items():
        gap = compare.over_seeds(seeds)
        ahead = first if compare.is_ahead(gap) else second if compare.is_ahead(-gap) else "-"
        ends = f"[{gap.low:+.3f}, {gap.high:+.3f}]"
        each = " ".join(f"{value:+.3f}" for value, _, _ in seeds)
        lines.append([f"{first} - {second}", SCORES_CALLED[kind], f"{gap.mean:+.3f}", ends, each, ahead])
    header = ["paired difference", "scores", "LDS", "95 % interval", "per seed", "ahead"]
    return "\n" + table(header, lines, left=2) if lines else ""
