"""The report page in a real headless Chromium: it sorts, filters, plots, follows links, and complains of nothing."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest

from bench import report
from bench.pages.assemble import HERE, filled, inert_json, script_elements
from bench.pages.cards import Cards
from bench.pages.data import about_method, leaderboard, paired_differences, scaling_points
from bench.pages.ranks import ranked_boards
from bench.publish.__main__ import main as publish
from bench.publish.leaderboard import rows as ranked_rows
from bench.records import load_results
from tests.helpers.browser import Browser, needs_browser
from tests.helpers.synthetic_results import write_examples, write_run, write_scaling, write_sweep

CLAIMS = """# Claims

| claim | here |
| --- | --- |
| [BIF is fast](#1-bif-is-fast) | *yes* |

## 1. BIF is fast

| seconds |
| --- |
| 3 |
"""
ANSWERS = """# Results

| question | answer | figure |
| --- | --- | --- |
| Who is best? | EK-FAC | [LDS](figures/lds-cifar10-paper.png), [all](cifar10/README.md) |
"""


def draw(words: Sequence[str]) -> int:
    return publish(["figures", *words])


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
    write_scaling(folder / "scaling")
    (folder / "reproduction.md").write_text(CLAIMS)
    (folder / "README.md").write_text(ANSWERS)
    kinds = ["lds", "cost", "seconds", "examples", "tokens", "sweep"]
    assert draw(["--results", str(folder), "--only", *kinds]) == 0
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


# ---- what is written ----


def test_the_page_is_small_needs_no_network_and_is_the_same_twice(page: Path, results: Path) -> None:
    text = page.read_text()
    assert len(text.encode()) < 5_000_000
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "@import" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert "script-src 'sha256-" in policy[1]
    assert "'unsafe-inline'" not in policy[1].partition("script-src")[2].partition(";")[0]
    before = page.read_bytes()
    assert report.main(["--results", str(results)]) == 0
    assert page.read_bytes() == before


def test_the_leaderboard_is_the_rows_over_seeds(results: Path) -> None:
    loaded = load_results(results)
    ranked = ranked_rows(loaded)
    rows = leaderboard(loaded, ranked)
    keys = ["ground", "truth", "series", "normalised", "alpha", "alpha_attribution"]
    assert len(rows) == len(loaded.rows.groupby(keys))
    wanted = {"ground": "cifar10-paper", "method": "bif", "alpha": 0.1, "alpha_attribution": 0.1, "scores": "raw"}
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    frame = loaded.rows.query(
        "ground == 'cifar10-paper' and method == 'bif' and alpha == 0.1 and alpha_attribution == 0.1 and not normalised"
    )
    assert row["seeds"] == 2
    assert row["lds"] == pytest.approx(frame["lds"].mean())
    assert row["runs"] == ["paper0000001"]
    assert (row["low"], row["high"]) == pytest.approx((frame["ci_low"].min(), frame["ci_high"].max()))
    assert row["bar"] == "lowest to highest end of the 2 seeds' 95 % intervals"
    assert row["ceiling"] == pytest.approx(frame["reliability"].mean() ** 0.5)
    assert {r["series"] for r in rows if r["rank"] == "1" and r["ground"] == "cifar10-paper"} == {"EK-FAC"}
    assert all(r["rank"] for r in rows)
    boards = ranked_boards(ranked)
    assert len({board["title"] for board in boards}) == len(boards) == 4
    for board in boards:
        assert {line["series"] for line in board["lines"]} == {"bif", "ekfac", "trak", "gradsim", "random"}
        ids = {column["column"] for column in board["columns"]}
        assert all(set(line["cells"]) == ids for line in board["lines"])
    assert len(paired_differences(loaded)) == 2 * 2 * 2 * 10 + 2 * 10 + 2 * 10


def test_lines_over_model_size_are_of_one_setting(tmp_path: Path) -> None:
    write_scaling(tmp_path / "scaling")
    table = pd.read_csv(tmp_path / "scaling" / "scaling.csv").assign(draws=2000.0)
    fitted = table[table["method"] == "ekfac"].assign(fit_examples=400, draws=float("nan"))
    more = fitted.assign(fit_examples=10_000)
    bif = table[table["method"] == "bif"]
    pd.concat([bif, fitted, more]).to_csv(tmp_path / "scaling" / "scaling.csv", index=False)
    points = scaling_points(load_results(tmp_path))
    series = {point["series"]: point["colour"] for point in points}
    assert set(series) == {"BIF, 2,000 draws", "EK-FAC, fitted on 400", "EK-FAC, fitted on 10,000"}
    assert len(set(series.values())) == 3
    for name in series:
        sizes = [point["parameters"] for point in points if point["series"] == name]
        assert len(set(sizes)) == len(sizes) == 4  # one point a model: no line goes back and forth


def test_figures_that_do_not_fit_are_linked(results: Path, tmp_path: Path) -> None:
    cards = Cards(results / "figures", tmp_path, 30_000, set(), []).read().cards
    text = "".join(card.markup for card in cards)
    assert "Too large for this page" in text
    assert len(text) < 60_000


def test_without_results_it_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    assert report.main(["--results", str(tmp_path / "results")]) == 0
    text = (tmp_path / "results" / "report" / "index.html").read_text()
    assert report.FIRST_COMMAND in text
    assert "No figures yet" in text
    assert "no <code>reproduction.md</code>" in text


def test_data_cannot_end_its_element_or_be_filled_again() -> None:
    text = inert_json({"a": "</script><!--\u2028&{{DATA}}", "b": float("nan")})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"a": "</script><!--\u2028&{{DATA}}", "b": None}
    assert filled("{{A}}{{B}}", {"A": "{{B}}", "B": "b"}) == "{{B}}b"
    with pytest.raises(ValueError, match="end its element"):
        script_elements(["const a = '</SCRIPT>';"])


def test_the_bundle_is_the_one_its_readme_names() -> None:
    readme = (HERE / "vendor" / "README.md").read_text()
    digest = hashlib.sha256((HERE / "vendor" / "vega.min.js").read_bytes()).hexdigest()
    assert f"sha256 {digest}" in readme
    licences = (HERE / "vendor" / "LICENSES.txt").read_text()
    for package in re.findall(r"(vega\S*)@([0-9.]+)", readme):
        assert " ".join(package) in licences


def test_a_method_is_told_by_its_own_file() -> None:
    assert "eigenvalue-corrected" in about_method("ekfac").lower()
    assert about_method("package.module:Class") == ""


# ---- in a browser ----


@needs_browser
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (420, "light"), (420, "dark")])
def test_it_opens_at_any_width_and_theme(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.look(width, 850, theme)
    browser.open(page)
    browser.wait("return document.querySelector('script[type=\"image/svg+xml\"]') === null")
    # Nothing sticks out of the page, every card has its title and content, and no two overlap.
    assert browser.run("return document.documentElement.scrollWidth") == width
    facts = browser.run("""
        const all = (selector) => [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
        all("details").forEach((one) => { if (!one.closest("#contents")) one.open = true; });
        const kinds = "figure, .card, #run-list > details, .data-table, .plot";
        const boxes = all(kinds).map((e) => e.getBoundingClientRect());
        const shared = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]) > 1;
        const overlap = (a, b) => shared(a, b, "left", "right") && shared(a, b, "top", "bottom");
        const shows = (f) => f.querySelector("svg path, img, td") || f.textContent.includes("as a figure: ");
        const overlaps = boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) => overlap(a, b)));
        return {overlaps: overlaps.length, figures: all("figure").length, rows: all("#board-table tbody tr").length,
                untitled: all("figure").filter((f) => !f.querySelector("h4").textContent.trim()).length,
                empty: all("figure").filter((f) => !shows(f)).length,
                headings: all("main > section > h2").map((h) => h.textContent),
                contents: all("#contents a").length, ground: getComputedStyle(document.body).backgroundColor};
    """)
    assert facts["overlaps"] == facts["empty"] == facts["untitled"] == 0
    assert facts["figures"] >= 8
    assert facts["rows"] == 10
    assert facts["headings"] == [
        "Summary", "Leaderboard", "Does the paper hold?", "Images per task", "Costs", "Methods", "Runs",
    ]  # fmt: skip
    assert width < 900 or facts["contents"] > 12
    dark = sum(int(part) for part in re.findall(r"\d+", facts["ground"])) < 200
    assert dark == (theme == "dark")
    assert browser.console() == []


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.look(1280, 900, "light")
    browser.open(page)
    return browser


COLUMN = """const heads = [...document.querySelectorAll("#board-table th")];
    const at = heads.findIndex((th) => th.textContent.startsWith(arguments[0]));
    if (arguments[1]) heads[at].querySelector("button").click();
    return [...document.querySelectorAll("#board-table tbody tr")].map((tr) => tr.children[at].textContent);"""
CHOOSE = """const select = document.querySelector(`${arguments[0]} select[name="${arguments[1]}"]`);
    select.value = arguments[2]; select.dispatchEvent(new Event("change"));
    return document.querySelectorAll("#board-table tbody tr").length;"""


@needs_browser
def test_sorting_and_choosing(opened: Browser) -> None:
    def values(title: str) -> list[float]:
        return [float(text) for text in opened.run(COLUMN, title, False)]

    assert values("LDS") == sorted(values("LDS"), reverse=True)
    opened.run(COLUMN, "LDS", True)
    assert values("LDS") == sorted(values("LDS"))
    assert opened.run(CHOOSE, "#filters", "scores", "raw") == 5
    assert opened.run(CHOOSE, "#experiment", "alpha", "") == 10
    assert opened.run(CHOOSE, "#filters", "method", "bif") == 2
    assert opened.run(CHOOSE, "#filters", "method", "") == 10
    assert opened.run(CHOOSE, "#filters", "protocol", "scratch") == 5
    assert opened.run(CHOOSE, "#filters", "task", "pythia14m") == 5
    opened.run("document.getElementById('reset').click()")
    assert opened.run("return document.getElementById('reset').hidden") is True
    assert opened.console() == []


@needs_browser
def test_filters_act_on_figures_methods_and_runs_too(opened: Browser) -> None:
    count = """const shown = (selector) => [...document.querySelectorAll(selector)].filter((one) => !one.hidden);
        return [shown("figure").length, shown("figure").map((one) => one.id), shown("#run-list details").length,
                shown("#method-list details").length, shown(".task-figures").length];"""
    everything = opened.run(count)
    opened.run(CHOOSE, "#filters", "task", "pythia14m")
    figures, names, runs, _, tasks = opened.run(count)
    assert 0 < figures < everything[0]
    assert all("pythia14m" in name or "scaling" in name for name in names)
    assert (runs, tasks) == (1, 1)
    opened.run(CHOOSE, "#filters", "scores", "raw")
    assert not any("normalised" in name for name in opened.run(count)[1])
    opened.run(CHOOSE, "#filters", "method", "ekfac")
    assert opened.run(count)[3] == 1
    assert opened.console() == []


@needs_browser
def test_every_interval_says_what_it_is_and_no_column_is_cut_off(opened: Browser) -> None:
    kinds = """const select = document.querySelector('#filters select[name="protocol"]');
        select.value = arguments[0]; select.dispatchEvent(new Event("change"));
        const box = document.querySelector("#board-table .scroll");
        const kinds = document.querySelectorAll("#board-table td small:not(.settings)");
        const said = [...kinds].map((small) => small.textContent);
        return [box.scrollWidth <= box.clientWidth, ...[...new Set(said)].sort()];"""
    assert opened.run(kinds, "paper") == [True, "95 %, span of 2 seeds"]
    assert opened.run(kinds, "scratch") == [True, "95 % interval"]


@needs_browser
def test_it_opens_in_less_than_a_second(browser: Browser, page: Path) -> None:
    """Of the page's own thread: other programs on this machine do not count."""
    browser.look(1280, 900, "light")
    browser.devtools("Performance.enable", timeDomain="threadTicks")
    browser.open(page)
    found = {one["name"]: one["value"] for one in browser.devtools("Performance.getMetrics")["metrics"]}
    browser.devtools("Performance.disable")
    assert 0 < found["TaskDuration"] < 1
    # The plots' library is not even compiled by then.
    assert browser.run("return document.getElementById('charts')?.type") == "text/plain"


