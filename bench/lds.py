"""How well does each method predict what really happens when training data is left out?

    python -m bench.lds --alpha 0.1                                  # the embedded task, all methods, two minutes
    python -m bench.lds --task cifar10 --alpha 0.1 0.3 0.5 0.7 --seeds 1 2 3 4 42 --data-dir DIR

Retrains on random subsets, scores with every method, and prints the linear datamodelling score (LDS) of each with its
interval and the noise ceiling. Everything finished is kept: interrupt at any time, and the same command goes on.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench import metrics
from bench.metrics import MINIMUM_SUBSETS
from bench.record import DISTRIBUTIONS, code_commit, code_fingerprint, versions, why_unwritten, without_nan
from bench.tables import bytes_text, number, table
from retrain.command import (
    Parser,
    add_cluster_arguments,
    add_task_arguments,
    at_least,
    build_task,
    check_device,
    check_out,
    cluster_options,
    default_cluster,
    fraction,
    options_of,
    share,
)
from retrain.errors import UsageError, error_line
from retrain.progress import close_bars
from retrain.safe_files import write_whole
from retrain.store import Store, StoreError, canonical_json
from retrain.subsets import SCHEMES

METHODS = ("bif", "ekfac", "trak", "gradsim", "random")
COLUMNS = [
    "task", "protocol", "method", "normalised", "alpha", "alpha_attribution", "seed", "num_subsets", "num_queries",
    "num_undefined", "lds", "ci_low", "ci_high", "lds_across_queries", "ceiling", "fit_seconds", "score_seconds",
    "peak_memory_bytes", "run_id",
]  # fmt: skip
PAIR_COLUMNS = [
    "task", "protocol", "method", "against", "normalised", "alpha", "alpha_attribution", "seed", "num_subsets",
    "num_queries", "num_undefined", "difference", "ci_low", "ci_high", "p_value", "run_id",
]  # fmt: skip
SCORES_ARE = ("loss-change", "helpfulness")  # a positive score: the loss rises, or falls, with the example
MANY_NUMBERS = 5_000_000  # subsets x queries x metrics from which starting processes pays

logger = logging.getLogger("tda-bench")


def make_parser() -> Parser:
    parser = Parser(prog="python -m bench.lds", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add_task_arguments(parser)
    add("--methods", nargs="+", default=list(METHODS), help="files of baselines/, or package.module:Class")
    add("--alpha", nargs="+", type=fraction, required=True, help="alpha_retrain: share of the attributed examples kept")
    add("--alpha-attribution", nargs="+", type=share, help="share of the training set attributed (default: the task's)")
    add("--subsets", type=at_least(MINIMUM_SUBSETS), default=100, help="retrained subsets (default: 100)")
    add("--scheme", choices=SCHEMES, default="fixed", help="subsets of fixed size, or independent draws")
    add("--seeds", nargs="+", type=at_least(0), default=[1], help="whole experiments to repeat (default: 1)")
    add("--replicates", type=at_least(1), help="retrains per subset, for the noise ceiling (default: the task's)")
    add("--replicated-subsets", type=at_least(MINIMUM_SUBSETS), help="only the first so many subsets are replicated")
    add("--queries", type=at_least(1), help="only the first so many queries of the split")
    add("--query-split", choices=("tune", "report", "all"), default="report", help="which queries (default: report)")
    add("--out", default="runs", help="where run records go (default: %(default)s)")
    add(
        "--keep-scores",
        choices=("auto", "always", "never"),
        default="auto",
        help="cache score matrices (auto: to 1 GiB)",
    )
    add("--ground-truth", metavar="DIR", help="score given scores against a ground truth of bench.truth, and stop")
    add("--scores", nargs="+", metavar="FILE", help="with --ground-truth: (queries x training examples) arrays")
    add("--scores-are", choices=SCORES_ARE, help="with --ground-truth: the sign of scores (default: loss-change)")
    add("--dry-run", action="store_true", help="say what would be computed, and compute nothing")
    add("--force", action="store_true", help="compute again what this command needs, even if it is cached")
    add("--json", action="store_true", help="print the rows as a JSON list instead of tables")
    add_cluster_arguments(parser)
    parser.set_defaults(cluster=None)  # see `default_cluster`
    return parser


# ---- what is asked ----


def build_methods(arguments: argparse.Namespace, task: Any) -> list[Any]:
    from baselines.method import load_method

    names = list(dict.fromkeys(arguments.methods))
    methods = []
    for name in names:
        options: dict[str, Any] = {**task.method_settings.get(name, {}), **options_of(name, arguments.set)}
        methods.append(load_method(name, **options))
    owners = {setting.partition("=")[0].rpartition(".")[0] for setting in arguments.set}
    if unknown := owners - {task.name, *names}:
        raise UsageError(
            f'--set names "{sorted(unknown)[0]}", which is neither the task ({task.name}) nor a method of this run '
            f"({', '.join(names)})"
        )
    return methods


def note_what_is_too_many(arguments: argparse.Namespace, task: Any) -> None:
    """One line for each option that asks for more than there is, of which all is taken."""
    split = getattr(arguments, "query_split", "report")
    if arguments.queries is not None and arguments.queries > (count := len(task.query_indices(split))):
        print(f"--queries {arguments.queries}: there are {count} ({split}), and all are used", file=sys.stderr)
    replicated = getattr(arguments, "replicated_subsets", None)
    if replicated is not None and replicated > arguments.subsets:
        print(
            f"--replicated-subsets {replicated}: there are {arguments.subsets} subsets, and all are replicated",
            file=sys.stderr,
        )


# ---- rows ----


@dataclasses.dataclass
class Outcome:
    """What a run came to."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pairs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ceilings: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    diagnostics: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)  # what makes the exit code 1


