"""A real language model, finetuned and left out: SmolLM2-135M's whole campaign, and any other model's of the task.

    python results/language.py --text FILE --eval-text FILE --out OUT           # every step, on one GPU
    python results/language.py tune report-1 --task stories15m --text FILE --size num_train=24 --size length=16

Half of 128 sequences of 128 tokens, two epochs: LDS at alpha 0.5 from 100 subsets, 25 of them twice, 256 queries.
Settings are tuned on seed 7's own subsets and queries, five a method; then three other seeds are run, one after the
other, and each has its record as soon as it is there. A step that was interrupted goes on where it was.

Seconds planned on one H200. A retrain (8,128 tokens twice, and 320 queries) takes 0.22.

    check    the tokens are those of the file, whatever version of transformers           5
    tune     60 retrains 14; kfac 25, ekfac 33, trak 8, bif 26, repsim and bm25 4        110
    report   a seed: 125 retrains 28, ekfac 15, bif 15, kfac 10, gradsim 3, trak 2,
             repsim and bm25 2, kfac and gradsim at a subset model 13, datamodel 8,
             what lies between them 5                                              3 x 101
    words    20 pairs of sequences under bif, kfac and gradsim                            40
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import execution_of, go_through, parsed, parser_of

if TYPE_CHECKING:
    from bench import Experiment

TUNED_SEED = 7
SIZES = {"num_train": 128, "length": 128, "num_queries": 320, "epochs": 2, "learning_rate": 2e-4}
SUBSETS, TUNED_SUBSETS, PROBED_DRAWS = 100, 60, 12
STEPS = ("check", "tune", "report-1", "words", "report-2", "report-3")
# What is tried of each method: around what was best for Pythia-14M's stand-in (results/pythia14m).
GRIDS: dict[str, Any] = {
    "kfac": {"relative_damping": (0.1, 1.0, 10.0, 100.0, 1000.0)},
    "ekfac": {"relative_damping": (0.1, 1.0, 10.0, 100.0, 1000.0)},
    "trak": ({"relative_ridge": (10.0, 1.0, 100.0, 1000.0)}, {"relative_ridge": (100.0,), "projection": (4096,)}),
    "bif": ({"gamma": (1e6, 1e7), "n_beta": (1e3,)}, {"gamma": (1e7, 1e8), "n_beta": (1e4,)}),
    "repsim": {"centred": (False, True), "pooling": ("mean", "last")},
    "bm25": {"ngram": (1, 2, 3), "b": (0.75, 0.0)},
}
TRIES = 5
BATCHES = {"kfac": {"batch_size": 16, "fit_batch_size": 16}, "gradsim": {"batch_size": 16}, "trak": {"batch_size": 16}}
METHODS = (
    *("ekfac", "kfac", "gradsim", "trak", "repsim", "bm25", "random"),
    *("kfac@reference=subset", "gradsim@reference=subset", "datamodel@retrains=32,prior=kfac,covariance=queries"),
)
# A text and its tokens under SmolLM2's own vocabulary.
TOKENS = (
    "In 1987, it doesn't  matter.\nRome <|im_end|>",
    (788, 216, 33, 41, 40, 39, 28, 357, 2761, 982, 216, 2631, 30, 198, 46292, 216, 2),
)
KEPT_FITS = 2**28  # bytes: a curvature of 1.7 GB takes as long to write and to check as to fit


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(str(__doc__), STEPS, "runs/language", "smollm2")
    add = parser.add_argument
    add("--model", help="as the task takes it (default: the preset's own)")
    add("--text", required=True, help="the training text, as bench.lds takes it")
    add("--eval-text", help="the queries'")
    add("--size", action="append", default=[], metavar="NAME=VALUE", help="a field of the task, in place of its own")
    add("--subsets", type=int, default=SUBSETS, help="(default: %(default)s)")
    add("--pairs", type=int, default=20, help="of sequences whose words are paired (default: %(default)s)")
    arguments = parsed(parser, argv, STEPS)
    tuned = Path(arguments.out) / "tune"
    tuned.mkdir(parents=True, exist_ok=True)
    os.environ["TDA_BENCH_TUNED"] = str(tuned)
    if arguments.record:
        return record([int(step.removeprefix("report-")) for step in arguments.steps], arguments)
    work, done = {"check": check, "tune": tune, "words": words}, list[str]()

    def do(step: str) -> bool:
        if step in work:
            return work[step](arguments) > 0
        done.append(step)
        return report(int(step.removeprefix("report-")), arguments) > 0

    return go_through(arguments, do, lambda step: [] if step in work else list(done))


# ---- what is asked ----


def sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The task's fields."""
    given = {name: json.loads(value) for name, _, value in (text.partition("=") for text in arguments.size)}
    files = {"model": arguments.model, "text": arguments.text, "eval_text": arguments.eval_text}
    return SIZES | given | {name: value for name, value in files.items() if value}


