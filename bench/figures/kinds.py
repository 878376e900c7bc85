"""Every kind of figure there is.

A new kind is a file beside this one with a `draw_...(results, size)` that yields drawings, and a line here; `paper`
beside it says which of the paper's figures are which of ours.
"""

from bench.figures.agreement import draw_agreement
from bench.figures.budget import draw_budget
from bench.figures.difference import draw_difference
from bench.figures.drawing import Kind
from bench.figures.ensembles import draw_ensembles
from bench.figures.examples import draw_examples
from bench.figures.lds import draw_lds, draw_lds_normalised
from bench.figures.limit import draw_limit
from bench.figures.overlap import draw_overlap
from bench.figures.pareto import draw_pareto
from bench.figures.removal import draw_removal
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
        "ensembles",
        "LDS against the number of base models that scores are averaged over, and against seconds",
        "rows of bench.lds --checkpoints",
        "python -m bench.lds --task digits --alpha 0.1 --checkpoints 1 2 4 8 --out results/digits/checkpoints",
        draw_ensembles,
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
        "python -m bench.tune sweep --task cifar10 --alpha 0.1 --out results/sweep",
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
        "python -m bench.tune budget --task cifar10 --alpha 0.1 --out results/budget",
        draw_budget,
    ),
    Kind(
        "agreement",
        "Spearman and top overlap of every two methods' scores",
        "answers.json of bench.evaluations agreement",
        "python -m bench.evaluations agreement --task digits --out results/digits/agreement",
        draw_agreement,
    ),
    Kind(
        "removal",
        "the change of a query's loss without its most helpful examples, against how many are left out",
        "answers.json of bench.evaluations removal",
        "python -m bench.evaluations removal --task digits --out results/digits/removal",
        draw_removal,
    ),
    Kind(
        "limit",
        "BIF approaching the damped influence function, against draws and n_beta, with the theory's slopes",
        "limit.json",
        "python -m bench.evaluations limit --out results/limit",
        draw_limit,
    ),
    Kind(
        "examples",
        "queries and their most and least influential training images",
        "examples.json of an image task",
        "python -m bench.inspect examples --task cifar10 --out results/examples  # from the scores of bench.lds",
        draw_examples,
        ("fig:image-main", "fig:image-full"),
    ),
    Kind(
        "overlap",
        "how often two methods name the same training images",
        "examples.json of an image task",
        "python -m bench.inspect examples --task cifar10 --out results/examples",
        draw_overlap,
    ),
    Kind(
        "tokens",
        "query tokens against training tokens",
        "examples.json of a language task",
        "python -m bench.inspect examples --task pythia14m --model DIR --text FILE --out results/examples",
        draw_tokens,
        ("fig:lang-main", "fig:p2.8B", "fig:p14M-1", "fig:p14M-2", "fig:ekfac_vs_bif_grid", "fig:bif_tokenwise_grid"),
    ),
)
