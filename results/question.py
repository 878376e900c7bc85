"""LDS within class, at the full model and at models like those that are asked about: the whole campaign of a task.

    python results/question.py --data-dir PIECES --out OUT       # CIFAR-10, every step, on one GPU
    python results/question.py tune-subset balanced-0.1 --task digits --out OUT  # some of them, of another task

Settings are tuned within class at each alpha and reference (seed 7, further queries and subsets) before five other
seeds are run. `--truth` retrains for the steps and scores nothing. A step that was interrupted goes on where it was.
While the GPU goes on, other processes make the records of what is finished, from the cache.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from campaign import execution_of, go_through, made, parsed, parser_of, record

if TYPE_CHECKING:
    from bench import Experiment

TUNED_SEED, SEEDS = 7, (1, 2, 3, 4, 42)
ALPHAS = (0.1, 0.3, 0.5, 0.7)
PAPER_BIF = "sampler=sgld,gradient=minibatch,chains=4,draws=100,burn_in=0,thinning=1,minibatch=1024,step_size=1e-5"
FULL = (
    "kfac",
    "kfac-library=kfac@damping=1e-8,layers=kronfluence",
    "trak",
    "trak-library=trak@ridge=0,projection=2048,checkpoints=1",
    "bif@draws=100",
    f"bif-paper=bif@{PAPER_BIF},n_beta=200,gamma=1e4",
    "gradsim",
    "repsim",
    "random",
)
SUBSET = tuple(f"{name}@reference=subset" for name in ("kfac", "gradsim", "trak"))
EIGHT = "kfac@reference=subset,models=8"
FEW = ("kfac", "gradsim", "random", *SUBSET, EIGHT)  # where each seed counts more than each method
# As tuned on raw scores; normalised ones were tuned to another sampler, which takes five steps a draw.
TUNED_BIF = "bif@reference=subset,sampler=sgld,burn_in=0,thinning=1,n_beta=0,gamma=1e4"
# Each tuned method beside its library's settings, with as many draws as the paper's for BIF; and subset models.
PAIRS = (*FULL[:7], "random", *SUBSET, EIGHT)
# CIFAR-10, alpha 0.3: normalised, TRAK's tuned settings have four checkpoints (150 s); here, the raw ones' two.
TRAK_03 = "trak=trak@projection=4096,relative_ridge=1,checkpoints=2"
MORE = ("shampoo", "shampoo@reference=subset", "kfac@reference=attributed", EIGHT)
EQUAL = (f"bif-equal={TUNED_BIF},draws=15", f"bif-equal-8={TUNED_BIF},draws=130")  # in kfac's seconds at one and eight
# BIF in about ten seconds: four chains, so four times as many draws. At one model, at eight, by another sampler, with a
# control variate, and with a localiser that has the loss's curvature.
SAMPLED = (
    "kfac@reference=subset,relative_damping=100",
    "gradsim@reference=subset",
    f"{TUNED_BIF},draws=480",
    f"bif-8={TUNED_BIF},models=8,draws=45",
    "bif-rmsprop=bif@reference=subset,sampler=rmsprop_sgld,burn_in=20,thinning=5,n_beta=10,draws=200",
    "bif_cv@reference=subset,gamma=1e4,draws=100",
    "bif-kronecker=bif@reference=subset,localiser=kronecker,draws=250",
    "bif_cv-kronecker=bif_cv@reference=subset,localiser=kronecker,draws=100",
)
DATAMODELS = (
    EIGHT,
    *(
        f"datamodel@retrains={retrains},prior=kfac,reference=subset{models}"
        for retrains, models in ((200, ""), (1000, ""), (1000, ",models=8"))
    ),
)
TRIED = ("kfac", "shampoo", "trak")
# Step -> the arguments of a tuning, or a scheme, an alpha, the methods, and the seeds.
TUNINGS = {
    "tune-full": ("full", ALPHAS, TRIED),
    "tune-subset": ("subset", ALPHAS, TRIED),
    "tune-full-ekfac": ("full", (0.1, 0.5), ("ekfac",)),
    "tune-full-bif": ("full", ALPHAS, ("bif",)),
    "tune-subset-bif": ("subset", (0.1,), ("bif",)),
}
RUNS = {
    "seconds-0.1": ("balanced", 0.1, (SUBSET[0], EIGHT), SEEDS),
    "balanced-0.1": ("balanced", 0.1, (*FULL, *SUBSET, *MORE, *EQUAL), SEEDS),
    "fixed-0.1": ("fixed", 0.1, FEW, SEEDS),
    "balanced-0.5": ("balanced", 0.5, FEW, SEEDS),
    "datamodel-balanced-0.1": ("balanced", 0.1, DATAMODELS, SEEDS[:1]),
    "datamodel-balanced-0.5": ("balanced", 0.5, DATAMODELS, SEEDS[:1]),
    "datamodel-fixed-0.1": ("fixed", 0.1, DATAMODELS, SEEDS[:1]),
    "pairs-0.5": ("fixed", 0.5, PAIRS, SEEDS),
    "pairs-0.3": ("fixed", 0.3, PAIRS, SEEDS),
    "pairs-0.7": ("fixed", 0.7, PAIRS, SEEDS),
    "balanced-0.3": ("balanced", 0.3, FEW, SEEDS[:3]),
    "balanced-0.7": ("balanced", 0.7, FEW, SEEDS[:3]),
    "share-0.01": ("balanced", 0.5, FEW, SEEDS),
    "sampled-balanced-0.1": ("balanced", 0.1, SAMPLED, SEEDS[:2]),
}
OWN = "own-models"  # step: are scores better without the models that were trained on the example that is scored?
SHARES = {"share-0.01": 0.01}


def main(argv: Sequence[str] | None = None) -> int:
    steps = [*TUNINGS, *RUNS, OWN]
    parser = parser_of(str(__doc__), steps, "runs/question")
    add = parser.add_argument
    add("--data-dir", help="CIFAR-10, as bench.lds takes it")
    add("--queries", type=int, default=2000, help="the first so many (default: %(default)s)")
    add("--subsets", type=int, default=100, help="(default: %(default)s)")
    add("--seeds", type=int, nargs="+", help="(default: the step's)")
    add("--tries", type=int, default=8, help="settings a method when tuning; 20 are every grid (default: %(default)s)")
    arguments = parsed(parser, argv, steps)
    os.environ["TDA_BENCH_TUNED"] = str(Path(arguments.out) / "tuned")
    Path(os.environ["TDA_BENCH_TUNED"]).mkdir(parents=True, exist_ok=True)

    def do(step: str) -> bool:
        if step in TUNINGS:
            return tune(step, arguments) > 0
        if step == OWN:
            own_models(arguments)
            return False
        experiment = experiment_of(step, arguments)
        if arguments.record:
            return record(f"question-{step}", step, experiment, arguments)
        return made(step, experiment, arguments)

    return go_through(arguments, do, lambda step: [step] if step in RUNS else [])


def tune(step: str, arguments: argparse.Namespace) -> int:
    from bench.tune import main as tune_main

    (reference, alphas, methods), failed = TUNINGS[step], 0
    for alpha in alphas:
        words = ["--task", arguments.task, "--reference", reference, "--alpha", str(alpha)]
        words += ["--tries", str(arguments.tries)]
        words += ["--data-dir", arguments.data_dir, "--set", "cifar10.protocol=scratch"] if arguments.data_dir else []
        words += ["--alpha-attribution", str(share(step, arguments)), "--seeds", str(TUNED_SEED), "--replicates", "1"]
        words += ["--subsets", str(arguments.subsets), "--queries", str(min(1000, arguments.queries))]
        words += ["--methods", *methods]
        # Long chains are what the runs have; short ones choose where they go.
        words += ["--set", "bif.draws=100"] if "bif" in methods else []
        words += ["--cache", arguments.cache] if arguments.cache else []
        out = Path(arguments.out) / f"{step}-alpha-{alpha:g}"
        failed += tune_main([*words, "--out", str(out)])
        for path in out.glob(f"{arguments.task}-*.json"):  # where TDA_BENCH_TUNED looks
            (Path(os.environ["TDA_BENCH_TUNED"]) / f"{path.stem}-{step}.json").write_bytes(path.read_bytes())
    return failed


def share(step: str, arguments: argparse.Namespace) -> float:
    """Of the training set: how much is attributed."""
    return SHARES.get(step, 0.1 if arguments.task == "cifar10" else 1.0)


def experiment_of(step: str, arguments: argparse.Namespace) -> "Experiment":
    from bench import Experiment

    scheme, alpha, methods, seeds = RUNS[step]
    seeds = tuple(arguments.seeds or seeds)
    if (arguments.task, step) == ("cifar10", "pairs-0.3"):
        methods = tuple(TRAK_03 if one == "trak" else one for one in methods)
    options = {"protocol": "scratch", "data_dir": arguments.data_dir} if arguments.data_dir else {}
    return Experiment(
        task=arguments.task, task_options=options, methods=methods, alpha=(alpha,),
        alpha_attribution=(share(step, arguments),), seeds=seeds, subsets=arguments.subsets,
        settings="default" if methods is SAMPLED else "auto",
        scheme=scheme, replicates=2, replicated_subsets=max(3, arguments.subsets // 4), queries=arguments.queries,
    )  # fmt: skip


def own_models(arguments: argparse.Namespace) -> None:
    """LDS of eight models' mean, with and without the models that were trained on the example that is scored."""
    from bench import lds
    from bench.records import provenance
    from bench.runner import Session

    found = []
    for step in ("balanced-0.1", "balanced-0.5"):
        asked = replace(experiment_of(step, arguments), methods=(EIGHT,), seeds=tuple(arguments.seeds or SEEDS[:2]))
        session = Session(asked, execution_of(arguments))
        truths = session.retrain()
        variant = next(one for one in session.active if one.rows != "normalised")
        for seed, part in session.blocks:
            ensemble, (plan,) = session.scorers(variant, seed, part)[0]
            members = [(member, member.question) for member in ensemble.members]
            scores = np.stack([member.scores()[0].scores.float().numpy() for member, _ in members])
            others = np.stack([~asked.reference.kept(session.task, asked.checkpoint) for _, asked in members])
            apart = np.einsum("kqn,kn->qn", scores, others) / np.maximum(others.sum(axis=0), 1)
            truth = truths[seed, part, plan.alpha]
            masks = plan.masks(session.task)[truth.subsets]
            losses = truth.mean()[:, session.question(seed, part).query_indices()]
            row = {"scheme": plan.scheme, "alpha": plan.alpha, "seed": seed, "settings": variant.settings}
            for name, values in (("all_models", scores.mean(axis=0)), ("own_models_left_out", apart)):
                row[name] = lds(masks, losses, values).lds
            found.append(row)
            print(row, flush=True)
    content = {"rows": found, **provenance(session.device())}
    folder = Path(arguments.out) / f"question-{OWN}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