def experiment_of(seeds: Sequence[int], methods: Sequence[str], arguments: argparse.Namespace) -> "Experiment":
    from bench import Experiment

    return Experiment(
        task=arguments.task,
        task_options=sizes(arguments),
        methods=methods,
        options={name: options for name, options in BATCHES.items() if name in methods},
        alpha=(0.5,),
        seeds=seeds,
        subsets=arguments.subsets,
        replicates=2,
        replicated_subsets=max(3, arguments.subsets // 4),
    )


def bif(arguments: argparse.Namespace) -> str:
    """With as many draws as `report` chose."""
    return f"bif@draws={json.loads((Path(arguments.out) / 'bif.json').read_text())['draws']}"


# ---- the steps ----


def check(arguments: argparse.Namespace) -> int:
    """The tokens, before anything is made of them."""
    from retrain.models.pretrained import load_tokenizer

    text, expected = TOKENS
    if arguments.task != "smollm2":
        return 0
    found = load_tokenizer(arguments.model or arguments.task)(text, add_special_tokens=False)["input_ids"]
    if tuple(found) != expected:
        raise SystemExit(f"the tokens of {text!r} are {found}; expected {list(expected)}: fetch the model again")
    return 0


def tune(arguments: argparse.Namespace) -> int:
    """Every method's settings, by the rule of `bench.tune`; the best by raw LDS serve both kinds of rows."""
    from baselines.method import load_method
    from bench import scoring
    from bench.tune import main as tune_main

    for name, grid in GRIDS.items():
        type(load_method(name)).grid = grid
    scoring.SLOW_AT_FIRST = frozenset()  # what a process pays at first is the fit's, which every try shares
    subsets = min(TUNED_SUBSETS, arguments.subsets)
    tuned = Path(os.environ["TDA_BENCH_TUNED"])
    command = ["--alpha", "0.5", "--seeds", str(TUNED_SEED), "--replicates", "1", "--subsets", str(subsets)]
    command += ["--tries", str(TRIES), "--methods", *GRIDS, "--out", str(tuned)]
    tried = {name: options for name, options in BATCHES.items() if name in GRIDS}
    failed = tune_main([*command, *common_words(arguments, {**tried, "bif": {"draws": PROBED_DRAWS}})])
    for path in tuned.glob(f"{arguments.task}-*.json"):
        content = json.loads(path.read_text())
        for found in content["methods"].values():
            found["normalised"] = found["raw"]
        path.write_text(json.dumps(content, indent=1) + "\n")
    return failed


def report(seed: int, arguments: argparse.Namespace) -> int:
    """What needs the GPU: retrained models and scores, kept in the cache. BIF has the seconds of seed 1's EK-FAC."""
    from bench import scoring
    from bench.runner import Session

    scoring.MAX_FIT_BYTES = KEPT_FITS
    scoring.SLOW_AT_FIRST = frozenset()  # tuning has warmed everything up
    chosen = Path(arguments.out) / "bif.json"
    if not chosen.is_file():
        probe = f"bif@draws={PROBED_DRAWS}"
        session = Session(experiment_of([seed], ["ekfac", probe], arguments), execution_of(arguments))
        session.retrain()
        costs = {
            variant.label: predictions[0].record
            for found in session.score().values()
            for variant, predictions in found
            if variant.rows != "normalised"
        }
        own, given = costs[probe], sum(costs["ekfac"][f"{stage}_seconds"] for stage in ("fit", "score"))
        draws = max(PROBED_DRAWS, int((given - own["fit_seconds"]) / own["score_seconds"] * PROBED_DRAWS))
        chosen.write_text(json.dumps({"draws": draws, "ekfac": given, "probe": own["score_seconds"]}) + "\n")
        print(f"bif has {draws} draws a chain, in EK-FAC's {given:.1f} s", flush=True)
    session = Session(experiment_of([seed], [*METHODS, bif(arguments)], arguments), execution_of(arguments))
    session.retrain()
    found = session.score()
    for problem in session.out.problems:
        print(f"seed {seed}: {problem}", flush=True)
    for variant, predictions in next(iter(found.values())):
        cost = predictions[0].record
        seconds = f"{cost['fit_seconds']:.1f} + {cost['score_seconds']:.1f} s"
        print(f"  {variant.label} ({variant.settings or 'defaults'}): {seconds}", flush=True)
    return bool(session.out.problems)


def record(seeds: Sequence[int], arguments: argparse.Namespace) -> int:
    """The record, and the ground truth with what every method predicts, as a bank."""
    from bench import run
    from bench.truth.__main__ import main as truth_main

    asked = experiment_of(seeds, [*METHODS, bif(arguments)], arguments)
    result = run(asked, execution_of(arguments, jobs={"collect": True}))
    command = f"python results/language.py --task {arguments.task} {' '.join(f'report-{seed}' for seed in seeds)}"
    saved = result.save(Path(arguments.out) / "report", command)
    bank = ["bank", "--experiment", str(saved), "--collect", "--out", str(Path(arguments.out) / "bank")]
    truth_main([*bank, *(["--cache", arguments.cache] if arguments.cache else [])])
    print(f"{saved}\n{result}", *result.problems, sep="\n", flush=True)
    return bool(result.problems)


def words(arguments: argparse.Namespace) -> int:
    """Scores of word with word; `tda-bench inspect words --read OUT/words --wordnet FOLDER` says which are related."""
    from bench.inspect.__main__ import main as inspect_main

    options = {name: BATCHES[name] for name in ("kfac", "gradsim")}
    command = ["words", "--methods", bif(arguments), *options, "--queries", str(arguments.pairs), "--seed", "1"]
    command += ["--out", str(Path(arguments.out) / "words")]
    return inspect_main([*command, *common_words(arguments, options)])


def common_words(arguments: argparse.Namespace, options: dict[str, dict[str, Any]]) -> list[str]:
    """What every command line here has: the task with its sizes, methods' options and the cache."""
    found = ["--task", arguments.task, *(["--cache", arguments.cache] if arguments.cache else [])]
    for name, some in {arguments.task: sizes(arguments), **options}.items():
        found += [word for option, value in some.items() for word in ("--set", f"{name}.{option}={value}")]
    return found


if __name__ == "__main__":
    sys.exit(main())
