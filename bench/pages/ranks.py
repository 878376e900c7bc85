"""The leaderboard as the report's scripts sort and filter it: a board for every task, protocol and share attributed.

Ranks, ties and columns are those of `bench.leaderboard`; nothing is ranked here.
"""

import math
from typing import Any

from bench.publish.compare import interval_words
from bench.publish.leaderboard import LeaderboardRow, whole_board
from bench.publish.plots.style import in_order, look

SCORE_WORDS = {"normalised": "train-normalised", "raw": "raw"}


def ranked_boards(ranked: list[LeaderboardRow]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, float], list[LeaderboardRow]] = {}
    for row in ranked:
        groups.setdefault((row.task, row.protocol, row.alpha_attribution), []).append(row)
    methods = in_order(row.method for row in ranked)
    colours = {method: look(method)["color"] for method in methods}
    return [_board_data(group, colours) for group in groups.values()]


def _board_data(group: list[LeaderboardRow], colours: dict[str, str]) -> dict[str, Any]:
    board = whole_board(group)
    names = list(dict.fromkeys(row.column for row in group))
    firsts = {row.column: row for row in reversed(group)}
    columns = [
        {
            "column": name, "title": title, "scores": SCORE_WORDS[firsts[name].scores], "truth": firsts[name].truth,
            "metric": firsts[name].metric, "interval": interval_words(firsts[name].num_seeds),
            "better": "higher is better" if firsts[name].higher_is_better else "lower is better",
            "ranked": firsts[name].num_ranked, "ceiling": firsts[name].ceiling,
        }
        for name, title in zip(names, board.header[1 : 1 + len(names)], strict=True)
    ]  # fmt: skip
    first = group[0]
    return {
        "task": first.task, "protocol": first.protocol, "title": board.title, "caption": board.caption,
        "columns": columns, "lines": _lines(group, colours),
    }  # fmt: skip


def _lines(group: list[LeaderboardRow], colours: dict[str, str]) -> list[dict[str, Any]]:
    """A line a label; one whose settings differ within a column has a line for each of them."""
    settings: dict[tuple[str, str], set[str]] = {}
    for row in group:
        settings.setdefault((row.column, row.label), set()).add(row.settings)
    several = {label for (_, label), found in settings.items() if len(found) > 1}
    lines: dict[tuple[str, str], list[LeaderboardRow]] = {}
    for row in group:
        lines.setdefault((row.label, row.settings if row.label in several else ""), []).append(row)
    # As the caption says: of the first column that has them.
    timed = {key: next((row for row in mine if math.isfinite(row.seconds)), mine[0]) for key, mine in lines.items()}
    return [
        {
            "series": key[0], "method": mine[0].method, "colour": colours[mine[0].method],
            "settings": "; ".join(dict.fromkeys(row.settings for row in mine if row.settings)),
            "seconds": timed[key].seconds, "memory": timed[key].memory / 2**20,
            "machine": ", ".join(sorted({row.device for row in mine})),
            "cells": {
                row.column: {
                    "value": row.value, "low": row.low, "high": row.high, "rank": row.rank, "best": row.rank_best,
                    "seeds": row.num_seeds, "runs": list(row.record), "note": row.note,
                }
                for row in mine
            },
        }
        for key, mine in lines.items()
    ]  # fmt: skip


class Ranks:
    """The rank of a row of the report's own leaderboard, where exactly one row of `bench.leaderboard` is the same."""

    def __init__(self, ranked: list[LeaderboardRow]):
        self.found: dict[tuple[Any, ...], list[str]] = {}
        for row in ranked:
            if row.metric == "lds" and row.alpha is not None:
                key = (row.ground, row.truth, SCORE_WORDS[row.scores], row.alpha, row.alpha_attribution)
                self.found.setdefault((*key, row.label, row.settings, row.seeds), []).append(row.rank)

    def of(self, *key: Any) -> str:
        ranks = self.found.get(key, [])
        return ranks[0] if len(ranks) == 1 else ""
