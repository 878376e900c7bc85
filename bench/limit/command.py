"""Measures how far BIF is from the damped influence function, and writes the record; see `bench.limit`."""

import argparse
import hashlib
import logging
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.bif.covariance import covariance
from baselines.bif.method import BIF
from baselines.method import Problem
from bench.limit.regression import LogisticCopies, relative_distance
from bench.records import command_line, provenance, try_write, write_json
from bench.tables import interval, number, table
from retrain.command import RUNS, Parser, at_least, check_out, guarded
from retrain.errors import UsageError
from retrain.progress import bar
from retrain.source import code_fingerprint
from retrain.store import Store, canonical_json, default_cache
from retrain.train import describe_device

DAMPING = 0.05  # gamma / n_beta, the influence function's
STEP_LENGTH = 0.04  # times the largest precision: the length of the step adds a hundredth to the variance
BURN_IN = 8  # draws; they are half a relaxation time apart
N_BETAS = (10.0, 30.0, 100.0, 300.0, 1000.0)
ENTRY_KIND = "limit"
DESCRIPTION = "Damped logistic regression, 3 parameters"


def measured(task: LogisticCopies, n_beta: float, draws: int, seed: int, store: Store) -> list[dict[str, Any]]:
    """Distances at every number of draws, from one run of the method, kept in the cache."""
    config = {
        "task": task.config, "n_beta": n_beta, "draws": draws, "seed": seed, "damping": DAMPING, "step": STEP_LENGTH,
        "burn_in": BURN_IN, "code": code_fingerprint(),
    }  # fmt: skip
    entry = store.read(ENTRY_KIND, config)
    if entry is None:
        found = distances(task, sampled_losses(task, n_beta, draws, seed), n_beta)
        columns = {name: np.array([one[name] for one in found]) for name in found[0]}
        entry = store.write(ENTRY_KIND, config, columns, {})
    arrays = entry.arrays
    return [
        {"n_beta": n_beta, "draws": int(arrays["draws"][k]), "distance": float(arrays["distance"][k])}
        for k in range(len(arrays["draws"]))
    ]