@needs_browser
def test_ranks_stand_beside_values_and_follow_the_filters(opened: Browser) -> None:
    count = """return ["h4", "tbody tr", "thead th"].map((one) => document.querySelectorAll("#boards " + one).length)"""
    assert opened.run(count) == [4, 20, 4 * 3 + 4 + 4 + 2 + 2]
    cells = opened.run("""return [...document.querySelectorAll("#boards .data-table")[0].querySelectorAll("tbody tr")]
        .map((tr) => [...tr.children].slice(0, 2).map((td) => td.textContent))""")
    assert re.fullmatch(r"ekfac, 0\.\d{3} \(1\)", ", ".join(cells[0]))
    opened.run(CHOOSE, "#filters", "task", "pythia14m")
    opened.run(CHOOSE, "#filters", "scores", "raw")
    opened.run(CHOOSE, "#filters", "method", "bif")
    assert opened.run(count) == [1, 1, 4]
    assert opened.console() == []


@needs_browser
def test_answers_and_claims_lead_to_what_is_behind_them(opened: Browser) -> None:
    links = opened.run("""return [...document.querySelectorAll("#answers td a")].map((a) => a.getAttribute("href"))""")
    assert links == ["#figure-lds-cifar10-paper", "../cifar10/README.md"]
    assert opened.run("return document.querySelectorAll('#paper h3').length") == 0  # the section has its title
    seen = opened.run("""document.querySelector("#paper td a").click();
        dispatchEvent(new HashChangeEvent("hashchange"));
        const behind = document.getElementById("paper-1-bif-is-fast");
        return [behind.tagName, behind.open, behind.querySelector("td").textContent];""")
    assert seen == ["DETAILS", True, "3"]