def question_of(arguments: argparse.Namespace, task: Any, seed: int, alpha_attribution: float) -> Any:
    from bench.runner import Question

    return Question(
        task=task,
        seed=seed,
        alpha_attribution=alpha_attribution,
        split=arguments.query_split,
        max_queries=arguments.queries,
    )


def plans_of(arguments: argparse.Namespace, task: Any, seed: int, alpha_attribution: float) -> list[Any]:
    from retrain.train import Plan

    return [
        Plan(
            alpha=alpha,
            alpha_attribution=alpha_attribution,
            seed=seed,
            num_subsets=arguments.subsets,
            replicates=arguments.replicates or task.default_replicates,
            scheme=arguments.scheme,
            replicated_subsets=getattr(arguments, "replicated_subsets", None),
        )
        for alpha in dict.fromkeys(arguments.alpha)
    ]


def run(arguments: argparse.Namespace, task: Any, methods: list[Any], store: Store) -> Outcome:
    from bench.runner import ground_truth

    outcome = Outcome()
    arguments.cluster = arguments.cluster or default_cluster(arguments.device)
    jobs = cluster_options(arguments)
    shares = arguments.alpha_attribution or [task.default_alpha_attribution]
    for seed in dict.fromkeys(arguments.seeds):
        for alpha_attribution in dict.fromkeys(shares):
            plans = plans_of(arguments, task, seed, alpha_attribution)
            truths = [
                ground_truth(task, plan, store, arguments.device, force=arguments.force, progress=True, **jobs)
                for plan in plans
            ]
            for plan, truth in zip(plans, truths, strict=True):
                if len(truth.subsets) < plan.num_subsets:
                    outcome.problems.append(
                        f"{plan.num_subsets - len(truth.subsets)} of {plan.num_subsets} subsets are missing at "
                        f"alpha {plan.alpha:g}, seed {seed}; the same command without --collect makes them"
                    )
            question = question_of(arguments, task, seed, alpha_attribution)
            predictions = predict(arguments, question, methods, plans, store, jobs, outcome)
            queries = question.query_indices()
            for position, (plan, truth) in enumerate(zip(plans, truths, strict=True)):
                if len(truth.subsets) >= MINIMUM_SUBSETS:
                    here = {name: found[position] for name, found in predictions.items()}
                    score(task, plan, truth, queries, here, outcome)
    return outcome


