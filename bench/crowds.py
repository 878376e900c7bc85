"""Runs of many datamodels: curves of a figure of their own, and a crowd wherever methods stand side by side."""

from dataclasses import replace

from bench.results import Results

DATAMODEL = "datamodel"
FEW = 6  # settings that are no crowd


def without_curves(results: Results) -> Results:
    """Where a ground has many datamodels, without them.

    And without the other methods of their runs, which are their priors, if the ground was measured elsewhere too.
    """
    rows = results.rows
    counts = rows[rows["method"] == DATAMODEL].groupby("ground")["series"].nunique()
    crowded = rows["ground"].isin(counts[counts > FEW].index)
    runs = set(rows[crowded & (rows["method"] == DATAMODEL)]["run_id"])
    other = ~rows["run_id"].isin(runs)
    truths = ["ground", "truth"]
    alone = ~other.groupby([rows[name] for name in truths]).transform("any")  # a truth of such runs alone
    elsewhere = other.groupby(rows["ground"]).transform("any")
    return replace(results, rows=rows[~crowded | ((rows["method"] != DATAMODEL) & ~(alone & elsewhere))])
