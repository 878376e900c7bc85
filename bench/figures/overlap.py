"""How often two methods name the same training images: `python -m bench.figures --only overlap`.

For the paper's fig:image-main, which shows such cases: the share of images that two methods both name among so many, on
average over all queries, beside what two would share by chance. A figure for each task and seed, raw and
train-normalised scores beside each other.
"""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from matplotlib.axes import Axes

from bench.figures.drawing import Drawing, frame, logarithmic, panel_row
from bench.figures.examples import example_settings, example_task, image_examples_of, label_words
from bench.identity import canonical, file_slug
from bench.publish.plots.style import INK, PaperSize
from bench.records import Results

SIDE_WORDS = {"helpful": "lower the loss most", "harmful": "raise the loss most"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b4ea2", "#8c6d31", "#3b3f46", "#7f7f7f")
MARKS = "osD^vPph8dX*"


def draw_overlap(results: Results, size: PaperSize) -> Iterator[Drawing]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for _, content in image_examples_of(results):
        if content.get("agreement"):
            same = [content.get("task"), content.get("protocol"), content["seed"], content.get("alpha_attribution")]
            groups.setdefault(canonical([*same, content["description"], content.get("num_train")]), []).append(content)
    for found in groups.values():
        kinds = {content["scores"]: content for content in found}
        yield _overlap_figure([kinds[kind] for kind in sorted(kinds)], size)


def _overlap_figure(contents: list[dict[str, Any]], size: PaperSize) -> Drawing:
    first = contents[0]
    labels = list(dict.fromkeys(label for content in contents for label in content["methods"]))
    pairs = list(combinations(labels, 2))
    figure, axes = panel_row(2 * len(contents), size, height=2.1)
    panels = [(content, side) for content in contents for side in SIDE_WORDS]
    for axis, (content, side) in zip(axes, panels, strict=True):
        _overlap_panel(axis, content, side, pairs)
        axis.set_title(f"{content['scores']} scores\n{SIDE_WORDS[side]}")
        axis.set_xlabel("images named")
    axes[0].set_ylabel("share that both name")
    title = f"{first['description']}: how often two methods name the same images"
    about = [example_task(first), f"seed {first['seed']}"]
    if "alpha_attribution" in first:
        about.append(f"alpha_attribution {first['alpha_attribution']:g}")
    sizes = f"n: {first.get('num_queries', 0):,} queries, {first.get('num_train', 0):,} training images."
    notes = [f"Mean over queries; bars: two standard errors. {sizes}", *_settings(contents)]
    frame(figure, size, title, about, filter(None, notes), axes)
    caption = f"{title}; {', '.join(about)}. {' '.join(filter(None, notes))}"
    task = first.get("task") or first["description"]
    facts = {"task": [task], "method": labels, "scores": [content["scores"] for content in contents]}
    return Drawing(f"overlap-{file_slug(task)}-seed-{first['seed']}", title, caption, [], figure, facts=facts)


def _settings(contents: list[dict[str, Any]]) -> list[str]:
    """Once where both kinds of scores have the same, else of each."""
    texts = {content["scores"]: example_settings(content) for content in contents}
    if len(set(texts.values())) == 1:
        return [next(iter(texts.values()))]
    return [text.replace("Settings.", f"Settings, {kind} scores.", 1) for kind, text in texts.items() if text]


def _overlap_panel(axis: Axes, content: dict[str, Any], side: str, pairs: list[tuple[str, str]]) -> None:
    here = [one for one in content["agreement"] if one["side"] == side]
    for position, (one, other) in enumerate(pairs):
        mine = sorted(
            (found for found in here if {found["one"], found["other"]} == {one, other}), key=lambda row: row["named"]
        )
        if mine:
            shape: dict[str, Any] = {"color": COLOURS[position % len(COLOURS)], "marker": MARKS[position % len(MARKS)]}
            bars = [2 * (found["error"] or 0.0) for found in mine]
            axis.errorbar(
                [found["named"] for found in mine], [found["shared"] for found in mine], yerr=bars, capsize=1.5,
                elinewidth=0.8, label=f"{label_words(one)} and {label_words(other)}", **shape,
            )  # fmt: skip
    chance = {found["named"]: found["chance"] for found in here}
    axis.plot(list(chance), list(chance.values()), color=INK, linewidth=0.8, linestyle="--", label="chance")
    logarithmic(axis, "x", sorted(chance))
    axis.set_ylim(-0.03, 1.03)