@needs_browser
def test_numbers_link_to_their_run_and_its_settings(opened: Browser, page: Path) -> None:
    missing = opened.run("""return [...document.querySelectorAll('a[href^="#"]')]
        .filter((a) => a.hash.length > 1 && !document.getElementById(a.hash.slice(1))).map((a) => a.hash)""")
    assert missing == []
    seen = opened.run("""const link = document.querySelector("#board-table tbody a"); link.click();
        dispatchEvent(new HashChangeEvent("hashchange"));
        const target = document.getElementById(link.hash.slice(1));
        return target.open;""")
    assert seen is True
    opened.wait("return document.querySelector('#run-list details[open] pre') !== null")
    href, text, options = opened.run("""const target = document.querySelector("#run-list details[open]");
        return [target.querySelector("p a").getAttribute("href"), target.querySelector("pre").textContent.length,
                [...target.querySelectorAll("td:first-child")].map((td) => td.textContent)];""")
    assert (page.parent / href).resolve().is_file()
    assert text > 100
    assert options == ["version"]
    assert opened.console() == []


@needs_browser
def test_a_pair_shows_its_numbers(opened: Browser) -> None:
    seen = opened.run("""const rows = [...document.querySelectorAll("#pair-matrix tbody tr")];
        const names = rows.map((row) => row.querySelector("th").textContent);
        const button = rows[0].querySelectorAll("td")[1].querySelector("button");
        button.click();
        return [names, button.textContent, button.getAttribute("aria-pressed"),
                document.querySelector("#pair-detail").textContent];""")
    names, value, pressed, detail = seen
    assert names[0] == "EK-FAC"
    assert float(value) > 0
    assert pressed == "true"
    assert f"EK-FAC minus {names[1]}, raw scores" in detail
    assert "paper0000001" in detail
    assert "per seed" in detail