def predict(
    arguments: argparse.Namespace,
    question: Any,
    methods: list[Any],
    plans: list[Any],
    store: Store,
    jobs: dict[str, Any],
    outcome: Outcome,
) -> dict[str, list[Any]]:
    """Method name -> one prediction a plan. A method that fails is reported, and the others go on."""
    from bench.runner import Scorer, score_unit
    from retrain.jobs import run_units

    predictions = {}
    for method in methods:
        if reason := method.skip(question.task):
            outcome.skipped[method.name] = reason
            continue
        try:
            scorer = Scorer(question, method, store, arguments.device, arguments.keep_scores)
            if jobs["collect"] and not scorer.cached(plans):
                outcome.problems.append(
                    f"{method.name} has no scores yet for seed {question.seed}; nothing was started"
                )
                continue
            if jobs["cluster"] == "slurm" and not arguments.force:
                report = run_units(
                    [score_unit(question, method, plans, store, arguments.device, arguments.keep_scores)], store, **jobs
                )
                if report.failed:
                    raise RuntimeError(next(iter(report.failed.values())))
            predictions[method.name] = found = scorer.predictions(plans, force=arguments.force)
        except (KeyboardInterrupt, SystemExit, StoreError, UsageError):
            raise
        except Exception as error:
            logger.debug("the whole traceback of %s", method.name, exc_info=True)
            outcome.problems.append(f"{method.name} failed: {error_line(error)}")
            continue
        record = found[0].record
        if not_finite := record.get("num_scores_not_finite"):
            outcome.problems.append(
                f"{method.name} gave {not_finite} scores that are not finite; the queries they touch are undefined"
            )
        if record.get("diagnostics"):
            outcome.diagnostics.append(
                {"method": method.name, "seed": question.seed, "alpha_attribution": question.alpha_attribution}
                | record["diagnostics"]
            )
    return predictions


def score(task: Any, plan: Any, truth: Any, queries: np.ndarray, predictions: dict[str, Any], outcome: Outcome) -> None:
    """Adds the rows of one (seed, alpha): raw and train-normalised, every method, and the paired differences."""
    losses = truth.mean()[:, queries]
    where = {
        "task": task.name,
        "protocol": task.protocol,
        "alpha": plan.alpha,
        "alpha_attribution": plan.alpha_attribution,
        "seed": plan.seed,
    }
    made = {
        (name, normalised): values[truth.subsets]
        for normalised in (False, True)
        for name, prediction in predictions.items()
        if (values := prediction.normalised if normalised else prediction.raw) is not None
    }
    pairs = [(a, b) for a, b in itertools.combinations(made, 2) if a[1] == b[1]]
    ceiling, results, differences = compute_metrics(truth.losses[:, :, queries], truth.present, losses, made, pairs)
    outcome.ceilings.append(
        where
        | {
            name: getattr(ceiling, name)
            for name in ("ceiling", "ci_low", "ci_high", "reliability", "num_subsets_replicated", "num_undefined")
        }
        | {"num_replicates": plan.replicates, "mean_loss": float(losses.mean())}
    )
    for (name, normalised), result in results.items():
        if result.num_undefined == result.num_queries:
            kind = "train-normalised LDS" if normalised else "LDS"
            outcome.problems.append(
                f"{kind} of {name} is undefined for every query at alpha {plan.alpha:g}, seed {plan.seed}: "
                f"{why_undefined(losses, made[name, normalised])}"
            )
        outcome.rows.append(
            where
            | {"method": name, "normalised": normalised}
            | {
                f: getattr(result, f)
                for f in ("num_subsets", "num_queries", "num_undefined", "lds", "ci_low", "ci_high")
            }
            | {"lds_across_queries": result.across_queries, "ceiling": ceiling.ceiling}
            | {"spread": float(np.nanstd(result.per_query)) if result.num_undefined < len(queries) else math.nan}
            | {f: predictions[name].record[f] for f in ("fit_seconds", "score_seconds", "peak_memory_bytes", "device")}
        )
    numbers = ("num_subsets", "num_queries", "num_undefined", "difference", "ci_low", "ci_high", "p_value")
    for ((name, normalised), (against, _)), pair in differences.items():
        outcome.pairs.append(
            where
            | {"method": name, "against": against, "normalised": normalised}
            | {f: getattr(pair, f) for f in numbers}
        )


