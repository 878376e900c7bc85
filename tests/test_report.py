"""The report page, opened in a real headless Chromium: it sorts, filters, follows links, and complains of nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import figures, report
from bench.results import load_results
from tests.browser import CHROMEDRIVER, CHROMIUM, Browser
from tests.synthetic_results import write_run, write_sweep

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="no chromium and chromedriver here (Debian: chromium chromium-driver)"
)


def write_examples(folder: Path) -> None:
    """Two queries of an image task with two methods, and one pair of token sequences."""
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    tiles = np.random.default_rng(0).integers(0, 256, size=(8, 8 * 6), dtype=np.uint8)
    Image.fromarray(tiles).save(folder / "images" / "images.png")
    shown = [{"train": k, "label": str(k % 2), "score": -0.5 + k, "image": k} for k in (2, 3)]
    both = {"helpful": shown, "harmful": shown[::-1]}
    queries = [{"query": q, "label": str(q), "image": q, "methods": {"bif": both, "ekfac": both}} for q in (0, 1)]
    content = {
        "kind": "images", "task": "digits", "description": "digits", "seed": 1, "scores": "raw", "sprite": "images.png",
        "methods": ["bif", "ekfac"], "tile": [8, 8], "queries": queries,
    }  # fmt: skip
    (folder / "images" / "examples.json").write_text(json.dumps(content))
    (folder / "tokens").mkdir()
    pair = {
        "query": 3,
        "train": 5,
        "query_tokens": ["a", " b", "\n"],
        "train_tokens": ["</script>", "d"],
        "bif": [[0.1, -0.9]] * 3,
        "ekfac": [1, -2],
    }
    content = {"kind": "tokens", "description": "tinylm", "seed": 1, "scores": "normalised BIF", "pairs": [pair]}
    (folder / "tokens" / "examples.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "results"
    write_run(folder / "cifar10", run_id="paper0000001", shares=(0.1, 1.0), seeds=(1, 2), alphas=(0.1, 0.5))
    write_run(
        folder / "cifar10", run_id="scratch00001", protocols=("scratch",), shares=(0.1,), seeds=(1,), alphas=(0.1,)
    )
    write_run(folder / "language", run_id="pythia000001", task="pythia14m", shares=(1.0,), seeds=(1,), alphas=(0.5,))
    write_examples(folder / "examples")
    write_sweep(folder / "sweep")
    assert (
        figures.main(["--results", str(folder), "--only", "lds", "seconds", "llm", "examples", "tokens", "sweep"]) == 0
    )
    assert report.main(["--results", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    return results / "report" / "index.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        started.look(1280, 900, "light")
        yield started


def test_the_page_is_small_and_needs_no_network(page: Path, results: Path) -> None:
    text = page.read_text()
    assert len(text.encode()) < 5_000_000
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "@import" not in text
    before = page.read_bytes()
    assert report.main(["--results", str(results)]) == 0
    assert page.read_bytes() == before


def test_the_leaderboard_is_the_rows_over_seeds(results: Path) -> None:
    loaded = load_results(results)
    rows = report.leaderboard(loaded)
    assert len(rows) == len(
        loaded.rows.groupby(["task", "protocol", "method", "normalised", "alpha", "alpha_attribution"])
    )
    (row,) = [
        r
        for r in rows
        if r["protocol"] == "paper" and r["method"] == "bif" and (r["alpha"], r["alpha_attribution"]) == (0.1, 0.1)
        and r["task"] == "cifar10" and r["scores"] == "raw"
    ]  # fmt: skip
    frame = loaded.rows.query(
        "task == 'cifar10' and protocol == 'paper' and method == 'bif' and alpha == 0.1 and alpha_attribution == 0.1"
    )
    frame = frame[~frame["normalised"].astype(bool)]
    assert row["seeds"] == 2
    assert row["lds"] == pytest.approx(frame["lds"].mean())
    assert row["runs"] == ["paper0000001"]
    assert (row["low"], row["high"]) == pytest.approx((frame["ci_low"].min(), frame["ci_high"].max()))
    assert row["bar"] == "lowest to highest end of the 2 seeds' 95 % intervals"


def test_figures_that_do_not_fit_are_linked(results: Path, tmp_path: Path) -> None:
    blocks = report.figure_blocks(results / "figures", tmp_path, 30_000, set(), [])
    assert "Too large for this page" in blocks
    assert len(blocks) < 60_000


def test_scripts_in_a_drawing_do_not_survive() -> None:
    text, _ = report.inline_svg('<svg width="1pt"><script>alert(1)</script><g id="a" onclick="b()"/></svg>', "f0-")
    assert "script" not in text
    assert "onclick" not in text
    assert 'id="f0-a"' in text


def test_without_results_it_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    assert report.main(["--results", str(tmp_path / "results")]) == 0
    text = (tmp_path / "results" / "report" / "index.html").read_text()
    assert report.FIRST_COMMAND in text
    assert "No figures yet" in text


@needs_browser
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_it_opens_at_any_width_and_theme(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.look(width, 850, theme)
    browser.open(page)
    assert browser.console() == []
    # Nothing sticks out of the page, no figure is empty, and no two figures or cards overlap.
    assert browser.run("return document.documentElement.scrollWidth") == width
    facts = browser.run("""
        const all = (selector) => [...document.querySelectorAll(selector)];
        const boxes = all("figure, .card, details, #table").map((e) => e.getBoundingClientRect());
        const shared = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]) > 1;
        const overlap = (a, b) => shared(a, b, "left", "right") && shared(a, b, "top", "bottom");
        const overlaps = boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => overlap(a, b)));
        const hollow = (f) => !f.querySelector("svg path, img, td") || f.getBoundingClientRect().height < 80;
        return {overlaps: overlaps.length, figures: all("figure").length, rows: all("#table tbody tr").length,
                empty: all("figure").filter(hollow).length,
                ground: getComputedStyle(document.body).backgroundColor};
    """)
    assert facts["overlaps"] == 0
    assert facts["empty"] == 0
    assert facts["figures"] >= 8
    assert facts["rows"] == 10
    dark = sum(int(part) for part in re.findall(r"\d+", facts["ground"])) < 200
    assert dark == (theme == "dark")


@needs_browser
def test_sorting_and_filtering(browser: Browser, page: Path) -> None:
    browser.look(1280, 900, "light")
    browser.open(page)
    column = """const heads = [...document.querySelectorAll("#table th")];
        const at = heads.findIndex((th) => th.textContent.startsWith(arguments[0]));
        if (arguments[1]) heads[at].querySelector("button").click();
        return [...document.querySelectorAll("#table tbody tr")].map((tr) => tr.children[at].textContent);"""

    def values(title: str, click: bool = False) -> list[float]:
        return [float(text) for text in browser.run(column, title, click)]

    assert values("LDS") == sorted(values("LDS"), reverse=True)
    browser.run(column, "LDS", True)
    assert values("LDS") == sorted(values("LDS"))
    browser.run(column, "Method", True)
    names = browser.run(column, "Method", False)
    assert names == sorted(names, key=str.lower)
    choose = """const select = document.querySelector(`#filters select[name="${arguments[0]}"]`);
        select.value = arguments[1]; select.dispatchEvent(new Event("change"));
        return document.querySelectorAll("#table tbody tr").length;"""
    assert browser.run(choose, "scores", "raw") == 5
    assert browser.run(choose, "alpha", "") == 10
    assert browser.run(choose, "protocol", "scratch") == 5
    assert browser.run(choose, "task", "pythia14m") == 5
    assert browser.console() == []


@needs_browser
def test_every_interval_says_what_it_is_and_no_column_is_cut_off(browser: Browser, page: Path) -> None:
    browser.look(1200, 900, "light")
    browser.open(page)
    kinds = """const select = document.querySelector('#filters select[name="protocol"]');
        select.value = arguments[0]; select.dispatchEvent(new Event("change"));
        const box = document.querySelector("#board .scroll");
        const said = [...document.querySelectorAll("#table td small")].map((small) => small.textContent);
        return [box.scrollWidth <= box.clientWidth, ...[...new Set(said)].sort()];"""
    assert browser.run(kinds, "paper") == [True, "95 %, span of 2 seeds"]
    assert browser.run(kinds, "scratch") == [True, "95 % interval"]
    assert browser.run(kinds, "") == [True, "95 % interval", "95 %, span of 2 seeds"]


@needs_browser
def test_numbers_link_to_their_run(browser: Browser, page: Path, results: Path) -> None:
    browser.open(page)
    missing = browser.run("""return [...document.querySelectorAll('a[href^="#run-"]')]
        .filter((a) => !document.getElementById(a.getAttribute("href").slice(1))).length""")
    assert missing == 0
    opened = browser.run("""const link = document.querySelector("#table tbody a"); link.click();
        const target = document.getElementById(link.hash.slice(1));
        dispatchEvent(new HashChangeEvent("hashchange"));
        const text = target.querySelector("pre").textContent;
        return [target.open, target.querySelector("p a").getAttribute("href"), text.length > 100];""")
    assert opened[0] is True
    assert opened[2] is True
    assert (page.parent / opened[1]).resolve().is_file()
    assert browser.console() == []


@needs_browser
def test_a_query_shows_its_images_and_tokens(browser: Browser, page: Path) -> None:
    browser.open(page)
    seen = browser.run("""const buttons = document.querySelectorAll("#explorer button.tile");
        const title = () => document.querySelector("#explorer .card h4").textContent;
        const before = title();
        buttons[1].dispatchEvent(new MouseEvent("mouseenter"));
        return [buttons.length, before, title(), document.querySelectorAll("#explorer span.tile").length];""")
    assert seen == [2, "BIF: query 0, class 0", "BIF: query 1, class 1", 8]
    tokens = browser.run("""const [left, right] = document.querySelectorAll("#explorer .tokens");
        left.children[1].dispatchEvent(new MouseEvent("mouseenter"));
        return [right.textContent, right.children[1].style.background, left.children[1].className];""")
    assert tokens[0] == "</script>d"
    assert "0, 114, 178" in tokens[1]
    assert tokens[2] == "on"


@needs_browser
def test_the_theme_can_be_switched(browser: Browser, page: Path) -> None:
    browser.look(1280, 900, "light")
    browser.open(page)
    switch = """document.getElementById("theme").click();
        return [document.documentElement.dataset.theme, document.getElementById("theme").textContent];"""
    assert browser.run(switch) == ["dark", "Light"]
    assert browser.run(switch) == ["light", "Dark"]
