"""Every kind of figure there is, and the table that says which of the paper's figures each one is.

A new kind is a file beside this one with a `draw_...(results, size)` that yields drawings, and a line here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures.agreement import draw_agreement
from bench.figures.budget import draw_budget
from bench.figures.difference import draw_difference
from bench.figures.drawing import Kind
from bench.figures.examples import draw_examples
from bench.figures.lds import draw_lds, draw_lds_normalised
from bench.figures.limit import draw_limit
from bench.figures.pareto import draw_pareto
from bench.figures.retraining import draw_retraining
from bench.figures.scaling import draw_scaling
from bench.figures.seconds import draw_seconds
from bench.figures.seeds import draw_seeds
from bench.figures.sweep import draw_sweep
from bench.figures.table import draw_llm, draw_table
from bench.figures.tokens import draw_tokens

CIFAR = (
    "python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --alpha-attribution 0.01 0.1 1.0 --seeds 1 2 3 4 42 "
    "--out results/cifar10"
)
RECORDS = "rows of bench.lds"
KINDS = (
    Kind(
        "lds",
        "LDS against alpha_retrain, a panel for each alpha_attribution",
        RECORDS,
        f"{CIFAR}    # or, on a laptop: python -m bench.lds --alpha 0.1 --out results/digits",
        draw_lds,
        ("fig:retraining",),
    ),
    Kind("lds-normalised", "the same for train-normalised scores", RECORDS, CIFAR, draw_lds_normalised),
    Kind(
        "seeds",
        "every seed by itself",
        "rows of two seeds or more",
        CIFAR,
        draw_seeds,
        ("fig:individual_LDS_scores", "fig:individual_LDS_scores_2"),
    ),
    Kind(
        "difference",
        "two settings of one method, and their paired difference",
        "rows of one method under two settings, in one run",
        "python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --methods bif bif@n_beta=200 --out results/cifar10",
        draw_difference,
        ("fig:absolute_difference_LDS_sweep",),
    ),
    Kind("table", "LDS of every method as CSV, Markdown and LaTeX", RECORDS, CIFAR, draw_table),
    Kind(
        "llm",
        "the same table for finetuned language models",
        "rows of a language task",
        "python -m bench.lds --task tinylm --alpha 0.5 --out results/tinylm",
        draw_llm,
        ("tab:LLM_LDS_scores",),
    ),
    Kind(
        "seconds",
        "seconds against alpha_attribution, fit and score apart, a figure for each machine",
        "rows at two values of alpha_attribution or more, from one machine",
        CIFAR,
        draw_seconds,
        ("fig:timings_bif-vs-ekfac",),
    ),
    Kind("pareto", "LDS against seconds, and what no other method beats on both", RECORDS, CIFAR, draw_pareto),
    Kind(
        "retraining",
        "LDS against seconds, retraining included: the datamodel with every prior, and the other methods",
        "rows of datamodel",
        "python -m bench.lds --experiment results/digits/datamodel.toml --out results/digits/datamodel",
        draw_retraining,
    ),
    Kind(
        "scaling",
        "seconds, memory and disk against model size",
        "scaling.csv",
        "python -m bench.scaling --out results/scaling    # on a CPU it takes the two smallest models",
        draw_scaling,
        ("fig:benchmark_big_ek-fac", "tab:bif-vs-ekfac"),
    ),
    Kind(
        "sweep",
        "grids of loss traces and LDS over sampler settings",
        "sweep.json",
        "python -m bench.sweep --task cifar10 --alpha 0.1 --out results/sweep",
        draw_sweep,
        (
            "fig:loss_trace_burnin_0_retrain_0_1",
            "fig:loss_trace_burnin_100_retrain_0_1",
            "fig:loss_trace_burnin_0_retrain_0_3",
            "fig:loss_trace_burnin_100_retrain_0_3",
            "fig:lds_llm_sweep",
        ),
    ),
    Kind(
        "budget",
        "LDS against draws and seconds",
        "budget.json",
        "python -m bench.sweep --budget --task cifar10 --alpha 0.1 --out results/budget",
        draw_budget,
    ),
    Kind(
        "limit",
        "BIF approaching the damped influence function, against draws and n_beta, with the theory's slopes",
        "limit.json",
        "python -m bench.limit --out results/limit",
        draw_limit,
    ),
    Kind(
        "examples",
        "queries and their most and least influential training images",
        "examples.json of an image task",
        "python -m bench.examples --task cifar10 --out results/examples    # from the scores that bench.lds cached",
        draw_examples,
        ("fig:image-main", "fig:image-full"),
    ),
    Kind(
        "agreement",
        "how often two methods name the same training images",
        "examples.json of an image task",
        "python -m bench.examples --task cifar10 --out results/examples",
        draw_agreement,
    ),
    Kind(
        "tokens",
        "query tokens against training tokens",
        "examples.json of a language task",
        "python -m bench.examples --task pythia14m --model DIR --text FILE --out results/examples",
        draw_tokens,
        ("fig:lang-main", "fig:p2.8B", "fig:p14M-1", "fig:p14M-2", "fig:ekfac_vs_bif_grid", "fig:bif_tokenwise_grid"),
    ),
)


# Every figure and table of the paper, in its order: (label, what it is, which of our drawings, or why there is none).
PAPER: tuple[tuple[str, str, str], ...] = (
    ("fig:intro", "the idea of the BIF, drawn", "an illustration without data"),
    ("fig:lang-main", "per-token BIF, strongest pairs", r"tokens-.*"),
    ("fig:image-main", "influential images", r"examples-.*"),
    ("tab:bif-vs-ekfac", "costs of BIF and EK-FAC in theory", r"scaling-.*"),
    ("fig:retraining", "LDS of four methods on CIFAR-10", r"lds-cifar10-(?!.*normalised).*"),
    ("fig:benchmark_big_ek-fac", "seconds and memory across the Pythia suite", r"scaling-.*"),
    ("tab:method-comparison", "properties of methods", "no numbers"),
    ("alg:sgld", "the sampler", "is `baselines/bif`"),
    (
        "tab:bif_hyperparam_summary",
        "settings of BIF",
        "every record holds its own; `--settings paper` takes these",
    ),
    ("tab:training_hyperparameters", "settings of training", "every record holds its task's settings"),
    ("fig:timings_bif-vs-ekfac", "seconds against alpha_attribution", r"seconds-cifar10-.*"),
    ("fig:individual_LDS_scores", "LDS seed by seed: 1, 2, 3", r"seeds-cifar10-(?!.*normalised).*"),
    ("fig:individual_LDS_scores_2", "LDS seed by seed: 4, 42", r"seeds-cifar10-(?!.*normalised).*"),
    ("tab:LLM_LDS_scores", "LDS of finetuning Pythia-14M", r"llm-pythia14m-.*"),
    ("fig:loss_trace_burnin_0_retrain_0_1", "loss traces, alpha 0.1", r"sweep-cifar10-.*-alpha-0-1-burn-in-0"),
    ("fig:loss_trace_burnin_100_retrain_0_1", "the same, burn-in 100", r"sweep-cifar10-.*-alpha-0-1-burn-in-100"),
    ("fig:loss_trace_burnin_0_retrain_0_3", "loss traces, alpha 0.3", r"sweep-cifar10-.*-alpha-0-3-burn-in-0"),
    ("fig:loss_trace_burnin_100_retrain_0_3", "the same, burn-in 100", r"sweep-cifar10-.*-alpha-0-3-burn-in-100"),
    ("fig:absolute_difference_LDS_sweep", "LDS under two settings, and their difference", r"difference-cifar10-.*"),
    ("fig:lds_llm_sweep", "loss traces in the language setup", r"sweep-pythia14m-.*"),
    ("fig:image-full", "influential images, more of them", r"examples-.*"),
    ("fig:ekfac_vs_bif_grid", "the samples that EK-FAC and BIF name", r"tokens-.*"),
    ("fig:bif_tokenwise_grid", "the samples that BIF names, token by token", r"tokens-.*"),
    ("fig:p2.8B", "per-token BIF, Pythia-2.8B", r"tokens-.*"),
    ("fig:p14M-1", "per-token BIF, Pythia-14M", r"tokens-pythia14m-.*"),
    ("fig:p14M-2", "per-token BIF, Pythia-14M", r"tokens-pythia14m-.*"),
)


def reproduce_table(index: Mapping[str, Mapping[str, Any]] | None = None, folder: str = "figures") -> str:
    """Markdown: every figure and table of the paper, ours, the runs behind it, and the commands that make it.

    `index`: what figures.json holds. Where none of ours is on the paper's own task, the nearest of its kind stands
    there and says so.
    """
    lines = ["| paper | shows | here | runs | the whole of it |", "| --- | --- | --- | --- | --- |"]
    drawn = dict(sorted((index or {}).items()))
    by_label = {label: kind for kind in KINDS for label in kind.paper}
    for label, shows, ours in PAPER:
        kind = by_label.get(label)
        if kind is None:
            lines.append(_line(f"`{label}`", shows, ours, "-", "-"))
        else:
            found = {stem: entry for stem, entry in drawn.items() if re.fullmatch(ours, stem)}
            nearest = {stem: entry for stem, entry in drawn.items() if entry["kind"] == kind.name}
            before = "" if found or not nearest else "not on the paper's task yet; nearest: "
            lines.append(_line(f"`{label}`", shows, *_made(kind, found or nearest, before, folder)))
    for kind in KINDS:
        if not kind.paper:
            mine = {stem: entry for stem, entry in drawn.items() if entry["kind"] == kind.name}
            lines.append(_line("ours", kind.shows, *_made(kind, mine, "", folder)))
    return "\n".join(lines) + "\n"


def _made(kind: Kind, found: Mapping[str, Mapping[str, Any]], before: str, folder: str) -> tuple[str, str, str]:
    links = [f"[{stem}]({folder}/{preferred(entry['files'])})" for stem, entry in found.items()]
    runs = sorted({run for entry in found.values() for run in entry["runs"]})
    return (
        before + "<br>".join(links) if links else f"not yet: needs {kind.needs}",
        ", ".join(f"`{run}`" for run in runs) or "-",
        f"`{kind.command.partition('    #')[0]}`<br>`python -m bench.figures --only {kind.name}`",
    )


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def preferred(files: Sequence[str]) -> str:
    """Of a drawing's files the one that a page of Markdown can show."""
    return next((file for ending in (".png", ".svg", ".md") for file in files if file.endswith(ending)), files[0])
