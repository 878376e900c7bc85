"""The words of a figure: its n, its ceiling and where that comes from, and every method's settings."""

from collections.abc import Iterable

import pandas as pd

from bench.identity import series_label
from bench.publish.plots.style import in_order, look
from bench.records import ceiling_over_seeds


def kind_of_scores(normalised: bool) -> str:
    return "train-normalised scores" if normalised else "raw scores"


def run_ids(rows: pd.DataFrame, ceilings: bool = False) -> list[str]:
    """The runs behind the rows, with those that only the ceiling comes from or without."""
    return sorted({*rows["run_id"].dropna(), *(rows["ceiling_from"].dropna() if ceilings else [])})


def span(values: pd.Series) -> str:
    found = sorted({int(value) for value in values.dropna()})
    return "?" if not found else f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"


def short_names(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows with series named by their label alone, where a figure has but one series of it."""
    names = [series_label(method, label) for method, label in zip(rows["method"], rows["label"])]
    alone = rows.groupby("label")["series"].transform("nunique") == 1
    return rows.assign(series=[name if one else series for name, one, series in zip(names, alone, rows["series"])])


def sizes(rows: pd.DataFrame) -> str:
    seeds = sorted(rows["seed"].unique())
    fewer = rows["num_subsets_replicated"] < rows["num_subsets"]
    some = f" of {span(rows['num_subsets_replicated'])}" if fewer.any() and (rows["num_replicates"] > 1).any() else ""
    undefined = int(rows["num_undefined"].sum())
    return (
        f"n: {len(seeds)} seed{'s' * (len(seeds) > 1)}, {span(rows['num_subsets'])} subsets, "
        f"{span(rows['num_replicates'])} replicate(s){some}, {span(rows['num_queries'])} queries"
        f"{f', {undefined} undefined values' if undefined else ''}."
    )


def settings_text(rows: pd.DataFrame, more: Iterable[str] = ()) -> str:
    """Every method with its settings, but for what nearly always is as it is; what its series share is said once.

    `more`: settings of something else, said after these.
    """
    known = rows.drop_duplicates("series")
    parts = []
    for method in in_order(known["method"]):
        mine = known[known["method"] == method]
        settings = [_items(str(text)) if text else [] for text in mine["settings"]]
        shared = [item for item in settings[0] if all(item in other for other in settings)]
        name = f"{look(method)['label']} (all)" if len(mine) > 1 else str(mine["series"].iloc[0])
        told = [item for item in shared if item not in name]
        parts.append(f"{name}: {', '.join(told)}" if told else "")
        for series, own in zip(mine["series"], settings, strict=True):
            apart = [item for item in own if item not in shared and item not in series]
            parts.append(f"{series}: {', '.join(apart)}" if apart else "")
    text = "; ".join(filter(None, [*parts, *more]))
    return f"Settings. {text}." if text else ""


def _items(settings: str) -> list[str]:
    """One by one; of scores that somebody handed in, that they were."""
    items = settings.split(", ")
    own = [item for item in items if not item.startswith(("scores_are=", "scores_sha256="))]
    return own if len(own) == len(items) else [*own, "scores from a file"]


def facts_of(rows: pd.DataFrame, scores: Iterable[bool] = ()) -> dict[str, list[str]]:
    """For the report's filters."""
    kinds = [kind_of_scores(normalised).removesuffix(" scores") for normalised in scores]
    return {
        "task": sorted(set(rows["task"])),
        "protocol": sorted(set(rows["protocol"])),
        "method": in_order(rows["method"]),
        **({"scores": kinds} if kinds else {}),
    }


# ---- the ceiling ----


def missing_ceiling(rows: pd.DataFrame) -> str:
    known = rows.groupby(["truth", "alpha_attribution", "alpha"])["reliability"].count() > 0
    if known.all():
        return ""
    return f"Ceiling unknown{' where none is drawn' if known.any() else ''}: no replicates."


def shaky_ceiling(rows: pd.DataFrame) -> str:
    """Where the interval of the ceiling touches 0."""
    found: dict[float, set[float]] = {}
    for (_, share, alpha), cell in rows.groupby(["truth", "alpha_attribution", "alpha"], sort=True):
        if ceiling_over_seeds(cell).touches_zero:
            found.setdefault(share, set()).add(alpha)
    where = [f"alpha {', '.join(f'{a:g}' for a in sorted(alphas))} of {share:g}" for share, alphas in found.items()]
    return f"The ceiling's interval touches 0 at {'; '.join(where)}." if where else ""


def borrowed_ceiling(rows: pd.DataFrame) -> str:
    """Where the ceiling comes from if these runs have no replicates."""
    groups = rows.groupby("ceiling_from", sort=True)
    runs = [f"{run} ({span(group['ceiling_subsets'])} subsets)" for run, group in groups]
    return f"Ceiling from replicates in run {', '.join(runs)}." if runs else ""


def notes_of(told: str, rows: pd.DataFrame) -> list[str]:
    """Below the panels: what was told, ceiling and n; then settings."""
    about = [told, borrowed_ceiling(rows), missing_ceiling(rows), shaky_ceiling(rows), sizes(rows)]
    return [" ".join(filter(None, about)), settings_text(rows)]
