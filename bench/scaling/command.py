"""What does attribution cost as models grow? Seconds, memory and disk of each method across the Pythia suite.

    python -m bench.scaling                                           # the paper's setting; on a CPU a small one
    python -m bench.scaling --model 14m 70m 410m --methods bif ekfac --fit-examples 400 2000 --out results/scaling
    python -m bench.scaling --estimate --model 2.8b --train 400 --queries 18 --draws 2000    # before anything is run
    python -m bench.scaling --check                                   # every model predicted from the others
    python -m bench.scaling --merge RUN/scaling.json ... --out results/scaling    # one table from several sweeps

The paper's scaling comparison: 400 training sequences, 18 queries, 150 tokens, bfloat16; BIF with 4 chains x 500
draws, EK-FAC by kronfluence with its extreme-memory-reduction arguments, fitted on 1,000,000 sequences. The fitting set
decides which of them is cheaper, so it is an axis like any other (`--fit-examples`).

Every point is measured in a process of its own (bench/scaling/point.py says what is counted). A point whose whole run
does not fit its budget is measured at smaller sizes and projected; one that fails is a row with its reason. Finished
points are kept: interrupt at any time, and the same command goes on. Weights and tokens are random: cost depends on
shapes alone.

A point is one model and one method; EK-FAC's has every fitting set and number of queries in it, since they share one
eigendecomposition. Its specification is plain data that holds everything it depends on.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.arguments import Parser, at_least, check_device, check_out, run_cli
from bench.records import code_commit, code_fingerprint, keep_earlier, try_write, versions, without_nan
from bench.scaling.costs import Setting
from bench.scaling.estimate import PAPER_FITTED, Estimator, by_device, held_out
from bench.scaling.methods import COMPARED, axis_of, build_method, is_fitted, method_options
from bench.scaling.point import MOST_FITTED
from bench.scaling.projection import make_rows, merge_rows, read_records
from bench.scaling.report import (
    LIBRARY_FITTED,
    estimate_text,
    estimates,
    progress_line,
    show_held_out,
    show_rows,
)
from bench.scaling.rows import RATES, named_configuration, read_rows, write_csv
from retrain.errors import UsageError
from retrain.jobs import terminable
from retrain.models.pythia_suite import SUITE, Configuration
from retrain.safe_files import write_whole
from retrain.store import Store, canonical_json, default_cache

PAPER_SETTING: dict[str, Any] = {
    "model": list(SUITE),
    "methods": list(COMPARED),
    "train": 400,
    "tokens": 150,
    "fit_examples": [400, 2_000, 10_000, PAPER_FITTED],
    "budget_seconds": 600.0,
}
# On a CPU the paper's setting would take days: fewer, shorter sequences of the smallest models.
CPU_SETTING: dict[str, Any] = {
    "model": ["14m", "31m"],
    "methods": list(COMPARED),
    "train": 8,
    "tokens": 32,
    "fit_examples": [8, 16],
    "budget_seconds": 20.0,
}
ESTIMATE_SETTING = {name: PAPER_SETTING[name] for name in ("train", "tokens")}
POINT_VERSION = 4  # raised when what a point measures changes
CHAINS = 4  # of BIF, as in the paper
TIMED_DRAWS = 100  # of BIF: so many are timed, wherever the budget has room for them
ROOT = Path(__file__).resolve().parents[2]
SHARED_FILES = (
    *(f"retrain/models/{name}.py" for name in ("causal_lm", "fused_cross_entropy", "fused_cross_entropy_kernels")),
    *(f"retrain/models/{name}.py" for name in ("pretrained", "pythia_suite")),
    *(f"bench/{name}.py" for name in ("measure", "scaling/point", "scaling/methods")),
)
METHOD_FILES = {
    "bif": ("baselines/bif", "baselines/support", "baselines/gradsim.py"),
    "ekfac": ("baselines/ekfac.py", "baselines/support"),
}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.scaling", description="Seconds, memory and disk across the Pythia suite.")
    add = parser.add_argument_group("what is measured").add_argument
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
    add("--layers", nargs="+", type=at_least(1), metavar="N", help="depths EK-FAC is measured at (default: as fits)")
    add = parser.add_argument_group("how").add_argument
    add("--budget-seconds", type=float, help="of one point; beyond it, projected (default: 600; on a CPU 20)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--seed", type=at_least(0), default=1, help="of weights, tokens and methods (default: 1)")
    add("--cache", default=default_cache(), help="where finished points are kept (default: %(default)s)")
    add("--out", default="runs/scaling", help="where scaling.csv and scaling.json go (default: %(default)s)")
    add("--json", action="store_true", help="print rows (or estimates) as a JSON list instead of tables")
    instead = parser.add_argument_group("instead of measuring", "one of these; nothing is run")
    add = instead.add_mutually_exclusive_group().add_argument
    add("--estimate", action="store_true", help="predict the cost of --model from measured rows")
    add("--check", nargs="?", const="", metavar="FILE", help="every model predicted from the others; or FILE's rows")
    add("--merge", nargs="+", metavar="JSON", help="one table from these sweeps' scaling.json")
    rates = "scaling.csv whose rows estimates and checks rest on (default: the package's)"
    instead.add_argument("--results", metavar="FILE", help=rates)
    return parser


# ---- specifications ----


def specifications(request: Namespace) -> list[dict[str, Any]]:
    """One a point: BIF and EK-FAC side by side from the smallest model to the largest, then the other methods."""
    models = [(name, named_configuration(name)) for name in dict.fromkeys(request.model)]
    shown = [made.name for _, made in models]
    if several := [name for name, made in models if shown.count(made.name) > 1]:
        raise UsageError(
            f"{' and '.join(several)} would have one name in every table; name one of them alone, or rename a folder"
        )
    models.sort(key=lambda pair: pair[1].num_parameters)
    for name, configuration in models:
        if configuration.positions < request.tokens:
            raise UsageError(f"--tokens {request.tokens}: {name} takes at most {configuration.positions}")
    names = list(dict.fromkeys(request.methods))
    first = [name for name in ("bif", "ekfac") if name in names]
    shared = _shared_fields(request)
    found = [
        spec
        for group in (first, [name for name in names if name not in first])
        for name, configuration in models
        for method in group
        for spec in _specifications_of(request, name, configuration, method, shared)
    ]
    # Larger fitting sets than can be measured are the estimate's to project, but for EK-FAC's.
    too_many = ", ".join(f"{count:,}" for count in sorted(set(request.fit_examples)) if count > MOST_FITTED)
    for method in names if too_many else ():
        own = [spec for spec in found if spec["method"] == method]
        words = (
            f"--fit-examples {too_many}: {method} is measured with at most {MOST_FITTED:,}; --estimate projects more"
        )
        if not own:
            raise UsageError(words)
        if method != "ekfac" and own[0]["fitted"]:
            print(words, file=sys.stderr)
    return found


def content_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _shared_fields(request: Namespace) -> dict[str, Any]:
    """What every point of the request has in common."""
    from retrain.units import choose_device, describe_device

    device = choose_device(request.device)
    return {
        "train": request.train,
        "tokens": request.tokens,
        "weights_name": "random",
        "text_name": "random tokens",
        "device": str(device),
        "device_name": describe_device(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "seed": request.seed,
    }


def _specifications_of(
    request: Namespace, name: str, configuration: Configuration, method: str, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    chains, cuda = min(CHAINS, request.draws), shared["device"].startswith("cuda")
    options = method_options(method, configuration, chains=chains, cuda=cuda)
    built = build_method(method, options)
    axis, fitted = axis_of(method, built), is_fitted(method, built)
    chains = getattr(built, "chains", 0) if axis == "draws" else 0
    common = {
        **shared,
        "model": name,
        "configuration": asdict(configuration),
        "method": method,
        "options": options,
        "axis": axis,
        "fitted": fitted,
        "chains": chains,
        "draws": -(-request.draws // chains) * chains if chains else 0,
        "timed_draws": min(TIMED_DRAWS, request.draws) if chains else 0,
        "depths": [],
    }
    fit_sets = sorted(set(request.fit_examples)) if fitted else [0]
    counts = sorted(set(request.queries))
    if method == "ekfac":
        depths = sorted({min(depth, configuration.layers) for depth in request.layers or ()})
        lists = {"fit_sets": fit_sets, "query_counts": counts, "depths": depths}
        return [{**common, **lists, "fit_examples": fit_sets[0], "queries": counts[0]}]
    return [
        {**common, "fit_sets": [fit], "query_counts": [count], "fit_examples": fit, "queries": count}
        for fit in fit_sets
        if fit <= MOST_FITTED
        for count in counts
    ]


@lru_cache
def cost_fingerprint(method: str) -> str:
    """Of the code that decides seconds and bytes of a method: measurements belong to it."""
    names = (*SHARED_FILES, *METHOD_FILES.get(method, ("baselines",)))
    files = {
        path for name in names for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    }
    return content_digest(b"".join(f"{path.name}\0".encode() + path.read_bytes() for path in sorted(files)))


def point_config(spec: dict[str, Any], budget: float | None) -> dict[str, Any]:
    """The key of a finished point. One measured whole is good for any budget; a projected one for its own."""
    from retrain.source import library_versions

    return {
        "version": POINT_VERSION,
        "point": {name: value for name, value in spec.items() if name not in ("model", "device")},
        "versions": library_versions("torch", "transformers", "kronfluence", "traker"),
        "code": cost_fingerprint(spec["method"]),
        "cores": os.cpu_count() if spec["dtype"] == "float32" else 0,
        "budget": budget,
    }


# ---- the process of a point ----


def measure_point(spec: dict[str, Any], limit: float) -> dict[str, Any]:
    """The point's result; after `limit` seconds what it had measured until then."""
    result = Path(spec["result"])
    path, errors = result.with_suffix(".spec"), result.with_suffix(".err")
    path.write_text(json.dumps(spec))
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.scaling.point", str(path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True,
            env={**os.environ, "PYTHONPATH": search},
        )  # fmt: skip
    stopped = ""
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
        found["error"] = how_it_ended(process.returncode, errors)
    return found


