"""What does attribution cost as models grow? Seconds, memory and disk of each method across the Pythia suite.

    python -m bench.scaling                                           # the paper's setting; on a CPU a small one
    python -m bench.scaling --models 14m 70m 410m --methods bif ekfac --budget-seconds 60 --out results/scaling
    python -m bench.scaling --estimate --model 2.8b --train 400 --queries 18 --draws 2000    # before anything is run

The paper's scaling comparison: 400 Pile sequences (`--text`), 18 prompt-completion queries, 150 tokens, bfloat16; BIF
with 4 chains x 500 draws, EK-FAC by kronfluence with its extreme-memory-reduction arguments. Every point is measured in
a process of its own (bench/scaling_point.py says what is counted). A point whose whole run does not fit its budget is
measured at smaller sizes and projected; one that fails is a row with its reason. Finished points are kept: interrupt at
any time, and the same command goes on. Where the hub cannot be reached, models have random weights: cost does not
depend on the values, and every row says which it had.
"""

import argparse
import hashlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from bench.record import code_commit, code_fingerprint, versions, why_unwritten, without_nan
from bench.scaling_estimate import (
    against,
    by_device,
    crossovers,
    duration,
    estimates,
    read_rows,
    show_against,
    show_crossovers,
    show_estimates,
    slopes,
)
from bench.scaling_fits import Setting
from bench.scaling_merge import merged_rows, read_records
from bench.scaling_problem import load_queries
from bench.scaling_processes import Processes, measure_peak
from bench.scaling_rows import COLUMNS, make_row
from bench.scaling_specs import cost_fingerprint, point_config, specifications
from bench.tables import bytes_text, table
from retrain.command import Parser, at_least, check_device, check_out
from retrain.errors import UsageError
from retrain.models.pythia_suite import SUITE, Configuration, suite_configuration
from retrain.safe_files import write_whole
from retrain.store import Store, StoreError, canonical_json, default_cache

METHODS = ("bif", "ekfac", "gradsim", "trak")
PAPER: dict[str, Any] = {
    "models": list(SUITE),
    "methods": list(METHODS),
    "train": 400,
    "tokens": 150,
    "budget_seconds": 600.0,
}
# On a CPU the paper's setting would take days, and TRAK's projections of millions of numbers minutes: fewer, shorter
# sequences of the smallest models, without TRAK.
ON_CPU: dict[str, Any] = {
    "models": ["14m", "31m"],
    "methods": list(METHODS[:3]),
    "train": 8,
    "tokens": 32,
    "budget_seconds": 20.0,
}
LEAST_SECONDS = 5.0  # with less than this left, a point is not begun


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.scaling", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", help=f"of {' '.join(SUITE)}, or model folders (default: all; on a CPU 14m 31m)")
    add("--methods", nargs="+", help=f"files of baselines/, or package.module:Class (default: {' '.join(METHODS)})")
    add("--train", type=at_least(2), help="training sequences (default: 400; on a CPU 8)")
    add("--queries", default="18", help="how many of our 18, or a JSON file of prompt and completion pairs")
    add("--tokens", type=at_least(2), help="length of every sequence (default: 150; on a CPU 32)")
    add("--draws", type=at_least(2), default=2000, help="of BIF, all chains together (default: 2000)")
    add("--chains", type=at_least(1), default=4, help="of BIF (default: 4)")
    add("--fit-examples", type=at_least(2), help="sequences EK-FAC is fitted on (default: the training sequences)")
    add("--budget-seconds", type=float, help="of one point; beyond it, projected (default: 600; on a CPU 20)")
    add("--total-seconds", type=float, help="of the whole sweep; larger models get more of it (default: no limit)")
    add("--random-weights", action="store_true", help="never load weights; the same architecture, initialised")
    add("--text", metavar="FILE", help="documents as .jsonl[.xz]; without it, training sequences are random tokens")
    add("--tokenizer", metavar="NAME", help="folder or name; without it, the model's own, or bytes")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--seed", type=at_least(0), default=1, help="of weights, tokens and methods (default: 1)")
    add("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", help="option of a method")
    add("--cache", default=default_cache(), help="where finished points are kept (default: %(default)s)")
    add("--out", default="runs/scaling", help="where scaling.csv and scaling.json go (default: %(default)s)")
    add("--force", action="store_true", help="measure again what is already kept")
    add("--json", action="store_true", help="print rows (or estimates) as a JSON list instead of tables")
    add("--merge", nargs="+", metavar="JSON", help="run nothing: one table from these sweeps' scaling.json")
    add("--estimate", action="store_true", help="run nothing: predict the cost of --model from measured rows")
    add("--model", help="with --estimate: a size of the suite, or a model folder")
    add("--against", metavar="FILE", help="with --estimate: hold predictions against this other sweep's scaling.csv")
    add("--from", dest="source", metavar="FILE", help="with --estimate: default results/scaling/scaling.csv")
    return parser


