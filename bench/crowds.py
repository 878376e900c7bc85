"""What crowds where methods stand side by side: datamodels, whose curves have a figure, and truths scored again."""

from dataclasses import replace

import pandas as pd

from bench.record import ELSEWHERE
from bench.results import Results

DATAMODEL = "datamodel"
FEW = 6  # settings that are no crowd


def without_curves(results: Results) -> Results:
    """Where a ground has many datamodels, without them.

    And without the other methods of their runs, which are their priors, if other runs have the method on this ground,
    or the ground and not this truth.
    """
    rows = results.rows
    counts = rows[rows["method"] == DATAMODEL].groupby("ground")["series"].nunique()
    crowded = rows["ground"].isin(counts[counts > FEW].index)
    runs = set(rows[crowded & (rows["method"] == DATAMODEL)]["run_id"])
    other = ~rows["run_id"].isin(runs)

    def have(*names: str) -> pd.Series:
        return other.groupby([rows[name] for name in names]).transform("any")

    again = have("ground", "method") | (have("ground") & ~have("ground", "truth"))
    return replace(results, rows=rows[~crowded | (rows["method"] != DATAMODEL) & (other | ~again)])


def without_scored_again(results: Results) -> Results:
    """Without runs that hold scores against a stored truth, where other runs measured the ground."""
    rows = results.rows
    own = rows["machine"] != ELSEWHERE
    return replace(results, rows=rows[own | ~own.groupby(rows["ground"]).transform("any")])
