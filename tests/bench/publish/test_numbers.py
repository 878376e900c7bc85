"""Words cannot drift from records: this repository's pages agree with its records, and a drifted page is found."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.publish import numbers as pages
from bench.publish.__main__ import main as publish
from bench.publish.leaderboard import LeaderboardRow
from bench.publish.numbers import Records, evaluate, formatted, rewrite, table_text, value_text
from bench.tables import duration
from retrain.errors import UsageError
from tests.bench.publish.test_golden import GOLDEN, digest
from tests.helpers.synthetic_results import edited, write_question, write_run

ROOT = Path(__file__).resolve().parents[3]
EKFAC = "results/cifar10#mean:rows[label=ekfac,alpha=0.1,alpha_attribution=0.1,normalised=false].lds .3f"


def numbers(words: list[str]) -> int:
    return publish(["numbers", *words])


def test_every_page_agrees_with_its_records_and_each_says_what_code_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    records, ranked, ranked_rows = Records(ROOT), list[LeaderboardRow](), pages.rows
    monkeypatch.setattr(pages, "rows", lambda results: ranked.extend(ranked_rows(results)) or ranked)
    found = [
        f"{page.relative_to(ROOT)}:{finding.line}: {finding.words}: {finding.reason}"
        for page in pages.default_pages(ROOT)
        for finding in pages.check_page(page, records)[2]
    ]
    assert not found, "\n".join(found)
    lines: dict[str, list[str]] = {}
    for row in ranked:
        value, low, high, *spent = (f"{one:.6g}" for one in (row.value, row.low, row.high, row.seconds, row.memory))
        line = "|".join((row.column, row.label, row.settings, value, low, high, row.rank, *spent))
        lines.setdefault(row.task, []).append(line)
    assert {task: digest("\n".join(sorted(own))) for task, own in lines.items()} == GOLDEN["leaderboard"]
    # A commit and a fingerprint of the code: without them nobody can make a number again.
    names = ("run", "answers", "tune", "sweep", "budget", "speed")
    for path in (path for name in names for path in (ROOT / "results").rglob(f"{name}.json")):
        record = json.loads(path.read_text())
        assert record["commit"], path
        assert record["code"], path


def test_answers_are_tables_too(tmp_path: Path) -> None:
    """A row a label, best first; of several seeds the mean and the outermost ends; what is undefined is said."""

    def row(label: str, seed: int, at: float, value: float, undefined: int = 0) -> dict:
        ends = {"value": value, "ci_low": value - 0.1, "ci_high": value + 0.1, "num_undefined": undefined}
        place = {"metric": "removal", "at": at, "normalised": False, "higher": True}
        return {"label": label, "seed": seed, "task": "digits", "protocol": "scratch", "settings": "", **place, **ends}

    rows = [row("weak", 1, 0.0101, 0.2), row("weak", 2, 0.0099, 0.4)]
    rows += [row("weak", seed, 0.05, 0.3) for seed in (1, 2)]
    rows += [row("strong", seed, 0.05, 0.9, undefined=7) for seed in (1, 2)]
    record = {"rows": rows, "truth": "20 queries", "device": "CPU", "run_id": "0123456789ab", "question": "removal"}
    record["config"] = {"shares": [0.01, 0.05]}
    path = tmp_path / "results" / "answers.json"
    path.parent.mkdir()
    path.write_text(json.dumps(record))
    lines = table_text(Records(tmp_path), "answers results/answers.json").strip().splitlines()
    assert lines[0] == "|  | removal 1 % | removal 5 % |"
    assert lines[2] == "| `strong` | - | 0.900 [0.800, 1.000] (7 undefined) |"
    assert lines[3] == "| `weak` | 0.300 [0.100, 0.500] | 0.300 [0.200, 0.400] |"
    assert "seeds 1, 2" in lines[5]
    with pytest.raises(UsageError, match="its metrics: removal"):
        table_text(Records(tmp_path), "answers results/answers.json metric=brittleness")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "results" / "cifar10", shares=(0.1,))
    known = {"fit_seconds": 0.0, "peak_memory_bytes": 2**30, "num_train": 10, "num_queries": 5}
    timed = (("bif", 4.0, 1.0), ("ekfac", 16.0, 0.5))
    rows = [
        {"method": name, "label": name, "settings": "", "agrees": agrees, "seconds": total, "score_seconds": total,
         "all_seconds": [total]}
        for name, total, agrees in timed
    ]  # fmt: skip
    speed = {"commit": "0123456789ab", "code": "fe", "description": "made up", "question": {}, "device": "CPU"}
    (tmp_path / "results" / "speed.json").write_text(json.dumps(speed | {"rows": [row | known for row in rows]}))
    return tmp_path


def test_a_value_is_written_and_an_altered_one_or_an_altered_record_is_found(root: Path, capsys: Any) -> None:
    page = root / "README.md"
    page.write_text(f"EK-FAC reaches <!-- value {EKFAC} --><!-- end -->.\n")
    (root / "results" / "page.md").write_text("<!-- table lds results/cifar10 -->\n<!-- end -->\n")
    assert numbers([]) == 0
    path = root / "results/cifar10/aaaabbbbcccc/run.json"
    asked = {"method": "ekfac", "alpha": 0.1, "normalised": False}
    values = [row["lds"] for row in json.loads(path.read_text())["rows"] if asked.items() <= row.items()]
    right = f"{sum(values) / 5:.3f}"
    assert page.read_text() == f"EK-FAC reaches <!-- value {EKFAC} -->{right}<!-- end -->.\n"
    assert numbers(["--check"]) == 0
    altered = page.read_text().replace(right, "0.999")
    page.write_text(altered)
    capsys.readouterr()
    assert numbers(["--check"]) == 1
    said = capsys.readouterr().err
    assert all(text in said for text in ("README.md:1:", '"0.999"', f'"{right}"'))
    assert page.read_text() == altered, "a check changes nothing"
    page.unlink()
    assert numbers(["--check"]) == 0
    with edited(path) as record:
        next(row for row in record["rows"] if row["method"] == "trak")["lds"] += 0.05
    assert numbers(["--check"]) == 1


def test_lds_within_groups_is_a_table_with_a_line_a_reference(tmp_path: Path) -> None:
    write_question(tmp_path / "results", seeds=(1,), alphas=(0.1,))
    for path in (tmp_path / "results").glob("*balanced*"):
        shutil.rmtree(path)
    text = table_text(Records(tmp_path), "lds results metric=lds_within_groups scores=raw")
    lines = dict(line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `"))
    assert next(iter(lines)) == "`kfac, subset x 8`"
    assert lines["`kfac, subset x 8`"].startswith("0.666 ")
    assert lines["`kfac`"].startswith("0.126 ")
    assert lines["`same_class`"] == "nothing"


def test_what_must_not_share_a_table_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(root / "results" / "cifar10", run_id="bbbb", shares=(0.1,), options={"bif": {"draws": 7}}, seeds=(7,))
    (root / "README.md").write_text("<!-- table lds results/cifar10 -->\n<!-- end -->\n")
    assert numbers([]) == 1
    assert "has several options in one column: " in capsys.readouterr().err
    write_run(root / "results" / "cifar10", run_id="cccc", shares=(0.1,), protocols=("scratch",))
    assert numbers(["--check"]) == 1
    assert "give a folder with one ground of cifar10-paper; cifar10-scratch" in capsys.readouterr().err


MARKS = [
    ("results/none.json#a .3f", "results/none.json is not there"),
    ("../x#a .3f", "leaves the repository"),
    ("results/speed.json#rows[label=bif].speed .3f", "there is no field speed"),
    ("results/speed.json#rows[label=kfac].seconds .3f", "no item of rows has label=kfac; there is bif, ekfac"),
    ("results/speed.json#rows[].seconds .3f", "fits 2 items; they differ in method (2), label (2)"),
    ("results/speed.json#rows[0].seconds d", '"d" is no format; expected one such as .3f'),
    ("results/speed.json#mean:rows[].seconds .3f", "expected the seeds of one experiment"),
    ("results/cifar10#mean:rows[label=ekfac,alpha=0.1].lds .3f", "normalised False, True"),
]


def test_a_mark_that_cannot_be_read_says_why(root: Path) -> None:
    for words, said in MARKS:
        with pytest.raises(UsageError) as error:
            value_text(Records(root), words)
        assert said in str(error.value)


def test_values_of_records_and_differences_turned_round(root: Path) -> None:
    record = {"rows": [{"label": "bif@draws=20,gamma=1e4", "lds": 0.25}, {"label": "bif", "lds": 0.5}]}
    assert evaluate(record, 'rows[label="bif@draws=20,gamma=1e4"].lds') == 0.25, "quotes hold commas"
    assert evaluate(record, "rows[label=bif].lds / rows[0].lds") == 2.0
    assert [formatted(value, ".3f") for value in (-0.0001, -0.1)] == ["0.000", "-0.100"], "a zero has no minus"
    with pytest.raises(UsageError, match="null"):
        formatted(None, ".3f")
    records = Records(root)
    assert value_text(records, "results/speed.json#rows[label=ekfac].seconds / rows[label=bif].seconds .1f") == "4.0"
    assert value_text(records, "results/speed.json#max:rows[].seconds duration") == "16 s"
    for seconds, text in ((119.6, "120 s"), (6469, "1 h 48 min"), (3599.7, "1 h 00 min"), (28.99 * 86400, "29 d 0 h")):
        assert duration(seconds) == text, "to the nearest, not cut off"
    assert value_text(records, "results/speed.json#rows[0].peak_memory_bytes ,.0f") == "1,073,741,824"
    for pair, expected in (("label=ekfac,against=bif", "+0.060"), ("label=bif,against=ekfac", "-0.060")):
        where = f"{pair},alpha=0.1,normalised=true,seed=1"
        assert value_text(records, f"results/cifar10#pairs[{where}].difference +.3f") == expected
    within = {"difference_within_groups": 0.1, "within_groups_low": -0.2, "within_groups_high": 0.3}
    pair = {"label": "a", "against": "b", "difference": 1.0, "ci_low": 0.5, "ci_high": None, **within}
    _, turned = pages.both_ways([{"run_id": "r", "pairs": [pair]}])
    assert (turned["difference"], turned["ci_low"], turned["ci_high"]) == (-1.0, None, -0.5)
    assert [turned[name] for name in within] == [-0.1, -0.3, 0.2]


def test_marks_in_code_stay_and_unclosed_ones_are_found() -> None:
    page = (
        "`<!-- value a#b .3f -->`\n\n```\n<!-- table lds x -->\n```\n<!-- value c#d .3f -->1<!-- end -->\n"
        "<!-- value e#f .3f -->2\n<!-- table g -->| `h |<!-- end -->\n<!-- end -->\n"
    )
    wanted, findings = rewrite(page, lambda kind, words: "X")
    places = [(finding.line, finding.words) for finding in findings]
    assert places == [(6, "value c#d .3f"), (7, "value e#f .3f"), (8, "table g"), (9, "end")]
    assert wanted == page.replace(">1<", ">X<").replace("| `h |", "X")
    assert [finding.repaired for finding in findings] == [True, False, True, False]