def why_undefined(losses: np.ndarray, prediction: np.ndarray) -> str:
    """Of a correlation across subsets; both (subsets, queries)."""
    for name, values in (("the retrained losses", losses), ("its predictions", prediction)):
        finite = np.isfinite(values).all(axis=0)
        if not finite.any():
            return f"{name} are not finite"
        if not (values != values[:1]).any(axis=0)[finite].any():
            return f"{name} are the same for all {len(values)} subsets"
    return "losses or predictions are not finite, or the same for all subsets"


Made = tuple[str, bool]  # method, normalised


def compute_metrics(
    replicates: np.ndarray,
    present: np.ndarray,
    losses: np.ndarray,
    made: dict[Made, np.ndarray],
    pairs: list[tuple[Made, Made]],
) -> tuple[metrics.Ceiling, dict[Made, metrics.LDS], dict[tuple[Made, Made], metrics.Difference]]:
    """All of a block's numbers; on all cores where there is enough to do (10,000 queries take half a second each)."""
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (functools.partial(metrics.noise_ceiling, present=present), (replicates,))
    ]
    calls += [(metrics.linear_datamodelling_score, (losses, made[key])) for key in made]
    calls += [(metrics.paired_difference, (losses, made[a], made[b])) for a, b in pairs]
    if losses.size * len(calls) < MANY_NUMBERS:
        done = [function(*arguments) for function, arguments in calls]
    else:
        from joblib import Parallel, delayed

        done = Parallel(n_jobs=-1)(delayed(function)(*arguments) for function, arguments in calls)
    ceiling, *rest = done
    return ceiling, dict(zip(made, rest)), dict(zip(pairs, rest[len(made) :], strict=True))


# ---- the record ----


def experiment_config(arguments: argparse.Namespace, task: Any, methods: list[Any]) -> dict[str, Any]:
    """What decides the numbers of a run, and so its id."""
    return {
        "task": task.config,
        "methods": [method.config for method in methods],
        "alpha": arguments.alpha,
        "alpha_attribution": arguments.alpha_attribution or [task.default_alpha_attribution],
        "subsets": arguments.subsets,
        "scheme": arguments.scheme,
        "seeds": arguments.seeds,
        "replicates": arguments.replicates or task.default_replicates,
        "query_split": arguments.query_split,
        "queries": arguments.queries,
        # Only where it is given, so that the ids of other runs stay what they were.
        **({"replicated_subsets": arguments.replicated_subsets} if arguments.replicated_subsets else {}),
        "versions": {name: version for name, version in versions().items() if name in DISTRIBUTIONS},
    }


def write_record(
    arguments: argparse.Namespace,
    command: str,
    task: Any,
    config: dict[str, Any],
    run_id: str,
    outcome: Outcome,
    seconds: float,
) -> None:
    from retrain.train import choose_device, describe_device

    folder = Path(arguments.out) / run_id
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "run_id": run_id,
        "command": command,
        "description": task.description,
        "config": config,
        "versions": versions(),
        "commit": code_commit(),
        "code": code_fingerprint(),
        "device": describe_device(choose_device(arguments.device)),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count(), "node": platform.node()},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 2),
        "rows": outcome.rows,
        "ceilings": outcome.ceilings,
        "pairs": outcome.pairs,
        "diagnostics": outcome.diagnostics,
        "skipped": outcome.skipped,
        "problems": outcome.problems,
    }
    write_whole(folder / "run.json", json.dumps(without_nan(record), indent=1) + "\n")
    write_whole(folder / "lds.csv", pd.DataFrame(outcome.rows, columns=COLUMNS).to_csv(index=False))
    if outcome.pairs:
        write_whole(folder / "pairs.csv", pd.DataFrame(outcome.pairs, columns=PAIR_COLUMNS).to_csv(index=False))