@needs_browser
def test_plots_are_drawn_by_vega_and_answer(opened: Browser) -> None:
    for place, least in (("#dots-plot", 10), ("#lds-plot", 20), ("#cost-plot", 10), ("#scaling-plot", 8)):
        opened.run("document.querySelector(arguments[0]).scrollIntoView()", place)
        opened.wait("return document.querySelector(arguments[0]).dataset.drawn === 'true'", place)
        marks = opened.run(
            "return document.querySelectorAll(arguments[0] + ' .mark-symbol.role-mark path').length", place
        )
        assert marks >= least, place
    opened.run("document.querySelector('#lds-plot').scrollIntoView()")
    said = opened.run("""const mark = document.querySelector("#lds-plot .mark-symbol.role-mark path");
        const box = mark.getBoundingClientRect();
        const where = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
        for (const kind of ["move", "over"]) {
          mark.dispatchEvent(new PointerEvent("pointer" + kind, where));
          mark.dispatchEvent(new MouseEvent("mouse" + kind, where));
        }
        return document.getElementById("tip").textContent;""")
    assert "LDS: " in said
    assert "method: " in said
    assert opened.console() == []


@needs_browser
def test_every_table_can_be_saved(opened: Browser) -> None:
    saved = opened.run("""const kept = [];
        URL.createObjectURL = (blob) => { kept.push(blob); return "#"; };
        const buttons = [...document.querySelectorAll("button.csv")];
        buttons.forEach((button) => button.click());
        const home = (table) => table.closest("figure, .data-table, #pair-matrix, #paper, #answers");
        const tables = [...document.querySelectorAll("table")];
        const everywhere = tables.every((table) => home(table).querySelector("button.csv"));
        return Promise.all(kept.map((blob) => blob.text())).then((texts) => [buttons.length, texts, everywhere]);""")
    count, texts, everywhere = saved
    assert everywhere is True
    assert count == len(texts) >= 5
    assert sum(text.startswith('Method,"LDS, alpha ') for text in texts) == 4
    (board,) = [text for text in texts if text.startswith("Method,Scores,LDS,From,To")]
    assert board.count("\r\n") == 11
    assert any(text.startswith("claim,here\r\nBIF is fast,yes") for text in texts)


