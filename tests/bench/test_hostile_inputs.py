"""Hostile ground truths, experiments and words on the command line: one line, exit code 2, and nothing runs."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cli import lds_main as main
from bench.ground_truth import GroundTruth
from bench.publish.__main__ import main as publish
from bench.publish.html import markdown
from bench.records import load_results, write_recorded
from bench.truth.folder import write_truth
from retrain.safe_files import write_safetensors
from tests.helpers.browser import Browser, needs_browser
from tests.helpers.synthetic_results import edited, write_budget, write_examples, write_run, write_scaling


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    masks = np.array([generator.permutation(20) < 10 for _ in range(12)])
    losses = generator.normal(size=(2, 12, 5)).astype(np.float32)
    write_truth(tmp_path / "truth", GroundTruth.of_arrays(masks, losses, record={"source": "arrays"}))
    np.save(tmp_path / "scores.npy", generator.normal(size=(5, 20)))
    return tmp_path / "truth"


def rewritten(folder: Path, **changed: Any) -> None:
    """Sound by its checksum: whoever made it is the attacker."""
    arrays = {"masks": np.eye(12, 20, dtype=bool), "losses": np.zeros((2, 12, 5), np.float32), **changed}
    with (folder / "truth.safetensors").open("wb") as file:
        edit(folder, arrays_sha256=write_safetensors(file, arrays))


def edit(folder: Path, **fields: Any) -> None:
    with edited(folder / "truth.json") as record:
        record |= fields


def other(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


def recorded(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Predictions beside the ground truth, sound but for these arrays."""
    truth_sha256 = json.loads((folder / "truth.json").read_text())["arrays_sha256"]
    write_recorded(folder, {}, {"methods": [], "rows": []}, truth_sha256)
    with edited(folder / "recorded.json") as content, (folder / "recorded.safetensors").open("wb") as file:
        content["arrays_sha256"] = write_safetensors(file, arrays)