def how_it_ended(code: int, errors: Path) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed (signal 9): out of memory, or somebody ended it"
    if code < 0:
        return f"the process was ended by signal {-code}"
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return f"the process exited with {code}" + (f": {lines[-1].strip()[:200]}" if lines else "")


# ---- the sweep ----


class Sweep:
    def __init__(self, request: Namespace, store: Store):
        self.store, self.budget_seconds = store, request.budget_seconds
        self.specs = specifications(request)
        self.started = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.num_kept = 0
        self.peak_flops: float | None = None
        identity = [point_config(spec, self.budget_seconds) for spec in self.specs]
        self.run_id = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]

    def kept(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        for budget in (None, self.budget_seconds):
            entry = self.store.read("scaling", point_config(spec, budget))
            if entry is not None:
                return entry.record["result"]
        return None

    def run(self, after_each: Callable[[], None]) -> None:
        known = [self.kept(spec) for spec in self.specs]
        self.peak_flops = next((result["peak_flops"] for result in known if result and result.get("peak_flops")), None)
        with terminable(), self.store.scratch() as folder:
            for index, (spec, result) in enumerate(zip(self.specs, known, strict=True)):
                if result is None:
                    name = f"{spec['configuration']['name']} {spec['method']}"
                    print(f"[{index + 1}/{len(self.specs)}] {name}: measuring ...", file=sys.stderr, flush=True)
                    result = self.measure(spec, folder)
                    self.peak_flops = self.peak_flops or result.get("peak_flops")
                    result["peak_flops"] = self.peak_flops
                    self.keep(spec, result)
                else:
                    self.num_kept += 1
                self.add(spec, result, index)
                after_each()

    def measure(self, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
        here = {
            "budget_seconds": self.budget_seconds, "scratch": str(folder),
            "result": f"{folder}/{len(self.points)}.json", "rehearse": spec["device"].startswith("cuda"),
            "measure_peak": self.peak_flops is None,
        }  # fmt: skip
        return measure_point({**spec, **here}, 3 * self.budget_seconds + 300)

    def keep(self, spec: dict[str, Any], result: dict[str, Any]) -> None:
        """A point that came to its end with every row it was asked for; one measured whole is good for any budget."""
        rows = make_rows(spec, result, None)
        if not (result.get("error") or result.get("stopped") or any(row["error"] for row in rows)):
            config = point_config(spec, self.budget_seconds if any(row["projected"] for row in rows) else None)
            self.store.write("scaling", config, {}, {"result": without_nan(result)})

    def add(self, spec: dict[str, Any], result: dict[str, Any], index: int) -> None:
        rows = make_rows(spec, result, result.get("peak_flops"))
        said: set[str] = set()
        for row in rows:
            row["run_id"] = self.run_id
            if row["error"] not in said:  # one reason may leave several rows without numbers
                print(progress_line(row, index + 1, len(self.specs)), file=sys.stderr, flush=True)
            said |= {row["error"]} - {None}
        self.rows += rows
        public = {name: value for name, value in spec.items() if name not in ("model", "device")}  # a path, a number
        self.points.append(
            {
                "model": rows[0]["model"], "method": spec["method"], "spec": public,
                "version": POINT_VERSION, "cost_code": cost_fingerprint(spec["method"]), **result,
            }
        )  # fmt: skip

    def record(self, command: str) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "command": command,
            "budget_seconds": self.budget_seconds,
            "versions": versions(),
            "commit": code_commit(),
            "code": code_fingerprint(),
            "cores": os.cpu_count(),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": self.rows,
            "points": self.points,
        }


# ---- measuring ----


def sweep_command(arguments: argparse.Namespace, command: str) -> int:
    """Measures, and writes the table after every point."""
    if arguments.results:
        raise UsageError("--results goes with --estimate or --check, which rest on rates")
    with_defaults(arguments)
    check_out(arguments.out)
    out, sweep = Path(arguments.out), Sweep(arguments, Store(arguments.cache))
    unwritten = [""]

    def write() -> None:
        keep_earlier(out / "scaling.json", sweep.run_id)
        unwritten[0] = try_write(lambda: write_table(out, sweep.record(command)), out)

    try:
        sweep.run(write)
    except SystemExit:  # SIGTERM
        print(f"python -m bench.scaling: ended; {kept_in(arguments.cache)}", file=sys.stderr)
        raise
    show(sweep.rows, arguments.json)
    if not arguments.json:
        kept = f"{sweep.num_kept} of {len(sweep.specs)} points from the cache"
        print(
            f"\nrun {sweep.run_id} in {time.monotonic() - sweep.started:.0f} s ({kept}); table: {out / 'scaling.csv'}"
        )
    if unwritten[0]:
        again = f"the same command writes it, from {arguments.cache}"
        print(f"python -m bench.scaling: {unwritten[0]}; {again}", file=sys.stderr)
    return 1 if unwritten[0] or all(row["error"] for row in sweep.rows) else 0


def with_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by device; says so where it is not the paper's setting."""
    from retrain.units import choose_device

    check_device(arguments.device)
    cpu = choose_device(arguments.device).type == "cpu"
    changed = []
    for name, value in (CPU_SETTING if cpu else PAPER_SETTING).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
            if cpu and name in ESTIMATE_SETTING:
                changed.append(f"--{name} {value} (the paper: {PAPER_SETTING[name]})")
    if changed:
        print(f"on a CPU, a smaller setting: {', '.join(changed)}", file=sys.stderr)
    if not 0 < arguments.budget_seconds < math.inf:  # nor "nan"
        raise UsageError(f"--budget-seconds is {arguments.budget_seconds}; expected seconds above 0")


def write_table(out: Path, record: dict[str, Any]) -> None:
    write_whole(out / "scaling.json", json.dumps(without_nan(record), indent=1) + "\n")
    write_csv(out / "scaling.csv", record["rows"])


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    print(json.dumps(without_nan(list(rows)), indent=1) if as_json else show_rows(rows))


def kept_in(cache: str) -> str:
    return f"finished points are in {cache}, and the same command goes on"


# ---- what runs nothing ----


def merge_command(arguments: argparse.Namespace, command: str) -> int:
    records = read_records(arguments.merge)
    check_out(arguments.out)
    of_each = ("run_id", "commit", "code", "command", "finished", "seconds", "merged")
    record: dict[str, Any] = {
        **{name: records[0].get(name) for name in ("run_id", "versions", "commit", "code", "cores", "finished")},
        "command": command,
        "rows_by": {"commit": code_commit(), "code": code_fingerprint()},  # the points are by the code of `merged`
        "merged": [{name: one.get(name) for name in of_each} for one in records],
        "rows": merge_rows(records),
        "points": [point for one in records for point in one["points"]],
    }
    write_table(Path(arguments.out), record)
    show(record["rows"], arguments.json)
    return 0


def rates_of(arguments: argparse.Namespace) -> dict[str, Estimator]:
    source = arguments.results or RATES
    found = by_device(read_rows(source))
    if not found:
        raise UsageError(f"{source} has no row that was measured; run python -m bench.scaling first")
    return found


def estimate_command(arguments: argparse.Namespace) -> int:
    estimators, source = rates_of(arguments), arguments.results or "the package's rates"
    if len(arguments.model or ()) != 1:
        raise UsageError(f"--estimate needs one --model: one of {', '.join(SUITE)}, or a model folder")
    configuration = named_configuration(arguments.model[0])
    train, tokens = (getattr(arguments, name) or value for name, value in ESTIMATE_SETTING.items())
    if configuration.positions < tokens:
        raise UsageError(f"--tokens {tokens}: {arguments.model[0]} takes at most {configuration.positions}")
    fit_sets = sorted(set(arguments.fit_examples or (train, LIBRARY_FITTED, PAPER_FITTED)))
    texts, plain = [], []
    for device, estimator in estimators.items():
        for count in arguments.queries:
            setting = Setting(
                train=train, queries=count, tokens=tokens, draws=arguments.draws, fit_examples=fit_sets[0]
            )
            found = estimates(estimator, configuration, setting, fit_sets, arguments.methods)
            plain += [{"device": device, **asdict(one), "queries": count} for one in found]
            if not arguments.json:
                texts.append(estimate_text(device, estimator, configuration, setting, found, source))
    print(json.dumps(without_nan(plain), indent=1) if arguments.json else "\n\n\n".join(texts))
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
        print(json.dumps(without_nan(everything), indent=1))
    else:
        for device, found in checked.items():
            print(f"{device}, {arguments.check or 'each model'} from the others:\n{show_held_out(found)}")
    return 0 if all(one["inside"] for one in everything) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = shlex.join(["python", "-m", "bench.scaling", *argv])

    def work() -> int:
        if arguments.merge:
            return merge_command(arguments, command)
        if arguments.estimate:
            return estimate_command(arguments)
        if arguments.check is not None:
            return check_command(arguments)
        return sweep_command(arguments, command)

    return run_cli(parser.prog, work, interrupted=kept_in(arguments.cache))