def sampled_losses(task: LogisticCopies, n_beta: float, draws: int, seed: int) -> Tensor:
    """(copies, draws, train + queries): one run of `bif` as it ships, full batch."""
    precision = task.largest_precision(n_beta, DAMPING)
    method = BIF(
        chains=1, draws=draws, burn_in=BURN_IN, thinning=round(1 / STEP_LENGTH), step_size=STEP_LENGTH / precision,
        gamma=DAMPING * n_beta, n_beta=n_beta * task.copies, minibatch=task.num_train * task.copies, batch_size=10**6,
        keep_traces=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tda-bench-") as scratch:
        problem = Problem(
            task=task,
            model=task.build_model(0),
            train=task.train_data,
            attributed_indices=np.arange(task.num_train * task.copies),
            queries=task.query_data,
            seed=seed,
            device=torch.device("cpu"),
            scratch=Path(scratch),
        )
        traces = method.score(problem, None).arrays["loss_traces"][0].double()
    train, queries = traces.split([task.num_train * task.copies, task.num_queries * task.copies], dim=1)
    shape = (draws, task.copies, -1)
    return torch.cat([train.reshape(shape), queries.reshape(shape)], -1).transpose(0, 1)


def distances(task: LogisticCopies, losses: Tensor, n_beta: float) -> list[dict[str, Any]]:
    """Of ever larger groups of copies: the root mean square over the groups of a size."""
    expected = task.damped_influence(DAMPING)
    found, groups = [], 2 ** int(math.log2(task.copies // 8))
    while groups >= 1:
        size = task.copies // groups
        parts = [losses[g * size : (g + 1) * size] for g in range(groups)]
        apart = [
            relative_distance(
                -n_beta * covariance(part[..., task.num_train :], part[..., : task.num_train], "pooled")[0], expected
            )
            for part in parts
        ]
        found.append({"draws": size * losses.shape[1], "distance": float(np.sqrt(np.mean(np.square(apart))))})
        groups //= 2
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def make_record(
    task: LogisticCopies, n_betas: Sequence[float], draws: int, seeds: Sequence[int], store: Store
) -> dict[str, Any]:
    if len(set(n_betas)) < 2:
        raise UsageError(f"a slope needs two values of --n-beta; got {', '.join(f'{one:g}' for one in n_betas)}")
    exact = [
        {
            "n_beta": n_beta,
            "distance": relative_distance(n_beta * task.exact_bif(n_beta, DAMPING), task.damped_influence(DAMPING)),
        }
        for n_beta in n_betas
    ]
    runs = [(n_beta, seed) for n_beta in n_betas for seed in seeds]
    by_size: dict[tuple[float, int], list[float]] = {}
    for n_beta, seed in bar(runs, desc="chains", unit="run"):
        for one in measured(task, n_beta, draws, seed, store):
            by_size.setdefault((one["n_beta"], one["draws"]), []).append(one["distance"])
    sampled = [
        {"n_beta": n_beta, "draws": count, "distance": float(np.sqrt(np.mean(np.square(apart)))),
         "low": min(apart), "high": max(apart)}
        for (n_beta, count), apart in by_size.items()
    ]  # fmt: skip
    last = [one for one in sampled if one["n_beta"] == max(n_betas)]
    return {
        "task": "logistic regression",
        "description": DESCRIPTION,
        "config": {
            "regression": asdict(task), "damping": DAMPING, "step_times_precision": STEP_LENGTH, "burn_in": BURN_IN,
            "thinning": round(1 / STEP_LENGTH), "sampler": "sgld", "gradient": "full batch", "draws_of_a_copy": draws,
            "seeds": list(seeds),
        },
        "exact": exact,
        "sampled": sampled,
        "slopes": {
            "n_beta": {"theory": -1.0, "measured": slope([e["n_beta"] for e in exact], [e["distance"] for e in exact])},
            "draws": {"theory": -0.5, "measured": slope([s["draws"] for s in last], [s["distance"] for s in last])},
        },
    }  # fmt: skip


def limit_table(record: Mapping[str, Any]) -> str:
    """Distances by n_beta; of several seeds their root mean square, with the smallest and the largest beside it."""
    most = max(one["draws"] for one in record["sampled"])
    at_most = {one["n_beta"]: one for one in record["sampled"] if one["draws"] == most}
    seeds = len(record["config"]["seeds"])
    header, lines = ["n_beta", "exact BIF", f"{most:,} draws", f"range of {seeds} seeds"], []
    for one in record["exact"]:
        sampled = at_most[one["n_beta"]]
        ends = interval(sampled["low"], sampled["high"], 4) if seeds > 1 else "-"
        lines.append([f"{one['n_beta']:g}", number(one["distance"], 4), number(sampled["distance"], 4), ends])
    found = [f"{record['description']}: relative distance of BIF to the damped influence function"]
    found.append(table(header if seeds > 1 else header[:3], lines if seeds > 1 else [line[:3] for line in lines], 0))
    for axis, slopes in record["slopes"].items():
        found.append(f"slope in {axis}: {slopes['measured']:.2f} measured, {slopes['theory']:.2f} in theory")
    if seeds == 1:
        found.append("one seed: --seeds 1 2 3 says how much another would differ")
    return "\n".join(found)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.limit", description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("--n-beta", nargs="+", type=float, default=list(N_BETAS), metavar="N",
        help=f"inverse temperatures, two or more (default: {' '.join(f'{one:g}' for one in N_BETAS)})")  # fmt: skip
    add("--copies", type=at_least(16), default=1000, help="of the regression, each a chain (default: %(default)s)")
    add("--draws", type=at_least(4), default=32, help="of each copy (default: %(default)s)")
    add("--seeds", "--seed", nargs="+", type=at_least(0), default=[1], help="of the chains (default: 1)")
    add("--cache", default=default_cache(), help="where finished chains are kept (default: %(default)s)")
    add("--out", default=f"{RUNS}/limit", help="folder of limit.json (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    if wrong := [value for value in arguments.n_beta if not 0 < value < math.inf]:
        parser.error(f"--n-beta {wrong[0]:g} is no positive number; expected such as 10 100 1000")
    logging.basicConfig(format="%(message)s", level=logging.ERROR, stream=sys.stderr)
    command = command_line("bench.limit", argv)
    return guarded(parser.prog, lambda: approach(arguments, command, parser.prog))


def approach(arguments: argparse.Namespace, command: str, prog: str) -> int:
    started = time.perf_counter()
    check_out(arguments.out)
    task = LogisticCopies(copies=arguments.copies)
    n_betas = sorted(set(arguments.n_beta))
    result = make_record(task, n_betas, arguments.draws, sorted(set(arguments.seeds)), Store(arguments.cache))
    run_id = hashlib.sha256(canonical_json(result, "result").encode()).hexdigest()[:12]
    seconds = round(time.perf_counter() - started, 1)
    record = {
        **result,
        "run_id": run_id,
        "command": command,
        **provenance(describe_device(torch.device("cpu"))),
        "seconds": seconds,
    }
    path = Path(arguments.out) / "limit.json"
    unwritten = try_write(lambda: write_json(path, record, indent=1), path)
    print(limit_table(result))
    if unwritten:
        print(f"{prog}: {unwritten}", file=sys.stderr)
        return 1
    print(f"\nrun {run_id} in {seconds:.0f} s; record: {path}")
    return 0