# ---- what the user reads ----


def show(outcome: Outcome, task: Any) -> str:
    """The tables: a block for every (alpha_attribution, alpha, normalised), methods by score."""
    parts = []
    frame = pd.DataFrame(outcome.rows)
    if frame.empty:
        return "no rows: no method finished"
    for (alpha_attribution, alpha), group in frame.groupby(["alpha_attribution", "alpha"], sort=True):
        first = group.iloc[0]
        seeds = sorted(group["seed"].unique())
        ceilings = [c for c in outcome.ceilings if c["alpha"] == alpha and c["alpha_attribution"] == alpha_attribution]
        times = replicates_text(ceilings[0], first)
        parts.append(
            f"\n{task.description}, protocol {task.protocol}: alpha {alpha:g} of {alpha_attribution:g} of the training "
            f"set, {first['num_subsets']} subsets x {times}, {first['num_queries']} queries, "
            f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}; {ceiling_text(ceilings)}"
        )
        parts.append(one_seed_table(group) if len(seeds) == 1 else many_seeds_table(group))
        text = pairs_text if len(seeds) == 1 else pairs_over_seeds_text
        parts.append(text(outcome.pairs, alpha, alpha_attribution))
    for line in outcome.diagnostics:
        if line.get("rhat") is not None:
            parts.append(
                f"{line['method']} chains, seed {line['seed']}: R-hat {line['rhat']:.3f}, ESS "
                f"{line['ess'] or math.nan:.0f} of {line['num_draws']} draws (mean loss); per example, median R-hat "
                f"{number(line['rhat_examples_median'])}, ESS {number(line['ess_examples_median'], 0)}"
                + (f"; dropped {'; '.join(line['dropped_chains'])}" if line.get("dropped_chains") else "")
            )
    return "\n".join(part for part in parts if part)


def replicates_text(ceiling: dict[str, Any], row: Any) -> str:
    """How often subsets were retrained on: "2", or "2 (25 of them)" where only some were replicated."""
    replicated, times = ceiling["num_subsets_replicated"], ceiling["num_replicates"]
    return f"{times} ({replicated} of them)" if times > 1 and replicated < row["num_subsets"] else str(times)


def ceiling_text(ceilings: list[dict[str, Any]]) -> str:
    values = [c["ceiling"] for c in ceilings]
    unknown = [c for c in ceilings if not math.isfinite(c["ceiling"])]
    if unknown:
        replicated = unknown[0]["num_subsets_replicated"]
        if unknown[0]["num_replicates"] < 2:
            reason = "needs --replicates 2"
        elif replicated < metrics.MINIMUM_SUBSETS:
            reason = f"{replicated} subsets were retrained on twice; needs {metrics.MINIMUM_SUBSETS}"
        else:
            reason = "the retrained losses are not finite, or the same for all subsets"
        return f"noise ceiling unknown ({reason})"
    if len(ceilings) == 1:
        return f"noise ceiling {values[0]:.3f} [{number(ceilings[0]['ci_low'])}, {number(ceilings[0]['ci_high'])}]"
    return f"noise ceiling {np.mean(values):.3f} (mean over seeds)"


def one_seed_table(group: pd.DataFrame) -> str:
    header = [
        "method", "scores", "LDS", "95 % interval", "LDS/ceiling", "spread", "undefined", "across queries",
        "fit s", "score s", "peak memory",
    ]  # fmt: skip
    rows = [
        [
            row["method"],
            "train-normalised" if row["normalised"] else "raw",
            number(row["lds"]),
            f"[{number(row['ci_low'])}, {number(row['ci_high'])}]",
            number(row["lds"] / row["ceiling"], 2) if row["ceiling"] > 0 else "-",
            number(row["spread"]),
            str(row["num_undefined"]),
            number(row["lds_across_queries"]),
            number(row["fit_seconds"], 1),
            number(row["score_seconds"], 1),
            bytes_text(row["peak_memory_bytes"]),
        ]
        for _, row in group.sort_values(["normalised", "lds"], ascending=[True, False]).iterrows()
    ]
    return table(header, rows, left=2)