TRUTHS: dict[str, Callable[[Path], Any]] = {
    "no replicates": lambda f: rewritten(f, losses=np.zeros((0, 12, 5), np.float32)),
    "losses that are NaN": lambda f: rewritten(f, losses=np.full((2, 12, 5), np.nan, np.float32)),
    "masks of one axis": lambda f: rewritten(f, masks=np.ones(12, bool)),
    "nothing present": lambda f: rewritten(f, present=np.zeros((2, 12), bool)),
    "arrays that are a pipe": lambda f: other(f / "truth.safetensors", os.mkfifo),
    "arrays that are pickled": lambda f: (f / "truth.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "a record that is a link": lambda f: other(f / "truth.json", lambda p: p.symlink_to("/etc/passwd")),
    "a record of 4 TB": lambda f: other(f / "truth.json", huge),
    "a source of two lines": lambda f: edit(f, source="all\nis well"),
    "another checksum": lambda f: edit(f, arrays_sha256="0" * 64),
    "a checksum that is a path": lambda f: edit(f, arrays_sha256="../../x"),
    "recorded predictions of another shape": lambda f: recorded(f, arrays={"a/raw": np.ones((3, 3), np.uint8)}),
    "recorded predictions of 0 bytes": lambda f: (f / "recorded.json").write_text(""),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_a_hostile_ground_truth_is_one_line(truth: Path, name: str, refused: Any, tmp_path: Path) -> None:
    TRUTHS[name](truth)
    words = ["--ground-truth", str(truth), "--scores", str(tmp_path / "scores.npy"), "--out", str(tmp_path / "runs")]
    line = refused(main, words)
    assert line.rstrip("\n").isprintable()
    assert "root:" not in line
    assert not list((tmp_path / "runs").rglob("*.json"))


WORDS: dict[str, list[str]] = {
    "a method outside": ["--methods", "../../evil:Cls"],
    "a method that is a file": ["--methods", "/etc/passwd"],
    "a method with a line break": ["--methods", "bif\nlds: all is well"],
    "a method with half a character": ["--methods", "\udcff"],
    "a label that is markup": ["--methods", "<img src=x>=random"],
    "an option of 400 digits": ["--methods", f"bif@draws={'9' * 400}"],
    "a task outside": ["--task", "../../evil:Cls"],
    "a protocol outside": ["--protocol", "a/../.."],
    "an experiment that is a pipe": ["--experiment", "PIPE"],
    "an experiment of 4 TB": ["--experiment", "HUGE.json"],
    "a cache that is a file": ["--cache", "/etc/passwd"],
    "a cache with a zero": ["--cache", "a\0b"],
}


@pytest.mark.parametrize("name", WORDS)
def test_hostile_words_are_one_line(name: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "evil.py").write_text("open('executed', 'w')\n")
    os.mkfifo(tmp_path / "PIPE")
    huge(tmp_path / "HUGE.json")
    monkeypatch.chdir(tmp_path / "deep" / "er")
    words = [str(tmp_path / word) if word in ("PIPE", "HUGE.json") else word for word in WORDS[name]]
    usual = {"--task": "digits", "--alpha": "0.5", "--methods": "random", "--cache": str(tmp_path / "cache")}
    rest = [part for flag, value in usual.items() if flag not in words for part in (flag, value)]
    assert refused(main, [*words, *rest, "--dry-run"]).rstrip("\n").isprintable()
    assert not list(tmp_path.rglob("executed"))


def methods_of(method: dict[str, Any]) -> dict[str, Any]:
    return {"experiment": {"task": "digits"}, "config": {"methods": [method]}}


TOML: dict[str, str] = {
    "methods of tables": "methods = [{a = 1}]",
    "a date": "queries = 2026-01-01",
    "a number that is none": "options = {random = {seed = nan}}",
    "no TOML": "a = [",
}
RECORDS: dict[str, Any] = {
    "a list": [],
    "no experiment": {},
    "a method without a label": methods_of({"asked": "random"}),
    "a method of lists": methods_of({"asked": ["random"], "label": {}, "rows": 3}),
}
FORMAT, LIST = {"format": "tda-bench tuned settings 1"}, {"options": {"damping": [1]}}
TUNED: dict[str, Any] = {
    "a list": [],
    "no methods": FORMAT,
    "an option of a list": {**FORMAT, "methods": {"ekfac": {"raw": LIST, "normalised": LIST}}},
}


@pytest.mark.parametrize("name", [*TOML, *RECORDS])
def test_a_hostile_experiment_is_one_line(name: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    path = tmp_path / ("experiment.toml" if name in TOML else "run.json")
    path.write_text(f"{TOML[name]}\n" if name in TOML else json.dumps(RECORDS[name]))
    words = ["--experiment", str(path), "--cache", str(tmp_path / "cache"), "--dry-run"]
    assert str(path) in refused(main, words)


@pytest.mark.parametrize("name", TUNED)
def test_hostile_tuned_settings_are_one_line(
    name: str, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits-scratch.json").write_text(json.dumps(TUNED[name]))
    monkeypatch.setenv("TDA_BENCH_TUNED", str(tmp_path))
    refused(main, ["--task", "digits", "--methods", "ekfac", "--cache", str(tmp_path / "cache"), "--dry-run"])


RUNS = "window.hacked = (window.hacked || 0) + 1"
IMAGE = f"<img src=x onerror='{RUNS}'>"
SCRIPT = f"</script><script>{RUNS}</script>"
TEXTS = [
    IMAGE, SCRIPT, "$\\frac{", f"<svg onload='{RUNS}'>", f"javascript:{RUNS}", f'" onmouseover="{RUNS}',
    f"<!--<script>{RUNS}", "{{DATA}}%DATA%${x}", "]]>", "__proto__", "constructor", "../../../etc/passwd",
    "=HYPERLINK(1)",
]  # fmt: skip
ONE: dict[str, Any] = {"shares": (0.1,), "alphas": (0.1,), "seeds": (1,), "methods": ("bif", "ekfac")}
TWO = ONE | {"alphas": (0.1, 0.5)}  # a curve is drawn of two


def draw(words: Sequence[str]) -> int:
    return publish(["figures", *words])


# ---- records that are refused ----
REFUSED: dict[str, dict[str, Any]] = {
    "run id is markup": {"run_id": IMAGE},
    "run id is a path": {"run_id": "../../evil"},
    "device has a line break": {"device": "GPU\nlds: all is well"},
    "device turns the writing round": {"device": "GPU \u202e0.9"},
    "device is long": {"device": "x" * 10_000},
    "description has a lone surrogate": {"description": "\ud800"},
    "a row has a value too many": {"rows": {"same": {}, "columns": ["lds"], "values": [[0.1], [0.1, 0.2]]}},
    "columns have no names": {"rows": {"same": {}, "columns": [1], "values": []}},
    "rows are missing": {"rows": None},
}
IN_ROWS: dict[str, dict[str, Any]] = {"LDS above 1": {"lds": 5.0}, "subsets have 400 digits": {"num_subsets": 10**399}}


@pytest.mark.parametrize("name", [*REFUSED, *IN_ROWS])
def test_a_record_that_is_none_is_one_line(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, run_id="sound0000000", **ONE)
    with edited(write_run(tmp_path, run_id="evil00000000", **ONE) / "run.json") as record:
        for row in record["rows"]:
            row.update(IN_ROWS.get(name, {}))
        record.update(REFUSED.get(name, {}))
        if record["rows"] is None:
            del record["rows"]
    results = load_results(tmp_path)
    (problem,) = results.problems
    assert "evil00000000/run.json" in problem
    assert "\n" not in problem
    assert "\u202e" not in problem
    assert set(results.rows["run_id"]) == {"sound0000000"}


def make_link(place: Path) -> None:
    secret = place.parent / ".secret"
    secret.write_text('"SECRET WORDS"')
    place.symlink_to(secret)


@pytest.mark.parametrize("make", [make_link, os.mkfifo, Path.mkdir, huge])
def test_what_is_no_plain_file_of_some_size_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "evil").mkdir()
    kinds = {"budget.json": "budget", "examples.json": "examples", "scaling.csv": "scaling"}
    for name in ("run.json", *kinds):
        make(tmp_path / "evil" / name)
    (problem,) = load_results(tmp_path).problems
    assert "evil/run.json" in problem
    for kind in kinds.values():
        assert draw(["--results", str(tmp_path), "--out", str(tmp_path / "out"), "--only", kind]) == 1
    assert publish(["report", "--results", str(tmp_path), "--out", str(tmp_path / "page")]) in (0, 1)
    assert "SECRET WORDS" not in (tmp_path / "page" / "index.html").read_text()


def test_a_link_to_a_folder_is_named_and_not_followed(tmp_path: Path) -> None:
    write_run(tmp_path / "outside", **ONE)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "linked").symlink_to(tmp_path / "outside")
    results = load_results(tmp_path / "results")
    assert not len(results.rows)
    assert "linked: is a link to a folder" in results.problems[0]


def test_no_name_of_a_record_becomes_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "results"
    for number, text in enumerate(["a/../..", "../../../../evil", "/tmp/evil", "CON", ".", "x" * 150]):
        write_run(folder, run_id=f"run{number}", task=text, protocols=(text,), device=text, **ONE)
    write_budget(folder / "budget", task="../..", protocol="a/../..", device="../../evil")
    before = set(tmp_path.rglob("*"))
    draw(["--results", str(folder), "--only", "lds", "budget"])
    made = [str(path.relative_to(folder)) for path in set(tmp_path.rglob("*")) - before]
    assert made
    assert all(re.fullmatch(r"figures(/[a-z0-9-]+\.(png|json))?", path) for path in made)


ENTRY: dict[str, Any] = {"kind": "lds", "title": "t", "caption": "c", "runs": [], "files": ["x.svg"], "facts": {}}
INDICES = {
    "file outside": {"a": ENTRY | {"files": ["../../x.svg"]}},
    "run that is markup": {"a": ENTRY | {"runs": [IMAGE]}},
    "list": [ENTRY],
}


def test_an_index_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "figures").mkdir()
    for index in INDICES.values():
        (tmp_path / "figures" / "figures.json").write_text(json.dumps(index))
        assert publish(["report", "--results", str(tmp_path)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "figures.json" in line


def test_markdown_is_words(tmp_path: Path) -> None:
    text = "\n".join(
        ["# Title", IMAGE, f"[a](javascript:{RUNS.replace(' ', '')})", f"[b](data:text/html,{IMAGE.replace(' ', '')})",
         f"![c](x onerror={RUNS})", "| a | b |", "| --- | --- |", f"| {IMAGE} | `{SCRIPT}` |", "- **bold** and *thin*",
         f"[`{IMAGE}`](https://example.org/`x`)", "[ok](digits/README.md)", "```", SCRIPT, "```"]
    )  # fmt: skip
    page_text = str(markdown(text, "../"))
    assert "<img" not in page_text
    assert "<script" not in page_text
    assert "javascript:" not in re.sub(r">[^<]*<", "><", page_text)
    assert '<a href="../digits/README.md">ok</a>' in page_text
    assert "<strong>bold</strong> and <em>thin</em>" in page_text


def write_hostile(folder: Path) -> None:
    """Everything that is readable, and as nasty as readable files can be."""
    write_examples(folder / "examples", description=IMAGE, scores=SCRIPT)
    for path in (folder / "examples").rglob("examples.json"):
        with edited(path) as content:
            for pair in content.get("pairs", []):
                pair |= {"query_tokens": [IMAGE, SCRIPT, "\u2028"], "train_tokens": ["<!--", "{{DATA}}"]}
            for query in content.get("queries", []):
                query["label"] = IMAGE
    for number, text in enumerate(TEXTS):
        if number == 3:  # every picture takes seconds: of the first three texts, markup and a formula among them
            assert draw(["--results", str(folder), "--only", "lds", "examples", "tokens"]) == 0
        known = {"task": text, "protocols": (text,), "device": text, "task_settings": {text: text}, **TWO}
        place = write_run(folder / f"r{number}", run_id=f"run{number}", options={"bif": {text: text}}, **known)
        with edited(place / "run.json") as record:
            record |= {"description": text, "command": text, "finished": text[:40]}
            record |= {"versions": {text: text}, "problems": [text]}
            for row in record["rows"]:
                row |= {"label": f"{row['method']}@{text}", "settings": text}
            for method in record["config"]["methods"]:
                method["label"] = f"{method['name']}@{text}"
            for pair in record["pairs"]:
                pair |= {"label": f"{pair['method']}@{text}", "against": f"{pair['against']}@{text}"}
    write_scaling(folder / "scaling", devices=(IMAGE,))
    write_run(folder / "javascript:alert(1)", run_id="odd-folder", **TWO)
    (folder / "reproduction.md").write_text("\n\n".join(TEXTS))
    (folder / "figures" / "evil.png").write_bytes(f"<svg onload='{RUNS}'>".encode())
    facts = {"task": [IMAGE], "method": [SCRIPT]}
    with edited(folder / "figures" / "figures.json") as index:
        index[f"evil {IMAGE}"] = ENTRY | {"files": ["evil.png"], "caption": IMAGE, "title": SCRIPT, "facts": facts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


NOTHING_RAN = """
    const bad = [];
    for (const element of document.querySelectorAll("*")) {
      for (const { name, value } of element.attributes) {
        if (/^on/i.test(name)) bad.push(name);
        const address = /^(href|src|xlink:href|action)$/i.test(name);
        const known = /^(#|data:image\\/(png|webp)|data:,|[.]|[a-z0-9_%-]+(\\/|$))/i;
        if (address && !known.test(value)) bad.push(value.slice(0, 80));
      }
    }
    const scripts = [...document.scripts].map((script) => script.type);
    return { hacked: window.hacked ?? 0, bad, scripts, title: document.title };
"""


@needs_browser
def test_nothing_of_a_hostile_folder_runs_in_the_report(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_hostile(folder)
    assert publish(["report", "--results", str(folder)]) in (0, 1)
    browser.look(1280, 900, "light")
    browser.open(folder / "report" / "index.html")
    browser.run("""document.querySelectorAll("details").forEach((one) => { one.open = true; });
        for (const one of document.querySelectorAll("main *")) {
          for (const kind of ["mouseenter", "focus", "mouseover"]) one.dispatchEvent(new Event(kind));
        }
        document.querySelectorAll("th").forEach((one) => one.click());""")
    seen = browser.run(NOTHING_RAN)
    assert seen == {"hacked": 0, "bad": [], "scripts": [""], "title": "tda-bench: results"}
    assert browser.console() == []
    # What would run if it were part of the page is stopped by the page's own policy.
    insert = """window.stopped = [];
        document.addEventListener("securitypolicyviolation", (event) => stopped.push(event.effectiveDirective));
        const element = document.createElement("script");
        element.textContent = arguments[0];
        document.body.append(element);
        document.body.insertAdjacentHTML("beforeend", arguments[1]);"""
    browser.run(insert, RUNS, IMAGE)
    browser.wait("return stopped.includes('script-src-elem') && stopped.includes('script-src-attr')")
    assert browser.run("return window.hacked ?? 0") == 0
    browser.console()
