"""The leaderboard as people read it: a table a task, a line a method, a column a question with its ranks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.leaderboard.ranking import LeaderboardRow, interval_words
from bench.tables import bytes_text, interval, number
from retrain.errors import UsageError

ROW_CHOICES = ("task", "protocol", "metric", "scores", "alpha")


@dataclass(frozen=True)
class Board:
    """One task's, protocol's and share's methods against every column that there is for them."""

    title: str
    header: list[str]
    lines: list[list[str]]
    caption: str


def rows_with(found: Sequence[LeaderboardRow], **choices: Sequence[str]) -> list[LeaderboardRow]:
    """The rows with these values; none for one of them is refused with what there is."""
    kept = list(found)
    for name, values in choices.items():
        if values:
            texts = {_text(getattr(row, name)) for row in kept}
            if unknown := sorted(set(values) - texts):
                there = ", ".join(sorted(texts)) or "nothing"
                raise UsageError(f"the leaderboard has no row with {name} {unknown[0]}; there is {there}")
            kept = [row for row in kept if _text(getattr(row, name)) in values]
    return kept


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def boards(found: Sequence[LeaderboardRow], wide: bool = False) -> list[Board]:
    """One for each task, protocol and share; methods ordered by their first column."""
    groups: dict[tuple[str, str, float], list[LeaderboardRow]] = {}
    for row in found:
        groups.setdefault((row.task, row.protocol, row.alpha_attribution), []).append(row)
    return [_board(key, group, wide) for key, group in groups.items()]


def _board(key: tuple[str, str, float], group: Sequence[LeaderboardRow], wide: bool) -> Board:
    columns = list(dict.fromkeys(row.column for row in group))
    names = _names(group)
    lines: dict[str, dict[str, LeaderboardRow]] = {}
    for row in group:
        lines.setdefault(names[row.column, row.label, row.settings], {})[row.column] = row
    heads = {column: _head(next(row for row in group if row.column == column)) for column in columns}
    shown = _apart(heads, group)
    header = ["method", *(shown[column] for column in columns), "seconds", "memory"]
    table = []
    for name, cells in lines.items():
        some = next(iter(cells.values()))
        # Of the first column that has them, LDS where there is one: other records may be of a busier machine.
        in_order = [cells[column] for column in columns if column in cells]
        seconds = next((row.seconds for row in in_order if math.isfinite(row.seconds)), math.nan)
        memory = next((row.memory for row in in_order if math.isfinite(row.memory)), math.nan)
        table.append(
            [
                name,
                *(_cell(cells.get(column), wide) for column in columns),
                number(seconds, 1),
                bytes_text(memory) if math.isfinite(memory) else "-",
                *([_settings(cells.values()), " ".join(some.record)] if wide else []),
            ]
        )
    header += ["settings", "record"] if wide else []
    task, protocol, share = key
    return Board(f"{task}, protocol {protocol}, alpha_attribution {share:g}", header, table, _caption(group))


def _names(group: Sequence[LeaderboardRow]) -> dict[tuple[str, str, str], str]:
    """Of each (column, label, settings): the label, with its settings where one column has several of them."""
    by_column: dict[tuple[str, str], set[str]] = {}
    for row in group:
        by_column.setdefault((row.column, row.label), set()).add(row.settings)
    several = {label for (_, label), settings in by_column.items() if len(settings) > 1}
    return {
        (row.column, row.label, row.settings): f"{row.label} ({row.settings or 'defaults'})"
        if row.label in several
        else row.label
        for row in group
    }


def _settings(cells: Iterable[LeaderboardRow]) -> str:
    texts = list(dict.fromkeys((row.scores, row.settings or "defaults") for row in cells))
    if len({text for _, text in texts}) == 1:
        return texts[0][1]
    return "; ".join(f"{scores}: {text}" for scores, text in texts)


def _head(row: LeaderboardRow) -> str:
    if row.metric == "lds":
        return f"LDS, alpha {row.alpha:g}, {row.scores}"
    if row.at is None:
        return row.metric
    # Of subsets it is how much they keep; else how much is removed, or looked at.
    return f"{row.metric}, alpha {row.at:g}" if "calibration" in row.metric else f"{row.metric} {100 * row.at:.3g} %"


def _apart(heads: dict[str, str], group: Sequence[LeaderboardRow]) -> dict[str, str]:
    """Columns with one head say their scores, seeds and truth as well, as far as that tells them apart."""
    first = {column: next(row for row in group if row.column == column) for column in heads}
    found = dict(heads)
    for extra in (
        lambda row: row.scores,
        _seeds,
        lambda row: row.truth,
        lambda row: row.column.rpartition("; ")[2],
    ):
        for head in [head for head in set(found.values()) if list(found.values()).count(head) > 1]:
            alike = [column for column in found if found[column] == head]
            texts = {column: extra(first[column]) for column in alike}
            if len(set(texts.values())) > 1:
                found |= {column: f"{head}, {text}" for column, text in texts.items()}
    return found


def _seeds(row: LeaderboardRow) -> str:
    return f"seed{'s' if row.num_seeds > 1 else ''} {', '.join(map(str, row.seeds))}"


def _cell(row: LeaderboardRow | None, wide: bool) -> str:
    if row is None:
        return "-"
    ends = f" {interval(row.low, row.high)}" if wide else ""
    value = number(row.value) if not abs(row.value) >= 100 else f"{row.value:.2e}"
    return f"{value}{ends} ({row.rank})"


def _caption(group: Sequence[LeaderboardRow]) -> str:
    truths = list(dict.fromkeys(f"{row.truth}, {_seeds(row)}" for row in group))
    intervals = list(dict.fromkeys(interval_words(row.num_seeds) for row in group))
    devices = sorted({row.device for row in group})
    runs = sorted({run for row in group for run in row.record})
    return (
        f"In brackets the rank, a range where paired differences leave a tie ({'; '.join(intervals)}). "
        f"{'; '.join(truths)}. Seconds on {', '.join(devices)}: fit and scores, median over seeds, of a "
        f"method's first column. Runs: {', '.join(runs)}."
    )