def many_seeds_table(group: pd.DataFrame) -> str:
    """Means over seeds; the span is from the lowest to the highest end of the seeds' own 95 % intervals."""
    header = [
        "method", "scores", "LDS", "standard error", "95 % span", "LDS/ceiling", "per seed", "undefined",
        "across queries", "fit s", "score s", "peak memory",
    ]  # fmt: skip
    rows = []
    for (name, normalised), block in group.groupby(["method", "normalised"]):
        mean, error = metrics.mean_and_standard_error(block["lds"].to_numpy())
        values = " ".join(number(value) for value in block.sort_values("seed")["lds"])
        ceiling = block["ceiling"].mean()
        line = [
            name,
            "train-normalised" if normalised else "raw",
            number(mean),
            number(error),
            f"[{number(block['ci_low'].min())}, {number(block['ci_high'].max())}]",
            number(mean / ceiling, 2) if ceiling > 0 else "-",
            values,
            str(block["num_undefined"].sum()),
            number(block["lds_across_queries"].mean()),
            number(block["fit_seconds"].median(), 1),
            number(block["score_seconds"].median(), 1),
            bytes_text(block["peak_memory_bytes"].max()),
        ]
        rows.append((normalised, -mean, line))
    return table(header, [line for _, _, line in sorted(rows, key=lambda row: row[:2])], left=2)


def pairs_worth_showing(pairs: list[dict[str, Any]], alpha: float, alpha_attribution: float) -> list[dict[str, Any]]:
    return [
        pair
        for pair in pairs
        if pair["alpha"] == alpha
        and pair["alpha_attribution"] == alpha_attribution
        and "random" not in (pair["method"], pair["against"])
        and math.isfinite(pair["difference"])
    ]


def pairs_text(pairs: list[dict[str, Any]], alpha: float, alpha_attribution: float) -> str:
    """Is one method really ahead of another, on the same subsets and queries?"""
    lines = []
    for pair in pairs_worth_showing(pairs, alpha, alpha_attribution):
        lines.append(
            [
                f"{pair['method']} - {pair['against']}",
                "train-normalised" if pair["normalised"] else "raw",
                f"{pair['difference']:+.3f}",
                f"[{pair['ci_low']:+.3f}, {pair['ci_high']:+.3f}]",
                f"{pair['p_value']:.2g}",
            ]
        )
    return "\n" + table(["paired difference", "scores", "LDS", "95 % interval", "p"], lines, left=2) if lines else ""


def pairs_over_seeds_text(pairs: list[dict[str, Any]], alpha: float, alpha_attribution: float) -> str:
    """The same over several seeds: the mean difference, and for how many of them the interval excludes 0."""
    found: dict[tuple[bool, str, str], list[dict[str, Any]]] = {}
    for pair in pairs_worth_showing(pairs, alpha, alpha_attribution):
        first, second, kind = pair["method"], pair["against"], pair["normalised"]
        if (kind, second, first) in found:  # the better one comes first, and that may change from seed to seed
            turned = {"difference": -pair["difference"], "ci_low": -pair["ci_high"], "ci_high": -pair["ci_low"]}
            found[kind, second, first].append(turned)
        else:
            found.setdefault((kind, first, second), []).append(pair)
    lines = [
        [
            f"{first} - {second}",
            "train-normalised" if kind else "raw",
            f"{np.mean([seed['difference'] for seed in seeds]):+.3f}",
            " ".join(f"{seed['difference']:+.3f}" for seed in seeds),
            f"{sum(seed['ci_low'] > 0 for seed in seeds)} of {len(seeds)}",
            f"{sum(seed['ci_high'] < 0 for seed in seeds)} of {len(seeds)}",
        ]
        for (kind, first, second), seeds in found.items()
    ]
    header = ["paired difference", "scores", "LDS", "per seed", "interval above 0", "below 0"]
    return "\n" + table(header, lines, left=2) if lines else ""


