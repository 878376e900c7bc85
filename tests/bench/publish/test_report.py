"""The report: one small file that needs no network, with the answers first; and the API page, of today's docstrings."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

import bench
from bench.publish.__main__ import main as publish
from bench.publish.api_page import api_page, fields_of, sections
from bench.publish.html import inert_json, markdown
from bench.publish.leaderboard import rows as ranked_rows
from bench.publish.report import about_method, best_methods, method_cards, read_pictures
from bench.records import load_results
from tests.helpers.browser import Browser, needs_browser
from tests.helpers.synthetic_results import write_run

CLAIMS = "# Claims\n\n| claim | here |\n| --- | --- |\n| BIF is fast | *yes* |\n"
ANSWERS = """# Results

## 1. Who is best?

<!-- value results/x#a .3f -->EK-FAC<!-- end -->, see [all](cifar10/README.md).

## Details

not on the page
"""
FIGURES = """{"lds-cifar10": {"kind": "lds", "title": "LDS", "caption": "What it shows. More words.", "runs": [],
 "files": ["lds-cifar10.png"], "facts": {"task": ["cifar10"]}}}"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "results"
    write_run(folder / "cifar10", run_id="paper0000001", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    write_run(folder / "language", run_id="pythia000001", task="pythia14m", shares=(1.0,), seeds=(1,), alphas=(0.5,))
    (folder / "reproduction.md").write_text(CLAIMS)
    (folder / "README.md").write_text(ANSWERS)
    (folder / "figures").mkdir()
    (folder / "figures" / "figures.json").write_text(FIGURES)
    Image.new("RGB", (2000, 500), (0, 90, 200)).save(folder / "figures" / "lds-cifar10.png")
    assert publish(["report", "--results", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    return results / "report" / "index.html"


def test_the_page_is_small_needs_no_network_and_is_the_same_twice(page: Path, results: Path) -> None:
    text = page.read_text()
    assert len(text.encode()) < 3_000_000
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]
    before = page.read_bytes()
    assert publish(["report", "--results", str(results)]) == 0
    assert page.read_bytes() == before


def test_answers_come_first_without_a_mark_or_a_hash_and_data_brings_no_markup(page: Path) -> None:
    text = page.read_text()
    assert not re.search("(<|&lt;)!--", text)
    body = text.partition("<main>")[2]
    first = ["1. Who is best?", "The best method of each task", "data:image/webp", 'id="leaderboard"']
    assert sorted(first, key=body.index) == first
    assert 'see <a href="../cifar10/README.md">all</a>' in body
    assert "not on the page" not in body
    assert not [head for head in re.findall(r"<th>([^<]*)</th>", text) if re.search(r"[0-9a-f]{10}", head)]
    assert not re.search("[<>&]", inert_json({"a": "</script><!--"}))
    assert "<img" not in markdown("<img src=x>")


def test_the_best_method_of_a_task_is_the_leaderboards(results: Path) -> None:
    ranked = ranked_rows(load_results(results))
    found = best_methods(ranked)
    asked = {("cifar10", "0.1"), ("cifar10", "0.5"), ("pythia14m", "0.5")}
    assert {(one["task"], one["alpha"]) for one in found} == asked
    first = next(one for one in found if one["task"] == "pythia14m")
    assert (first["method"], first["ties"], first["seeds"]) == ("ekfac", "", 1)
    cards = method_cards([row for row in ranked if row.task == "pythia14m"])
    assert next(iter(cards))["label"] == "ekfac"
    assert all(len(line) == 10 for card in cards for line in card["lines"])
    assert "eigenvalue-corrected" in about_method("ekfac").lower(), "told by its own file"
    assert about_method("package.module:Class") == ""


def test_the_best_method_is_of_the_share_with_most_alphas(tmp_path: Path) -> None:
    write_run(tmp_path, run_id="usual0000000", shares=(0.1,), alphas=(0.1, 0.5), seeds=(1,))
    write_run(tmp_path, run_id="other0000000", shares=(0.01,), alphas=(0.5,), seeds=(1, 2, 3))
    assert {one["share"] for one in best_methods(ranked_rows(load_results(tmp_path)))} == {"0.1"}


def test_a_picture_without_room_is_a_link_and_an_empty_folder_has_a_page(results: Path, tmp_path: Path) -> None:
    assert publish(["report", "--results", str(tmp_path)]) == 0
    assert "tda-bench lds --alpha 0.1" in (tmp_path / "report" / "index.html").read_text()
    loaded = load_results(results)
    (shown,) = read_pictures(loaded, results / "figures", tmp_path, 10**6)
    (linked,) = read_pictures(loaded, results / "figures", tmp_path, 0)
    assert shown["source"].startswith("data:image/webp;base64,")
    assert linked["source"] == ""
    assert linked["links"][0][1].endswith("figures/lds-cifar10.png")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@needs_browser
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (420, "dark")])
def test_it_opens_at_any_width_sorts_and_finds(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.look(width, 850, theme)
    browser.open(page)
    assert browser.run("return document.documentElement.scrollWidth") == width
    seen = browser.run("""const table = document.querySelector("table.sortable");
        const column = [...table.querySelectorAll("th")].findIndex((th) => th.textContent.startsWith("LDS"));
        table.querySelectorAll("th")[column].click();
        return [...table.tBodies[0].rows].map((row) => parseFloat(row.cells[column].textContent));""")
    assert seen == sorted(seen, reverse=True)
    shown = browser.run("""const find = document.getElementById("find"); find.value = "pythia14m";
        find.dispatchEvent(new Event("input"));
        return [...document.querySelectorAll(".board")].filter((one) => !one.hidden).map((one) => one.id);""")
    assert shown
    assert all("pythia14m" in one for one in shown)
    missing = browser.run("""return [...document.querySelectorAll('a[href^="#"]')]
        .filter((a) => a.hash.length > 1 && !document.getElementById(a.hash.slice(1))).map((a) => a.hash)""")
    assert missing == []
    assert browser.console() == []


PAGE = Path(bench.__file__).with_name("API.md")


def test_the_api_page_is_that_of_the_code_and_one_for_a_browser_has_every_name(tmp_path: Path) -> None:
    assert PAGE.read_text() == api_page(), "python -m bench.publish api --out bench/API.md writes it again"
    assert publish(["api", "--out", str(tmp_path / "api.html")]) == 0
    page = (tmp_path / "api.html").read_text()
    assert page.startswith("<!doctype html>")
    assert all(f"<h2>{name}</h2>" in page for name in bench.__all__)


@pytest.mark.parametrize(("name", "value"), sections())
def test_a_name_and_its_fields_say_what_they_are(name: str, value: object) -> None:
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        assert not [field for field, (_, words) in fields_of(value).items() if not words]
