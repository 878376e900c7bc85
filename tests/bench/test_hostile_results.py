"""Files that somebody else wrote: each is refused in one line or shown as text, and nothing of it ever runs.

The list covers run records, indices of figures, drawings, examples, tables and Markdown. What a page does with those
that are readable is looked at in a real Chromium.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.inspect.tokens import packed, page
from bench.publish.__main__ import main as publish
from bench.publish.html import markdown
from bench.records import load_results
from tests.helpers.browser import Browser, needs_browser
from tests.helpers.synthetic_results import write_examples, write_run, write_scaling, write_sweep

RUNS = "window.hacked = (window.hacked || 0) + 1"
IMAGE = f"<img src=x onerror='{RUNS}'>"
SCRIPT = f"</script><script>{RUNS}</script>"
TEXTS = [
    IMAGE, SCRIPT, f"<svg onload='{RUNS}'>", f"javascript:{RUNS}", f'" onmouseover="{RUNS}', f"<!--<script>{RUNS}",
    "{{DATA}}%DATA%${x}", "$\\frac{", "]]>", "__proto__", "constructor", "../../../etc/passwd", "=HYPERLINK(1)",
]  # fmt: skip
ONE: dict[str, Any] = {"shares": (0.1,), "alphas": (0.1,), "seeds": (1,), "methods": ("bif", "ekfac")}


def draw(words: Sequence[str]) -> int:
    return publish(["figures", *words])


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---- records that are refused ----


def changed(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record | fields


def in_rows(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record | {"rows": [row | fields for row in record["rows"]]}


REFUSED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "run id is markup": changed(run_id=IMAGE),
    "run id is a path": changed(run_id="../../evil"),
    "run id is hidden": changed(run_id=".."),
    "run id is a number": changed(run_id=7),
    "device has a line break": changed(device="GPU\nlds: all is well"),
    "device turns the writing round": changed(device="GPU \u202e0.9"),
    "device is long": changed(device="x" * 10_000),
    "description has a lone surrogate": changed(description="\ud800"),
    "rows are a word": changed(rows="none"),
    "rows are missing": lambda record: {k: v for k, v in record.items() if k != "rows"},
    "config is a list": changed(config=[]),
    "task has no name": lambda record: record | {"config": record["config"] | {"task": {}}},
    "methods are a table": lambda record: record | {"config": record["config"] | {"methods": {}}},
    "the whole is a list": lambda record: [record],
    "LDS above 1": in_rows(lds=5.0),
    "LDS is text": in_rows(lds="0.9"),
    "alpha is true": in_rows(alpha=True),
    "seconds are negative": in_rows(score_seconds=-1.0),
    "subsets have 400 digits": in_rows(num_subsets=10**399),
    "a method is nothing": in_rows(method=None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_that_is_none_is_one_line(tmp_path: Path, name: str) -> None:
    write_run(tmp_path, run_id="sound0000000", **ONE)
    place = write_run(tmp_path, run_id="evil00000000", **ONE) / "run.json"
    place.write_text(json.dumps(REFUSED[name](json.loads(place.read_text()))))
    results = load_results(tmp_path)
    (problem,) = results.problems
    assert "evil00000000/run.json" in problem
    assert "\n" not in problem
    assert "\u202e" not in problem
    assert set(results.rows["run_id"]) == {"sound0000000"}


RAW = {
    "not JSON": "{",
    "not UTF-8": b"\xff\xfe{}",
    "NaN": '{"run_id": NaN}',
    "a key twice": '{"run_id": "a", "run_id": "b"}',
    "nested": "[" * 5000 + "]" * 5000,
    "an endless number": '{"run_id": ' + "9" * 6000 + "}",
    "empty": "",
}


@pytest.mark.parametrize("name", RAW)
def test_a_file_that_is_no_json_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    content = RAW[name]
    (tmp_path / "run" / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = load_results(tmp_path).problems
    assert "\n" not in problem


def make_link(place: Path) -> None:
    secret = place.parent / ".secret"
    secret.write_text('"SECRET WORDS"')
    place.symlink_to(secret)


def make_pipe(place: Path) -> None:
    os.mkfifo(place)


def make_folder(place: Path) -> None:
    place.mkdir()


def make_huge(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(200 * 2**20)


@pytest.mark.parametrize("make", [make_link, make_pipe, make_folder, make_huge])
@pytest.mark.parametrize("name", ["run.json", "sweep.json", "budget.json", "examples.json", "scaling.csv"])
def test_what_is_no_plain_file_of_some_size_is_refused(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    (tmp_path / "evil").mkdir()
    make(tmp_path / "evil" / name)
    kinds = {"sweep.json": "sweep", "budget.json": "budget", "examples.json": "examples", "scaling.csv": "scaling"}
    if name == "run.json":
        (problem,) = load_results(tmp_path).problems
        assert f"evil/{name}" in problem
    else:
        out = ["--results", str(tmp_path), "--out", str(tmp_path / "out"), "--only", kinds[name]]
        assert draw(out) == 1
    assert publish(["report", "--results", str(tmp_path), "--out", str(tmp_path / "page")]) in (0, 1)
    text = (tmp_path / "page" / "index.html").read_text()
    assert "SECRET WORDS" not in text


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
    write_sweep(folder / "sweep", task="../..", protocol="a/../..", method="../../evil")
    before = tree(tmp_path)
    draw(["--results", str(folder), "--only", "lds", "sweep"])
    made = tree(tmp_path) - before
    assert made
    assert all(re.fullmatch(r"a/results/figures(/[a-z0-9-]+\.(png|json))?", path) for path in made)


# ---- indices of figures ----

ENTRY: dict[str, Any] = {"kind": "lds", "title": "t", "caption": "c", "runs": [], "files": ["x.svg"], "facts": {}}
INDICES = {
    "file outside": {"a": ENTRY | {"files": ["../../x.svg"]}},
    "absolute file": {"a": ENTRY | {"files": ["/etc/passwd"]}},
    "file of another kind": {"a": ENTRY | {"files": ["x.html"]}},
    "run that is markup": {"a": ENTRY | {"runs": [IMAGE]}},
    "kind that is markup": {"a": ENTRY | {"kind": IMAGE}},
    "caption that is a list": {"a": ENTRY | {"caption": [1]}},
    "list": [ENTRY],
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_is_none_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "figures.json").write_text(json.dumps(INDICES[name]))
    assert publish(["report", "--results", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "figures.json" in line


def test_figures_that_are_links_or_pipes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    makers = (make_link, make_pipe, make_huge)
    names = [f"{stem}.png" for stem in "abc"]
    index = {name.replace(".", "-"): ENTRY | {"files": [name]} for name in names}
    for make, stem in zip(makers, "abc", strict=True):
        make(folder / f"{stem}.png")
    (folder / "figures.json").write_text(json.dumps(index))
    assert publish(["report", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert all(name in said for name in names)
    assert "SECRET WORDS" not in (tmp_path / "report" / "index.html").read_text()


# ---- examples and tables ----

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
SPRITES = {
    "no picture": b"GIF89a",
    "a drawing": f"<svg xmlns='http://www.w3.org/2000/svg'><script>{RUNS}</script></svg>".encode(),
    "too many pixels": PNG + (100_000).to_bytes(4, "big") * 2 + b"\x08\x00\x00\x00\x00",
    "cut off": PNG + (48).to_bytes(4, "big") + (8).to_bytes(4, "big"),
}


@pytest.mark.parametrize("name", SPRITES)
def test_a_picture_that_is_none_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_examples(tmp_path / "examples")
    (tmp_path / "examples" / "images" / "images.png").write_bytes(SPRITES[name])
    assert draw(["--results", str(tmp_path), "--only", "examples"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "images.png" in line]
    assert line


@pytest.mark.parametrize(
    "fields",
    [{"sprite": "../../x.png"}, {"sprite": "/etc/x.png"}, {"tile": [0, 8]}, {"tile": [8]}, {"methods": []},
     {"queries": []}, {"methods": ["nobody"]}, {"seed": "1"}, {"kind": IMAGE}],
    ids=str,
)  # fmt: skip
def test_examples_that_are_none_are_one_line(tmp_path: Path, fields: dict[str, Any]) -> None:
    write_examples(tmp_path / "examples", **fields)
    before = tree(tmp_path)
    assert draw(["--results", str(tmp_path), "--only", "examples", "--out", str(tmp_path / "examples" / "out")]) == 1
    assert {path for path in tree(tmp_path) - before if not path.startswith("examples/out")} == set()


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "model\n\x00\n", '"', "model,parameters,method,fit_seconds\n1"])
def test_a_table_that_is_none_is_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scaling").mkdir()
    (tmp_path / "scaling" / "scaling.csv").write_text(text)
    assert draw(["--results", str(tmp_path), "--only", "scaling"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "scaling.csv" in line


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


# ---- in a browser ----


def write_hostile(folder: Path) -> None:
    """Everything that is readable, and as nasty as readable files can be."""
    for number, text in enumerate(TEXTS):
        settings = {"task_settings": {text: text}, "options": {"bif": {text: text}}}
        write_run(
            folder / f"r{number}", run_id=f"run{number}", task=text, protocols=(text,), device=text, **settings, **ONE
        )
        place = folder / f"r{number}" / f"run{number}" / "run.json"
        record = json.loads(place.read_text())
        record |= {
            "description": text,
            "command": text,
            "finished": text[:40],
            "versions": {text: text},
            "problems": [text],
        }
        for row in record["rows"]:
            row |= {"label": f"{row['method']}@{text}", "settings": text}
        for method in record["config"]["methods"]:
            method["label"] = f"{method['name']}@{text}"
        for pair in record["pairs"]:
            pair |= {"label": f"{pair['method']}@{text}", "against": f"{pair['against']}@{text}"}
        place.write_text(json.dumps(record))
    write_examples(folder / "examples", description=IMAGE, scores=SCRIPT)
    for path in (folder / "examples").rglob("examples.json"):
        content = json.loads(path.read_text())
        for pair in content.get("pairs", []):
            pair |= {"query_tokens": [IMAGE, SCRIPT, "\u2028"], "train_tokens": ["<!--", "{{DATA}}"]}
        for query in content.get("queries", []):
            query["label"] = IMAGE
        path.write_text(json.dumps(content))
    write_scaling(folder / "scaling", devices=(IMAGE,))
    (folder / "javascript:alert(1)").mkdir()
    write_run(folder / "javascript:alert(1)", run_id="odd-folder", **ONE)
    (folder / "reproduction.md").write_text("\n\n".join(TEXTS))
    figures = folder / "figures"
    assert draw(["--results", str(folder), "--only", "lds", "examples", "tokens"]) == 0
    index = json.loads((figures / "figures.json").read_text())
    (figures / "evil.png").write_bytes(f"<svg onload='{RUNS}'>".encode())
    facts = {"task": [IMAGE], "method": [SCRIPT]}
    index[f"evil {IMAGE}"] = ENTRY | {"files": ["evil.png"], "caption": IMAGE, "title": SCRIPT, "facts": facts}
    (figures / "figures.json").write_text(json.dumps(index))


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
        const known = /^(#|data:image\\/png|data:,|[.]|[a-z0-9_%-]+(\\/|$))/i;
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
    browser.run(
        """window.stopped = [];
        document.addEventListener("securitypolicyviolation", (event) => stopped.push(event.effectiveDirective));
        const element = document.createElement("script");
        element.textContent = arguments[0];
        document.body.append(element);
        document.body.insertAdjacentHTML("beforeend", arguments[1]);""",
        RUNS,
        IMAGE,
    )
    browser.wait("return stopped.includes('script-src-elem') && stopped.includes('script-src-attr')")
    assert browser.run("return window.hacked ?? 0") == 0
    browser.console()


@needs_browser
def test_tokens_survive_whatever_they_are(browser: Browser, tmp_path: Path) -> None:
    tokens = [
        "<!--",
        "</script>",
        "%DATA%",
        "{{DATA}}",
        "\u2028",
        IMAGE,
        "\x00",
        "<!--<script>",
        "]]>",
        "\ufffe",
        "&lt;",
    ]
    matrix = np.arange(float(len(tokens) ** 2)).reshape(len(tokens), -1) - 50
    pair = {"query": 1, "train": 2, "score": float("nan"), "query_tokens": tokens, "train_tokens": tokens[::-1]}
    text = page(SCRIPT, IMAGE, {"evil": SCRIPT}, [{**pair, "measures": {IMAGE: packed(matrix)}}])
    path = tmp_path / "tokens.html"
    path.write_text(text, encoding="utf-8")
    browser.open(path)
    shown = browser.run("return [...document.querySelectorAll('#query .token')].map((one) => one.textContent)")
    assert shown == tokens
    seen = browser.run(NOTHING_RAN)
    assert (seen["hacked"], seen["bad"], seen["scripts"]) == (0, [], ["application/json", ""])
    assert seen["title"] == SCRIPT
    assert browser.console() == []