def show_plan(arguments: argparse.Namespace, task: Any, methods: list[Any], store: Store) -> str:
    """What a run would compute, for --dry-run."""
    from bench.runner import Scorer
    from retrain.train import checkpoint_unit, retrain_units

    lines = []
    for seed in dict.fromkeys(arguments.seeds):
        base = checkpoint_unit(task, seed, 0, arguments.device)
        trained = store.has(base.kind, base.config)
        lines.append(f"seed {seed}: base model {'cached' if trained else 'to train'}")
        for alpha_attribution in arguments.alpha_attribution or [task.default_alpha_attribution]:
            plans = plans_of(arguments, task, seed, alpha_attribution)
            for plan in plans:
                units = retrain_units(task, plan, arguments.device)
                done = sum(store.has(unit.kind, unit.config) for unit in units)
                lines.append(
                    f"  alpha {plan.alpha:g} of {alpha_attribution:g}: {done} of {len(units)} retrains cached, "
                    f"{len(units) - done} to do"
                )
            question = question_of(arguments, task, seed, alpha_attribution)
            for method in methods:
                if reason := method.skip(task):
                    lines.append(f"  {method.name}: skipped, {reason}")
                    continue
                cached = trained and Scorer(question, method, store, arguments.device).cached(plans)
                lines.append(f"  {method.name}: {'cached' if cached else 'to score'}")
    return "\n".join(lines)


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word.partition("=")[0] == "--ground-truth" for word in argv):
        from bench.truth import scores_command

        return scores_command(argv)
    if any(word.partition("=")[0] in ("--scores", "--scores-are") for word in argv):
        print(f"{parser.prog}: --scores needs --ground-truth FOLDER, made by python -m bench.truth", file=sys.stderr)
        return 2
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("tda-bench").setLevel(logging.INFO)
    command = shlex.join(["python", "-m", "bench.lds", *argv])
    started = time.perf_counter()
    try:
        check_device(arguments.device)
        task = build_task(arguments)
        methods = build_methods(arguments, task)
        note_what_is_too_many(arguments, task)
        store = Store(arguments.cache)
        if arguments.dry_run:
            print(show_plan(arguments, task, methods, store))
            return 0
        config = json.loads(canonical_json(experiment_config(arguments, task, methods)))
        run_id = hashlib.sha256(canonical_json(config).encode()).hexdigest()[:12]
        check_out(arguments.out)
        outcome = run(arguments, task, methods, store)
        for row in [*outcome.rows, *outcome.pairs]:
            row["run_id"] = run_id
        seconds = time.perf_counter() - started
        record = Path(arguments.out) / run_id / "run.json"
        unwritten = why_unwritten(
            lambda: write_record(arguments, command, task, config, run_id, outcome, seconds), record
        )
    except (UsageError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        close_bars()
        print(
            f"{parser.prog}: interrupted; finished work is in {arguments.cache}, and the same command goes on",
            file=sys.stderr,
        )
        return 130
    except RuntimeError as error:
        print(f"{parser.prog}: {error_line(error)}", file=sys.stderr)
        return 1
    if arguments.json:
        print(
            json.dumps(without_nan([{column: row.get(column) for column in COLUMNS} for row in outcome.rows]), indent=1)
        )
    else:
        print(show(outcome, task))
        print(f"\nrun {run_id} in {seconds:.0f} s" + ("" if unwritten else f"; record: {record}"))
    if unwritten:
        outcome.problems.append(f"{unwritten}; the same command writes it, from {arguments.cache}")
    for name, reason in outcome.skipped.items():
        print(f"skipped {name}: {reason}", file=sys.stderr)
    for problem in outcome.problems:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
