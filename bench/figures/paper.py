"""Every figure and table of the paper, appendix included: which of ours it is, the record behind it and the command.

`tda-bench publish numbers` writes `reproduce_table` into results/README.md. Where ours is on another task, or none
is drawn yet, the table says so; what has no counterpart at all has its reason.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.figures.drawing import Kind
from bench.figures.kinds import KINDS

LANGUAGE = "--task pythia14m --model DIR --text FILE --eval-text FILE"
SWEPT_GRID = "burn_in=0,100 n_beta=100,300,1000,3000 gamma=1000,3000,10000,30000,100000"
TOKEN_EXAMPLES = (
    f"python -m bench.inspect examples {LANGUAGE} --set pythia14m.length=160 --out results/pythia14m/examples"
)
NO_LARGE_MODEL = "at 14 M parameters: the 2.8 B weights have not been run token by token"


def image_sweep(alpha: str) -> str:
    return (
        f"python -m bench.tune sweep --task cifar10 --data-dir DIR --alpha {alpha} --alpha-attribution 0.1 "
        f"--grid {SWEPT_GRID} --out results/cifar10/sweep-alpha-{alpha}"
    )


class PaperItem(NamedTuple):
    """One figure or table of the paper."""

    label: str
    shows: str
    ours: str  # which drawings, as a pattern of their names; "" where there is no counterpart
    why: str = ""  # why there is none, or in what ours differs
    command: str = ""  # that makes the record; the kind's own where it is empty


PAPER: tuple[PaperItem, ...] = (
    PaperItem("fig:intro", "the idea of the BIF, drawn", "", "an illustration without data"),
    PaperItem(
        "fig:lang-main",
        "per-token BIF, strongest pairs, Pythia-2.8B",
        r"tokens-pythia14m-.*",
        NO_LARGE_MODEL,
        TOKEN_EXAMPLES,
    ),
    PaperItem(
        "fig:image-main",
        "influential images, Inception-v1 on ImageNet",
        r"examples-(?!digits).*",
        "on CIFAR-10 instead of ImageNet, with TRAK beside BIF and EK-FAC",
        "python -m bench.inspect examples --task cifar10 --data-dir DIR --out results/cifar10/examples",
    ),
    PaperItem("tab:bif-vs-ekfac", "costs of BIF and EK-FAC in theory", r"scaling-.*", "measured against these orders"),
    PaperItem("fig:retraining", "LDS of four methods on CIFAR-10", r"lds-cifar10-(?!.*normalised).*"),
    PaperItem("fig:benchmark_big_ek-fac", "seconds and memory across the Pythia suite", r"scaling-.*"),
    PaperItem("tab:method-comparison", "properties of methods", "", "words, no numbers"),
    PaperItem("alg:sgld", "the sampler", "", "is `baselines/bif/sampler.py`"),
    PaperItem(
        "tab:bif_hyperparam_summary",
        "settings of BIF",
        "",
        "every record holds its own, and every figure says them; `--settings paper` takes the paper's",
    ),
    PaperItem("tab:training_hyperparameters", "settings of training", "", "every record holds its task's settings"),
    PaperItem("fig:timings_bif-vs-ekfac", "seconds against alpha_attribution", r"seconds-cifar10-.*"),
    PaperItem(
        "fig:individual_LDS_scores",
        "LDS seed by seed: 1, 2, 3 (`fig:lds_seed1`, `2`, `3`)",
        r"seeds-cifar10-(?!.*normalised).*",
    ),
    PaperItem(
        "fig:individual_LDS_scores_2",
        "LDS seed by seed: 4, 42 (`fig:lds_seed4`, `42`)",
        r"seeds-cifar10-(?!.*normalised).*",
    ),
    PaperItem(
        "tab:LLM_LDS_scores",
        "LDS of finetuning Pythia-14M",
        r"llm-pythia14m-.*",
        "on a stand-in, not EleutherAI's weights",
        f"python -m bench.lds {LANGUAGE} --alpha 0.5 --out results/pythia14m",
    ),
    PaperItem(
        "fig:loss_trace_burnin_0_retrain_0_1", "loss traces and LDS of 20 settings, alpha 0.1, burn-in 0",
        r"sweep-cifar10-.*-alpha-0-1-burn-in-0", "", image_sweep("0.1"),
    ),
    PaperItem(
        "fig:loss_trace_burnin_100_retrain_0_1", "the same, burn-in 100", r"sweep-cifar10-.*-alpha-0-1-burn-in-100", "",
        image_sweep("0.1"),
    ),
    PaperItem(
        "fig:loss_trace_burnin_0_retrain_0_3", "the same, alpha 0.3, burn-in 0",
        r"sweep-cifar10-.*-alpha-0-3-burn-in-0", "", image_sweep("0.3"),
    ),
    PaperItem(
        "fig:loss_trace_burnin_100_retrain_0_3", "the same, alpha 0.3, burn-in 100",
        r"sweep-cifar10-.*-alpha-0-3-burn-in-100", "", image_sweep("0.3"),
    ),
    PaperItem(
        "fig:absolute_difference_LDS_sweep", "LDS under two settings, and their difference",
        r"difference-cifar10-.*-bif.*", "signed, with its interval",
    ),
    PaperItem(
        "fig:lds_llm_sweep", "loss traces and LDS in the language setup", r"sweep-pythia14m-.*", "",
        f"python -m bench.tune sweep {LANGUAGE} --alpha 0.5 --set bif.chains=4 --set bif.minibatch=128 "
        "--set bif.draws=300 --set bif.burn_in=150 --grid n_beta=100,800,3000 gamma=5000,50000,500000 "
        "--out results/pythia14m/sweep",
    ),
    PaperItem(
        "fig:image-full", "influential images, more of them", r"examples-(?!digits).*",
        "on CIFAR-10 instead of ImageNet",
        "python -m bench.inspect examples --task cifar10 --data-dir DIR --show 20 --out results/cifar10/examples",
    ),
    PaperItem(
        "fig:ekfac_vs_bif_grid", "samples that EK-FAC names, token by token", r"tokens-pythia14m-.*", NO_LARGE_MODEL,
        TOKEN_EXAMPLES,
    ),
    PaperItem(
        "fig:bif_tokenwise_grid", "samples that BIF names, token by token", r"tokens-pythia14m-.*", NO_LARGE_MODEL,
        TOKEN_EXAMPLES,
    ),
    PaperItem("fig:p2.8B", "per-token BIF, Pythia-2.8B", r"tokens-pythia14m-.*", NO_LARGE_MODEL, TOKEN_EXAMPLES),
    PaperItem("fig:p14M-1", "per-token BIF, Pythia-14M", r"tokens-pythia14m-.*", "on a stand-in", TOKEN_EXAMPLES),
    PaperItem("fig:p14M-2", "per-token BIF, Pythia-14M", r"tokens-pythia14m-.*", "on a stand-in", TOKEN_EXAMPLES),
)  # fmt: skip


def reproduce_table(
    index: Mapping[str, Mapping[str, Any]] | None = None,
    folder: str = "figures",
    records: Mapping[str, str] | None = None,
) -> str:
    """Markdown: every figure and table of the paper, ours, the records behind it, and the commands that make it.

    `index`: what figures.json holds; `records`: run id -> address of its record. Where none of ours is on the paper's
    own task, the nearest of its kind stands there and says so.
    """
    lines = ["| paper | shows | here | record | command |", "| --- | --- | --- | --- | --- |"]
    drawn = dict(sorted((index or {}).items()))
    by_label = {label: kind for kind in KINDS for label in kind.paper}
    for item in PAPER:
        kind = by_label.get(item.label)
        if kind is None:
            lines.append(_line(f"`{item.label}`", item.shows, f"none: {item.why}", "-", "-"))
            continue
        found = {stem: entry for stem, entry in drawn.items() if re.fullmatch(item.ours, stem)}
        nearest = {stem: entry for stem, entry in drawn.items() if entry["kind"] == kind.name}
        before = "" if found or not nearest else "not on the paper's task yet; nearest: "
        made = _made(kind, found or nearest, before, folder, records or {}, item.command)
        here = f"{made[0]}<br>({item.why})" if item.why and found else made[0]
        lines.append(_line(f"`{item.label}`", item.shows, here, *made[1:]))
    for kind in KINDS:
        if not kind.paper:
            mine = {stem: entry for stem, entry in drawn.items() if entry["kind"] == kind.name}
            lines.append(_line("ours", kind.shows, *_made(kind, mine, "", folder, records or {})))
    return "\n".join(lines) + "\n"


def _made(
    kind: Kind,
    found: Mapping[str, Mapping[str, Any]],
    before: str,
    folder: str,
    records: Mapping[str, str],
    command: str = "",
) -> tuple[str, str, str]:
    links = [f"[{stem}]({folder}/{preferred(entry['files'])})" for stem, entry in found.items()]
    runs = sorted({run for entry in found.values() for run in entry["runs"]})
    behind = ", ".join(f"[`{run}`]({records[run]})" if run in records else f"`{run}`" for run in runs)
    return (
        before + "<br>".join(links) if links else f"not yet: needs {kind.needs}",
        behind or (f"`{kind.needs.partition(' ')[0]}`" if links else "-"),
        f"`{command or kind.command.partition('    #')[0]}`<br>`python -m bench.figures --only {kind.name}`",
    )


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def preferred(files: Sequence[str]) -> str:
    """Of a drawing's files the one that a page of Markdown can show."""
    return next((file for ending in (".png", ".svg", ".md") for file in files if file.endswith(ending)), files[0])