# ---- measuring ----


def weight(spec: dict[str, Any]) -> float:
    """A point's part of --total-seconds: starting costs the same for all, measuring grows with the model."""
    return 1.0 + 3.0 * (Configuration(**spec["configuration"]).num_parameters / 1e9) ** 0.5


class Sweep:
    """All points of one command."""

    def __init__(self, arguments: argparse.Namespace, store: Store):
        self.arguments, self.store = arguments, store
        self.specs = specifications(arguments)
        self.started = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.num_kept = 0

    def kept(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        if self.arguments.force:
            return None
        for budget in (None, self.budget()):
            entry = self.store.read("scaling", point_config(spec, budget))
            if entry is not None:
                return entry.record["result"]
        return None

    def budget(self) -> tuple[float, float | None]:
        return self.arguments.budget_seconds, self.arguments.total_seconds

    def run(self, after_each: Any) -> None:
        known = [self.kept(spec) for spec in self.specs]
        to_do = [index for index, result in enumerate(known) if result is None]
        with self.store.scratch() as folder:
            processes = Processes(folder, ahead=self.specs[0]["device"].startswith("cuda"))
            try:
                if to_do:
                    processes.prepare()
                peak = measure_peak(self.specs[0]["device"]) if to_do else None
                for index, spec in enumerate(self.specs):
                    result = known[index]
                    if result is None:
                        waiting = [later for later in to_do if later >= index]
                        print(start_line(spec, index + 1, len(self.specs)), file=sys.stderr, flush=True)
                        result = self.measure(spec, processes, str(folder), waiting)
                        result["peak_flops"] = peak
                        self.keep(spec, result)
                    else:
                        self.num_kept += 1
                    row = make_row(spec, result, result.get("peak_flops"))
                    self.rows.append(row)
                    self.points.append({"model": row["model"], "method": row["method"], **result})
                    print(progress_line(row, len(self.rows), len(self.specs)), file=sys.stderr, flush=True)
                    after_each()
            finally:
                processes.close()

    def measure(self, spec: dict[str, Any], processes: Processes, folder: str, waiting: list[int]) -> dict[str, Any]:
        budget, total = self.budget()
        limit = 3 * budget + 300
        if total is not None:
            left = total - (time.monotonic() - self.started)
            if left < LEAST_SECONDS:
                return {"rungs": [], "error": "no time left"}
            share = weight(spec) / sum(weight(self.specs[index]) for index in waiting)
            budget = min(budget, left * share)
            limit = min(left, 3 * budget + 60)
        here = {"budget_seconds": budget, "scratch": folder, "result": f"{folder}/{len(self.rows)}.json"}
        return processes.measure({**spec, **here}, limit, more=len(waiting) > 1)

    def keep(self, spec: dict[str, Any], result: dict[str, Any]) -> None:
        """Failures are rows, but never kept: the next time may have more memory, or more time."""
        row = make_row(spec, result, None)
        if row["error"]:
            return
        config = point_config(spec, self.budget() if row["projected"] else None)
        if self.arguments.force:
            key = self.store.key("scaling", config)
            for info in [info for info in self.store.entries("scaling") if info.key == key]:
                self.store.remove(info)
        self.store.write("scaling", config, {}, {"result": without_nan(result)})


# ---- what the user reads ----


def start_line(spec: dict[str, Any], position: int, count: int) -> str:
    return f"[{position}/{count}] {spec['model']} {spec['method']}: measuring ..."


def progress_line(row: dict[str, Any], position: int, count: int) -> str:
    if row["error"]:
        return f"[{position}/{count}] {row['model']} {row['method']}: {row['error']}"
    kind = f"projected from {row['projected_from']}" if row["projected"] else "measured"
    seconds = row["fit_seconds"] + row["score_seconds"]
    return f"[{position}/{count}] {row['model']} {row['method']}: {duration(seconds)}, {kind}"


def show(rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "model", "method", "fit + score", "95 % interval", "load", "fit", "score", "peak memory", "disk", "a draw",
        "x floor",
    ]  # fmt: skip
    lines: list[list[str]] = []
    notes: list[str] = []
    for row in rows:
        if row["error"]:
            lines.append([row["model"], row["method"], *["-"] * 9])
            notes.append(f"{row['model']} {row['method']}: {row['error']}")
            continue
        if row["projected"]:
            notes.append(f"{row['model']} {row['method']}: projected from {row['projected_from']}")
        between = f"[{duration(row['seconds_low'])}, {duration(row['seconds_high'])}]" if row["projected"] else ""
        each = row["seconds_per_draw"]
        lines.append(
            [
                row["model"],
                row["method"],
                duration(row["fit_seconds"] + row["score_seconds"]) + (" *" if row["projected"] else "  "),
                between,
                duration(row["load_seconds"]),
                duration(row["fit_seconds"]) if row["fit_seconds"] > 1e-3 else "-",
                duration(row["score_seconds"]),
                bytes_text(row["peak_memory_bytes"]),
                bytes_text(row["disk_bytes"]) if row["disk_bytes"] else "-",
                duration(each) if each else "-",
                f"{row['floor_ratio']:.2f}" if row["floor_ratio"] else "-",
            ]
        )
    text = table(header, lines, left=2)
    if any(row["projected"] for row in rows):
        text += "\n* projected from smaller sizes; the interval is of fit + score"
    return "\n".join([text, *notes])


def write_results(out: Path, run_id: str, command: str, sweep: Sweep) -> dict[str, Any]:
    """scaling.csv and scaling.json, whole or not at all; after every point, so that nothing measured is lost."""
    for row in sweep.rows:
        row["run_id"] = run_id
    estimators = by_device(sweep.rows)
    record = {
        "run_id": run_id,
        "command": command,
        "setting": {
            name: value
            for name, value in sweep.specs[0].items()
            if name not in ("configuration", "model", "method", "options", "weights", "weights_name")
        },
        "options": {spec["method"]: spec["options"] for spec in sweep.specs},
        "budget_seconds": sweep.arguments.budget_seconds,
        "total_seconds": sweep.arguments.total_seconds,
        "versions": versions(),
        "commit": code_commit(),
        "code": code_fingerprint(),
        "cost_code": cost_fingerprint(),
        "cores": os.cpu_count(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - sweep.started, 1),
        "slopes": {device: slopes(estimator) for device, estimator in estimators.items()},
        "crossovers": {
            device: [asdict(crossover) for crossover in crossovers(estimator)]
            for device, estimator in estimators.items()
        },
        "rows": sweep.rows,
        "points": sweep.points,
    }
    write_both(out, record, sweep.rows)
    return record


def write_both(out: Path, record: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    write_whole(out / "scaling.json", json.dumps(without_nan(record), indent=1) + "\n")
    write_whole(out / "scaling.csv", pd.DataFrame(rows, columns=COLUMNS).to_csv(index=False))


# ---- the command ----


def fill_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by device; says so where it is not the paper's setting."""
    from retrain.train import choose_device

    cpu = not arguments.estimate and choose_device(arguments.device).type == "cpu"
    changed = []
    for name, value in (ON_CPU if cpu else PAPER).items():
        if getattr(arguments, name) is None and not (arguments.estimate and name == "methods"):
            setattr(arguments, name, value)
            if cpu and name in ("train", "tokens"):
                changed.append(f"--{name} {value} (the paper: {PAPER[name]})")
    if changed:
        print(f"on a CPU, a smaller setting: {', '.join(changed)}", file=sys.stderr)
    for name in ("budget_seconds", "total_seconds"):
        if getattr(arguments, name) is not None and getattr(arguments, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; expected seconds above 0")
    arguments.chains = min(arguments.chains, arguments.draws)


def estimate_command(arguments: argparse.Namespace) -> int:
    source = arguments.source or "results/scaling/scaling.csv"
    if arguments.against:
        compared = against(by_device(read_rows(source)), read_rows(arguments.against))
        if not compared:
            raise UsageError(f"{arguments.against} has no row of a device and method that {source} has too")
        print(json.dumps(without_nan(compared), indent=1) if arguments.json else show_against(compared))
        return 0
    if not arguments.model:
        raise UsageError(f"--estimate needs --model: one of {', '.join(SUITE)}, or a model folder")
    configuration = suite_configuration(arguments.model)
    queries = int(arguments.queries) if arguments.queries.isdigit() else len(load_queries(arguments.queries))
    setting = Setting(
        train=arguments.train,
        queries=queries,
        tokens=arguments.tokens,
        draws=arguments.draws,
        fit_examples=arguments.fit_examples or arguments.train,
    )
    estimators = by_device(read_rows(source))
    if not estimators:
        raise UsageError(f"{source} has no row that was measured; run python -m bench.scaling first")
    found = estimates(estimators, configuration, setting, arguments.methods)
    if arguments.json:
        print(json.dumps(without_nan(found), indent=1))
        return 0
    print(show_estimates(found, configuration, setting, source))
    for device, estimator in estimators.items():
        if text := show_crossovers(estimator, crossovers(estimator)):
            print(f"\n{device}, at the measured setting:\n{text}")
    return 0


def merge_command(arguments: argparse.Namespace, command: str) -> int:
    for path in arguments.merge:
        if not Path(path).is_file():
            raise UsageError(f"--merge {path}: there is no such file; expected a scaling.json of an earlier sweep")
    records = read_records(arguments.merge)
    check_out(arguments.out)
    rows, points = merged_rows(records)
    estimators = by_device(rows)
    record = {
        **records[0],
        "command": command,
        "merged": [{name: one[name] for name in ("run_id", "command", "finished", "seconds")} for one in records],
        "options": {method: options for one in records for method, options in one["options"].items()},
        "slopes": {device: slopes(estimator) for device, estimator in estimators.items()},
        "crossovers": {device: [asdict(c) for c in crossovers(one)] for device, one in estimators.items()},
        "rows": rows,
        "points": points,
    }
    out = Path(arguments.out)
    unwritten = why_unwritten(lambda: write_both(out, record, rows), out)
    print(show(rows))
    for device, estimator in estimators.items():
        if text := show_crossovers(estimator, crossovers(estimator)):
            print(f"\n{device}:\n{text}")
    if unwritten:
        print(f"python -m bench.scaling: {unwritten}", file=sys.stderr)
        return 1
    print(f"\ntable: {out / 'scaling.csv'}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = shlex.join(["python", "-m", "bench.scaling", *argv])
    try:
        if arguments.merge:
            return merge_command(arguments, command)
        fill_defaults(arguments)
        if arguments.estimate:
            return estimate_command(arguments)
        check_device(arguments.device)
        check_out(arguments.out)
        sweep = Sweep(arguments, Store(arguments.cache))
        identity = [point_config(spec, sweep.budget()) for spec in sweep.specs]
        run_id = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]
        out, unwritten = Path(arguments.out), [""]

        def write() -> None:
            unwritten[0] = why_unwritten(lambda: write_results(out, run_id, command, sweep), out)

        sweep.run(write)
    except (UsageError, StoreError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"{parser.prog}: interrupted; finished points are in {arguments.cache}, and the same command goes on",
            file=sys.stderr,
        )
        return 130
    if arguments.json:
        print(json.dumps(without_nan(sweep.rows), indent=1))
    else:
        print(show(sweep.rows))
        for device, estimator in by_device(sweep.rows).items():
            if text := show_crossovers(estimator, crossovers(estimator)):
                print(f"\n{device}:\n{text}")
        seconds = time.monotonic() - sweep.started
        where = "" if unwritten[0] else f"; table: {out / 'scaling.csv'}"
        print(f"\nrun {run_id} in {seconds:.0f} s ({sweep.num_kept} points were kept){where}")
    if unwritten[0]:
        print(f"{parser.prog}: {unwritten[0]}; the same command writes it, from {arguments.cache}", file=sys.stderr)
        return 1
    return 1 if all(row["error"] for row in sweep.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
