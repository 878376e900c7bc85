"""What does attribution cost as models grow? Seconds, memory and disk of each method across the Pythia suite.

    python -m bench.scaling                                           # the paper's setting; on a CPU a small one
    python -m bench.scaling --model 14m 70m 410m --methods bif ekfac --fit-examples 400 2000 --out results/scaling
    python -m bench.scaling --estimate --model 2.8b --train 400 --queries 18 --draws 2000    # before anything is run
    python -m bench.scaling --check                                   # every model predicted from the others
    python -m bench.scaling --merge RUN/scaling.json ... --out results/scaling    # one table from several sweeps

The paper's scaling comparison: 400 training sequences, 18 queries, 150 tokens, bfloat16; BIF with 4 chains x 500
draws, EK-FAC by kronfluence with its extreme-memory-reduction arguments, fitted on 1,000,000 sequences. The fitting set
decides which of them is cheaper, so it is an axis like any other (`--fit-examples`).

A point is one model and one method; EK-FAC's has every fitting set and number of queries in it, since they share one
eigendecomposition. It is measured in a process of its own (bench/scaling/point.py says what is counted). One whose
whole run does not fit its budget is measured at smaller sizes and projected; one that fails is a row with its reason.
Finished points are kept: interrupt at any time, and the same command goes on. Weights and tokens are random: cost
depends on shapes alone.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import records
from bench.arguments import Parser, at_least, check_device, check_out, run_cli
from bench.scaling.estimate import PAPER_FITTED, RIVALS, Estimator, by_device, held_out
from bench.scaling.methods import COMPARED, axis_of, build_method, method_options
from bench.scaling.report import LIBRARY_FITTED, estimate_text, progress_line, show_held_out, show_rows
from bench.scaling.rows import RATES, Spec, make_rows, merge_rows, read_records, read_rows, write_csv
from bench.scaling.suite import MOST_FITTED, SUITE, Configuration, Setting, named_configuration
from retrain.errors import UsageError
from retrain.jobs import terminable
from retrain.safe_files import write_whole
from retrain.source import library_versions, source_fingerprint
from retrain.store import Store, default_cache
from retrain.units import choose_device, describe_device

PAPER_SETTING: dict[str, Any] = {
    "model": list(SUITE), "train": 400, "tokens": 150, "fit_examples": [400, 2_000, 10_000, PAPER_FITTED],
}  # fmt: skip
# On a CPU the paper's setting would take days: fewer, shorter sequences of the smallest models.
CPU_SETTING: dict[str, Any] = {"model": ["14m", "31m"], "train": 8, "tokens": 32, "fit_examples": [8, 16]}
BUDGET_SECONDS = {"cuda": 600.0, "cpu": 20.0}  # of one point; beyond it, projected
POINT_VERSION = 5  # raised when what a point measures changes
CHAINS = 4  # of BIF, as in the paper
TIMED_DRAWS = 100  # of BIF: so many are timed, wherever the budget has room for them
SEED = 1  # of weights, tokens and methods
ROOT = Path(__file__).resolve().parents[2]


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.scaling", description="Seconds, memory and disk across the Pythia suite.")
    add = parser.add_argument
    add("--model", nargs="+", help=f"of {' '.join(SUITE)}, or model folders (default: all; on a CPU 14m 31m)")
    add("--methods", nargs="+", help=f"of baselines/, or module:Class (default: {' '.join(COMPARED)})")
    add("--train", type=at_least(2), help="training sequences (default: 400; on a CPU 8)")
    add("--queries", nargs="+", type=at_least(1), default=[18], help="one number or several (default: 18)")
    add("--tokens", type=at_least(2), help="length of every sequence (default: 150; on a CPU 32)")
    add("--draws", type=at_least(2), default=2000, help="of BIF, all chains together (default: 2000)")
    add(
        "--fit-examples", nargs="+", type=at_least(2), metavar="N",
        help="sequences EK-FAC is fitted on (default: 400 2000 10000 1000000, the paper's the last; on a CPU 8 16; "
        "of an estimate --train 100000 1000000)",
    )  # fmt: skip
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--cache", default=default_cache(), help="where finished points are kept (default: %(default)s)")
    add("--out", default="runs/scaling", help="where scaling.csv and scaling.json go (default: %(default)s)")
    add("--json", action="store_true", help="print an estimate or a check as a JSON list")
    instead = parser.add_argument_group("instead of measuring", "one of these; nothing is run")
    add = instead.add_mutually_exclusive_group().add_argument
    add("--estimate", action="store_true", help="predict the cost of --model from measured rows")
    add("--check", nargs="?", const="", metavar="FILE", help="every model predicted from the others; or FILE's rows")
    add("--merge", nargs="+", metavar="JSON", help="one table from these sweeps' scaling.json")
    rates = "scaling.csv whose rows estimates and checks rest on (default: the package's)"
    instead.add_argument("--results", metavar="FILE", help=rates)
    return parser


# ---- what is measured: a specification a point, plain data that holds everything it depends on ----


def specifications(request: argparse.Namespace) -> list[Spec]:
    """BIF and EK-FAC side by side from the smallest model to the largest, then the other methods."""
    device = choose_device(request.device)
    shared = {
        "train": request.train, "tokens": request.tokens, "seed": SEED,
        "weights_name": "random", "text_name": "random tokens",
        "device": str(device), "device_name": describe_device(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
    }  # fmt: skip
    models: dict[str, Configuration] = {}
    for name in dict.fromkeys(request.model):
        made = named_configuration(name)
        if made.positions < request.tokens:
            raise UsageError(f"--tokens {request.tokens}: {name} takes at most {made.positions}")
        if models.setdefault(made.name, made) is not made:
            raise UsageError(f"{name} would have another model's name in every table; rename its folder")
    shapes = sorted(models.values(), key=lambda one: one.num_parameters)
    names = list(dict.fromkeys(request.methods))
    rivals = [name for name in RIVALS if name in names]
    return [
        spec
        for group in (rivals, [name for name in names if name not in rivals])
        for shape in shapes
        for method in group
        for spec in _specifications_of(request, shape, method, shared)
    ]


def _specifications_of(
    request: argparse.Namespace, shape: Configuration, method: str, shared: dict[str, Any]
) -> list[Spec]:
    chains = min(CHAINS, request.draws)
    options = method_options(method, shape, chains=chains, cuda=shared["device"].startswith("cuda"))
    built = build_method(method, options)
    axis = axis_of(method, built)
    # Whether it takes its curvature from a number of fitting sequences that can be chosen.
    own_fit = hasattr(built, "fit_examples") and getattr(built, "localiser", "") != "isotropic"
    fitted = method == "ekfac" or own_fit
    chains = getattr(built, "chains", 0) if axis == "draws" else 0
    common = {
        **shared, "configuration": asdict(shape), "method": method, "options": options, "axis": axis, "fitted": fitted,
        "chains": chains, "draws": -(-request.draws // chains) * chains if chains else 0,
        "timed_draws": min(TIMED_DRAWS, request.draws) if chains else 0,
        "cost_code": source_fingerprint(type(built).__module__, "bench.measure", "bench.scaling.methods"),
    }  # fmt: skip
    fit_sets, counts = sorted(set(request.fit_examples)) if fitted else [0], sorted(set(request.queries))
    if method == "ekfac":
        together = [(fit_sets, counts)]
    elif fit_sets[0] > MOST_FITTED:
        raise UsageError(f"{method} is measured with at most {MOST_FITTED:,} --fit-examples; --estimate projects more")
    else:  # larger fitting sets are the estimate's to project
        together = [([fit], [count]) for fit in fit_sets if fit <= MOST_FITTED for count in counts]
    return [
        {**common, "fit_sets": fits, "query_counts": counts, "fit_examples": fits[0], "queries": counts[0]}
        for fits, counts in together
    ]


def point_config(spec: Spec) -> dict[str, Any]:
    """The key of a finished point: measurements belong to the code that decides seconds and bytes."""
    return {
        "version": POINT_VERSION,
        "point": {name: value for name, value in spec.items() if name != "device"},  # a number of a GPU
        "versions": library_versions("torch", "transformers", "kronfluence", "traker"),
        "cores": os.cpu_count() if spec["dtype"] == "float32" else 0,
        "budget": budget_of(spec),
    }


def budget_of(spec: Spec) -> float:
    return BUDGET_SECONDS[spec["device"].partition(":")[0]]


# ---- measuring ----


def measure_point(spec: Spec, limit: float) -> dict[str, Any]:
    """The point's result, from a process of its own; after `limit` seconds what it had measured until then."""
    result = Path(spec["result"])
    path, errors, stopped = result.with_suffix(".spec"), result.with_suffix(".err"), ""
    path.write_text(json.dumps(spec))
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.scaling.point", str(path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True,
            env={**os.environ, "PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
    try:
        process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        stopped = f"stopped after {limit:.0f} s"
    finally:  # the point and whatever it started
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {"rungs": []}
    if stopped:
        found["stopped"] = stopped
    elif not found.get("finished") and not found.get("error"):
        said = errors.read_text(errors="replace").strip().rpartition("\n")[2][:200]
        killed = "killed (signal 9): out of memory, or somebody ended it"
        ended = killed if process.returncode == -signal.SIGKILL else f"ended with {process.returncode}: {said}"
        found["error"] = f"the process was {ended}"
    return found


def sweep_command(arguments: argparse.Namespace, command: str) -> int:
    """Measures what the cache does not have, and writes the table after every point."""
    if arguments.results:
        raise UsageError("--results goes with --estimate or --check, which rest on rates")
    with_defaults(arguments)
    check_out(arguments.out)
    specs, store, out = specifications(arguments), Store(arguments.cache), Path(arguments.out)
    configs = [point_config(spec) for spec in specs]
    entries = [store.read("scaling", config) for config in configs]
    known = [entry.record["result"] if entry else None for entry in entries]
    peak_flops = next((result["peak_flops"] for result in known if result and result.get("peak_flops")), None)
    record: dict[str, Any] = {"run_id": records.run_id_of(*configs), "command": command, "rows": [], "points": []}
    unwritten = ""
    with terminable(), store.scratch() as folder:
        for index, (spec, config, result) in enumerate(zip(specs, configs, known, strict=True)):
            place, method = f"[{index + 1}/{len(specs)}]", spec["method"]
            if result is None:
                print(f"{place} {spec['configuration']['name']} {method}: measuring ...", file=sys.stderr, flush=True)
                here = {"budget_seconds": budget_of(spec), "scratch": str(folder), "result": f"{folder}/{index}.json"}
                asked = {**spec, **here, "measure_peak": peak_flops is None}
                result = measure_point(asked, 3 * budget_of(spec) + 300)
                peak_flops = peak_flops or result.get("peak_flops")
                result["peak_flops"] = peak_flops
                # Kept is a point that came to its end with every row it was asked for.
                failed = any(row["error"] for row in make_rows(spec, result, None))
                if not (result.get("error") or result.get("stopped") or failed):
                    store.write("scaling", config, {}, {"result": records.without_nan(result)})
            rows = make_rows(spec, result, result.get("peak_flops"))
            said = {None}
            for row in rows:
                row["run_id"] = record["run_id"]
                if not row["error"] or row["error"] not in said:  # one reason only once
                    print(f"{place} {progress_line(row)}", file=sys.stderr, flush=True)
                said.add(row["error"])
            record["rows"] += rows
            point = {"model": rows[0]["model"], "method": method, "spec": spec, "cost_code": spec["cost_code"]}
            record["points"].append({**point, "version": POINT_VERSION, **result})
            records.keep_earlier(out / "scaling.json", record["run_id"])
            record |= records.provenance(spec["device_name"])
            unwritten = records.try_write(partial(write_table, out, record), out)
    print(show_rows(record["rows"]))
    kept = f"{sum(result is not None for result in known)} of {len(specs)} points from the cache"
    print(f"\nrun {record['run_id']} ({kept}); table: {out / 'scaling.csv'}")
    if unwritten:
        print(f"tda-bench scaling: {unwritten}; the same command writes it", file=sys.stderr)
    return 1 if unwritten or all(row["error"] for row in record["rows"]) else 0


def with_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by device; says so where it is not the paper's setting."""
    check_device(arguments.device)
    cpu = choose_device(arguments.device).type == "cpu"
    arguments.methods = arguments.methods or list(COMPARED)
    setting = CPU_SETTING if cpu else PAPER_SETTING
    missing = {name: value for name, value in setting.items() if getattr(arguments, name) is None}
    vars(arguments).update(missing)
    changed = [f"--{name} {missing[name]} (the paper: {PAPER_SETTING[name]})" for name in ("train", "tokens")
               if cpu and name in missing]  # fmt: skip
    if changed:
        print(f"on a CPU, a smaller setting: {', '.join(changed)}", file=sys.stderr)


def write_table(out: Path, record: dict[str, Any]) -> None:
    write_whole(out / "scaling.json", json.dumps(records.without_nan(record), indent=1) + "\n")
    write_csv(out / "scaling.csv", record["rows"])


# ---- what runs nothing ----


def merge_command(arguments: argparse.Namespace, command: str) -> int:
    sweeps = read_records(arguments.merge)
    check_out(arguments.out)
    of_each = ("run_id", "commit", "code", "command", "finished", "seconds", "merged")
    rows = merge_rows(sweeps)
    record = {
        **{name: sweeps[0].get(name) for name in ("run_id", "versions", "commit", "code", "cores", "finished")},
        "command": command,
        "rows_by": {
            "commit": records.code_commit(),
            "code": records.code_fingerprint(),
        },  # the points are by the code of `merged`
        "merged": [{name: one.get(name) for name in of_each} for one in sweeps],
        "rows": rows,
        "points": [point for one in sweeps for point in one["points"]],
    }
    write_table(Path(arguments.out), record)
    print(show_rows(rows))
    return 0


def rates_of(arguments: argparse.Namespace) -> dict[str, Estimator]:
    source = arguments.results or RATES
    found = by_device(read_rows(source))
    if not found:
        raise UsageError(f"{source} has no row that was measured; run tda-bench scaling first")
    return found


def estimate_command(arguments: argparse.Namespace) -> int:
    """One estimate a method and number of queries; of a method that is fitted, one a fitting set."""
    if len(arguments.model or ()) != 1:
        raise UsageError(f"--estimate needs one --model: one of {', '.join(SUITE)}, or a model folder")
    shape = named_configuration(arguments.model[0])
    train, tokens = (getattr(arguments, name) or PAPER_SETTING[name] for name in ("train", "tokens"))
    if shape.positions < tokens:
        raise UsageError(f"--tokens {tokens}: {arguments.model[0]} takes at most {shape.positions}")
    fit_sets = sorted(set(arguments.fit_examples or (train, LIBRARY_FITTED, PAPER_FITTED)))
    source, texts, plain = arguments.results or "the package's rates", [], []
    for device, estimator in rates_of(arguments).items():
        methods = arguments.methods or estimator.methods()
        if unknown := [name for name in methods if name not in estimator.methods()]:
            known = ", ".join(estimator.methods())
            raise UsageError(f'no measured row of "{unknown[0]}"; measured: {known}. Measure it, and give --results')
        for queries in arguments.queries:
            setting = Setting(train, queries, tokens, arguments.draws, fit_sets[0])
            found = [
                estimator.estimate(method, shape, replace(setting, fit_examples=size))
                for method in methods
                for size in (fit_sets if estimator.fitted(method) else fit_sets[:1])
            ]
            plain += [{"device": device, **asdict(one), "queries": queries} for one in found]
            if not arguments.json:
                texts.append(estimate_text(device, estimator, shape, setting, found, source))
    print(json.dumps(records.without_nan(plain), indent=1) if arguments.json else "\n\n\n".join(texts))
    return 0


def check_command(arguments: argparse.Namespace) -> int:
    """0 where every row is inside the interval that other models, or other sweeps, give it; else 1."""
    fresh = by_device(read_rows(arguments.check)) if arguments.check else {}
    checked = {
        device: held_out(estimator, fresh.get(device))
        for device, estimator in rates_of(arguments).items()
        if device in fresh or not arguments.check
    }
    everything = [{"device": device, **one} for device, found in checked.items() for one in found]
    if not everything:
        whose = f"{arguments.check} has no row of a device, method and shape that the rates are of"
        raise UsageError(whose if arguments.check else "too few models were measured; expected at least 4")
    if arguments.json:
        print(json.dumps(records.without_nan(everything), indent=1))
    else:
        for device, found in checked.items():
            print(f"{device}, {arguments.check or 'each model'} from the others:\n{show_held_out(found)}")
    return 0 if all(one["inside"] for one in everything) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    command = records.command_line("bench.scaling", argv)
    kept = f"finished points are in {arguments.cache}, and the same command goes on"

    def work() -> int:
        if arguments.merge:
            return merge_command(arguments, command)
        if arguments.estimate:
            return estimate_command(arguments)
        if arguments.check is not None:
            return check_command(arguments)
        try:
            return sweep_command(arguments, command)
        except SystemExit:  # SIGTERM
            print(f"{parser.prog}: ended; {kept}", file=sys.stderr)
            raise

    return run_cli(parser.prog, work, interrupted=kept)


if __name__ == "__main__":
    sys.exit(main())
