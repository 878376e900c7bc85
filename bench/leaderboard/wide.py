"""The leaderboard as people read it: tables a page wide, a line a method, a column a question with its ranks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.leaderboard.ranking import LeaderboardRow
from bench.publish.compare import interval_words
from bench.records import DATAMODEL
from bench.tables import bytes_text, number, short_number
from retrain.errors import UsageError

ROW_CHOICES = ("task", "protocol", "metric", "scores", "alpha")
MOST_COLUMNS = 5  # of questions in one table, so that it fits a page beside method, seconds and memory
LARGE = 100.0  # from here on three digits behind the point say nothing
Names = dict[tuple[str, str, str], str]  # column, label, settings -> what a line is called


@dataclass(frozen=True)
class Board:
    """Methods of one task, protocol and share against columns of one metric and the same seeds."""

    title: str
    header: list[str]
    lines: list[list[str]]
    caption: str


def rows_with(found: Sequence[LeaderboardRow], **choices: Sequence[str]) -> list[LeaderboardRow]:
    """The rows with these values; none for one of them is refused with what there is."""
    kept = list(found)
    for name, values in choices.items():
        if values:
            texts = {_text(value) for row in kept if (value := getattr(row, name)) is not None}
            if unknown := sorted(set(values) - texts):
                there = ", ".join(sorted(texts)) or "nothing"
                raise UsageError(f"the leaderboard has no row with {name} {unknown[0]}; there is {there}")
            kept = [row for row in kept if _text(getattr(row, name)) in values]
    return kept


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def boards(found: Sequence[LeaderboardRow], wide: bool = False) -> list[Board]:
    """Of each task, protocol and share: a table a family of metrics and set of seeds, several where it is too wide."""
    made = []
    for group in _tasks(found):
        names = _names(group)
        families: dict[str, list[LeaderboardRow]] = {}
        for row in group:
            families.setdefault(_family(row), []).append(row)
        for family, rows in _by_truth(families):
            costs = _costs([*(row for row in rows if row.metric == "lds"), *group], names)
            columns = list(dict.fromkeys(row.column for row in rows))
            tables = math.ceil(len(columns) / MOST_COLUMNS)
            width = math.ceil(len(columns) / tables)
            for first in range(0, len(columns), width):
                some = set(columns[first : first + width])
                made.append(_board([row for row in rows if row.column in some], names, costs, wide, family))
    return made


def whole_board(group: Sequence[LeaderboardRow]) -> Board:
    """Every column of one task, protocol and share side by side, for a page that scrolls."""
    names = _names(group)
    return _board(group, names, _costs(group, names))


def _tasks(found: Sequence[LeaderboardRow]) -> list[list[LeaderboardRow]]:
    groups: dict[tuple[str, str, float], list[LeaderboardRow]] = {}
    for row in found:
        groups.setdefault((row.task, row.protocol, row.alpha_attribution), []).append(row)
    return list(groups.values())


def _family(row: LeaderboardRow) -> str:
    """LDS, mislabel, removal ...: the first word of its metric; with its seeds."""
    name = "LDS" if row.metric == "lds" else row.metric.partition(" ")[0]
    return f"{name}, {_seeds(row)}"


def _by_truth(families: Mapping[str, list[LeaderboardRow]]) -> Iterator[tuple[str, list[LeaderboardRow]]]:
    """LDS on each truth by itself, since ranks and seconds are within one; other families as they are.

    So is each alpha of a truth where a method retrains by itself, which takes other seconds.
    """
    for family, rows in families.items():
        if rows[0].metric != "lds":
            yield family, rows
            continue
        known = f"task {rows[0].task}, protocol {rows[0].protocol}, "  # which the title has
        for words, own in _parted(rows, ("ground", "truth")):
            retrains = len({row.alpha for row in own}) > 1 and any(row.method == DATAMODEL for row in own)
            for more, some in _parted(own, ("alpha",)) if retrains else [("", own)]:
                yield f"{family}{words.replace(known, '')}{more}", some


def _parted(rows: Sequence[LeaderboardRow], names: Sequence[str]) -> list[tuple[str, list[LeaderboardRow]]]:
    """Rows that are alike in these, with the words of what tells them from the others."""
    parts: dict[tuple[object, ...], list[LeaderboardRow]] = {}
    for row in rows:
        parts.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    telling = [k for k, name in enumerate(names) if len({key[k] for key in parts}) > 1]
    told = {key: [f"alpha {key[k]:g}" if names[k] == "alpha" else str(key[k]) for k in telling] for key in parts}
    return [("".join(f", {text}" for text in told[key]), own) for key, own in parts.items()]


def _costs(group: Sequence[LeaderboardRow], names: Names) -> dict[str, tuple[float, float]]:
    """Name -> seconds and memory of the first row that has seconds: LDS where there is one, which is first in a group.

    Other records may be of a busier machine.
    """
    found: dict[str, tuple[float, float]] = {}
    for row in group:
        name = names[row.column, row.label, row.settings]
        if not math.isfinite(found.get(name, (math.nan,))[0]):
            found[name] = (row.seconds, row.memory)
    return found


def _board(
    group: Sequence[LeaderboardRow],
    names: Names,
    costs: Mapping[str, tuple[float, float]],
    wide: bool = False,
    family: str = "",
) -> Board:
    """Methods ordered by their first column."""
    columns = list(dict.fromkeys(row.column for row in group))
    lines: dict[str, dict[str, LeaderboardRow]] = {}
    for row in group:
        lines.setdefault(names[row.column, row.label, row.settings], {})[row.column] = row
    heads = {column: _head(next(row for row in group if row.column == column)) for column in columns}
    shown = _apart(heads, group)
    header = ["method", *(shown[column] for column in columns), "seconds", "memory"]
    table = []
    for name, cells in lines.items():
        in_order = [cells[column] for column in columns if column in cells]
        seconds, memory = costs[name]
        table.append(
            [
                name,
                *(_cell(cells.get(column), wide) for column in columns),
                number(seconds, 1),
                bytes_text(memory) if math.isfinite(memory) else "-",
                *([_settings(cells.values()), " ".join(in_order[0].record)] if wide else []),
            ]
        )
    header += ["settings", "record"] if wide else []
    first = group[0]
    title = f"{first.task}, protocol {first.protocol}, alpha_attribution {first.alpha_attribution:g}"
    return Board(f"{title}: {family}" if family else title, header, table, _caption(group))


def _names(group: Sequence[LeaderboardRow]) -> Names:
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
    numbers = [row.value, row.low, row.high]
    large = any(abs(one) >= LARGE for one in numbers)
    value, low, high = (short_number(one) if large else number(one) for one in numbers)
    ends = f" [{low}, {high}]" if wide and "-" not in (low, high) else ""
    return f"{value}{ends} ({row.rank})"


def _noise(group: Sequence[LeaderboardRow]) -> str:
    """Where little is known of the truth itself; LDS alone has a ceiling, and always an alpha."""
    alphas = sorted({row.alpha for row in group if row.ceiling_touches_zero and row.alpha is not None})
    where = ", ".join(f"{alpha:g}" for alpha in alphas)
    return f"At alpha {where} the noise ceiling's interval touches 0: ranks there tell little. " if alphas else ""


def _caption(group: Sequence[LeaderboardRow]) -> str:
    truths = list(dict.fromkeys(f"{row.truth}, {_seeds(row)}" for row in group))
    intervals = list(dict.fromkeys(interval_words(row.num_seeds) for row in group))
    devices = sorted({row.device for row in group})
    runs = sorted({run for row in group for run in row.record})
    ranks = f"In brackets the rank, a range where paired differences leave a tie ({'; '.join(intervals)})."
    return (
        f"{ranks} {_noise(group)}"
        f"{'; '.join(truths)}. Seconds on {', '.join(devices)}: fit and scores, median over seeds, of the first "
        "column of LDS that has the method, here or else of the task: the faster of its raw and normalised runs, and "
        f"memory of the same. Runs: {', '.join(runs)}."
    )