@needs_browser
def test_it_can_be_used_by_keyboard(opened: Browser) -> None:
    reached = opened.run("""const seen = [];
        for (const one of document.querySelectorAll("a[href], button, select, summary, [tabindex='0']")) {
          if (!one.checkVisibility()) continue;
          one.focus();
          if (document.activeElement !== one) seen.push(one.outerHTML.slice(0, 80));
        }
        return seen;""")
    assert reached == []
    unnamed = opened.run("""return [...document.querySelectorAll("button, select")].filter((one) =>
        !(one.textContent.trim() || one.getAttribute("aria-label") || one.closest("label"))).length""")
    assert unnamed == 0


@needs_browser
def test_a_query_shows_its_images_and_tokens(opened: Browser) -> None:
    seen = opened.run("""const buttons = document.querySelectorAll("#images button.tile");
        const title = () => document.querySelector("#images .card h4").textContent;
        const before = title();
        buttons[1].dispatchEvent(new MouseEvent("mouseenter"));
        return [buttons.length, before, title(), document.querySelectorAll("#images span.tile").length];""")
    assert seen == [2, "BIF: query 0, class 0", "BIF: query 1, class 1", 8]
    tokens = opened.run("""const [left, right] = document.querySelectorAll("#images .tokens");
        left.children[1].dispatchEvent(new MouseEvent("mouseenter"));
        return [right.textContent, right.children[1].style.background, left.children[1].className];""")
    assert tokens[0] == "</script>d"
    assert "--above" in tokens[1]
    assert tokens[2] == "on"


@needs_browser
def test_the_theme_can_be_switched(opened: Browser) -> None:
    switch = """document.getElementById("theme").click();
        return [document.documentElement.dataset.theme, document.getElementById("theme").textContent];"""
    assert opened.run(switch) == ["dark", "Light"]
    assert opened.run(switch) == ["light", "Dark"]
