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
import contextlib
import hashlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from bench import lds
from bench.scaling_estimate import (
    by_device,
    crossovers,
    duration,
    estimates,
    read_rows,
    show_crossovers,
    show_estimates,
    slopes,
)
from bench.scaling_fits import Setting
from bench.scaling_problem import SAMPLED, load_queries
from bench.scaling_rows import COLUMNS, make_row
from retrain.models.pythia_suite import HUB_PREFIX, SUITE, Configuration, suite_configuration
from retrain.plugins import UsageError
from retrain.store import Store, StoreError, canonical_json, default_cache

METHODS = ("bif", "ekfac", "gradsim", "trak")
PAPER = {"models": list(SUITE), "train": 400, "tokens": 150, "budget_seconds": 600.0}
# On a CPU the paper's setting would take days: fewer and shorter sequences of the smallest models.
ON_CPU = {"models": ["14m", "31m"], "train": 16, "tokens": 32, "budget_seconds": 30.0}
POINT_VERSION = 1  # raised when what a point measures changes
LEAST_SECONDS = 5.0  # with less than this left, a point is not begun
COST_FILES = ("baselines", "retrain/models", "bench/runner.py", "bench/scaling_point.py", "bench/scaling_ekfac.py")
ROOT = Path(__file__).resolve().parent.parent


def make_parser() -> argparse.ArgumentParser:
    parser = lds.Parser(prog="python -m bench.scaling", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--models", nargs="+", help=f"of {' '.join(SUITE)}, or model folders (default: all; on a CPU 14m 31m)")
    add("--methods", nargs="+", help=f"files of baselines/, or package.module:Class (default: {' '.join(METHODS)})")
    add("--train", type=lds.at_least(2), help="training sequences (default: 400; on a CPU 16)")
    add("--queries", default="18", help="how many of our 18, or a JSON file of prompt and completion pairs")
    add("--tokens", type=lds.at_least(2), help="length of every sequence (default: 150; on a CPU 32)")
    add("--draws", type=lds.at_least(2), default=2000, help="of BIF, all chains together (default: 2000)")
    add("--chains", type=lds.at_least(1), default=4, help="of BIF (default: 4)")
    add("--fit-examples", type=lds.at_least(2), help="sequences EK-FAC is fitted on (default: the training sequences)")
    add("--budget-seconds", type=float, help="of one point; beyond it, projected (default: 600; on a CPU 30)")
    add("--total-seconds", type=float, help="of the whole sweep; larger models get more of it (default: no limit)")
    add("--random-weights", action="store_true", help="never load weights; the same architecture, initialised")
    add("--text", metavar="FILE", help="documents as .jsonl[.xz]; without it, training sequences are random tokens")
    add("--tokenizer", metavar="NAME", help="folder or name; without it, the model's own, or bytes")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... (default: auto)")
    add("--seed", type=lds.at_least(0), default=1, help="of weights, tokens and methods (default: 1)")
    add("--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", help="option of a method")
    add("--cache", default=default_cache(), help="where finished points are kept (default: %(default)s)")
    add("--out", default="runs/scaling", help="where scaling.csv and scaling.json go (default: %(default)s)")
    add("--force", action="store_true", help="measure again what is already kept")
    add("--json", action="store_true", help="print rows (or estimates) as a JSON list instead of tables")
    add("--estimate", action="store_true", help="run nothing: predict the cost of --model from measured rows")
    add("--model", help="with --estimate: a size of the suite, or a model folder")
    add("--from", dest="source", metavar="FILE", help="with --estimate: default results/scaling/scaling.csv")
    return parser


# ---- what is to be measured ----


def hub_reachable(name: str) -> bool:
    """Whether these weights can be had: from the hub's cache on this machine, or over the network."""
    import huggingface_hub

    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return True
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    try:
        socket.create_connection(("huggingface.co", 443), timeout=3).close()
    except OSError:
        return False
    return True


def weights_of(name: str, configuration: Configuration, random_weights: bool) -> str:
    """`random`, or what `load_language_model` takes."""
    if random_weights:
        return "random"
    if Path(name).is_dir():
        if not any(Path(name).glob("*.safetensors")):
            raise UsageError(f"{name} holds no *.safetensors; add --random-weights to measure its architecture alone")
        return str(Path(name).resolve())
    hub_name = f"{HUB_PREFIX}{configuration.name}"
    return hub_name if hub_reachable(hub_name) else "random"


def method_options(name: str, arguments: argparse.Namespace, cuda: bool, random_weights: bool) -> dict[str, Any]:
    """The paper's settings, then --set."""
    options: dict[str, Any] = {}
    if name == "bif":
        options = {
            "sampler": "sgld", "chains": arguments.chains, "step_size": 5e-6, "n_beta": 30.0, "gamma": 300.0,
            "minibatch": 32, "parameters": SAMPLED, "batch_size": 512 if cuda else 16,
        }  # fmt: skip
        if random_weights:
            options["divergence_limit"] = 1e9  # a walk from nowhere leads nowhere; its cost is the same
    elif name == "trak":
        options = {"projection": 128 if arguments.train >= 256 else 101, "batch_size": 8}
    elif name == "gradsim":
        options = {"batch_size": 8}
    given = lds.options_of(name, arguments.set)
    if given:
        from baselines.method import load_method
        from bench.scaling_point import PLUGINS

        checked = load_method(PLUGINS.get(name, name), **given)
        options |= {option: getattr(checked, option) for option in given}
    return options


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def specifications(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One a point: BIF and EK-FAC side by side from the smallest model to the largest, then the other methods."""
    from retrain.train import choose_device, describe_device

    device = choose_device(arguments.device)
    cuda = device.type == "cuda"
    query_file = None if arguments.queries.isdigit() else arguments.queries
    pairs = load_queries(query_file)
    num_queries = int(arguments.queries) if query_file is None else len(pairs)
    if not 1 <= num_queries <= len(pairs):
        raise UsageError(f"--queries {num_queries}: there are {len(pairs)} of our own; give a JSON file for more")
    if arguments.text and not Path(arguments.text).is_file():
        raise UsageError(f'--text "{arguments.text}" is no file; expected documents as .jsonl or .jsonl.xz')
    configurations = [(name, suite_configuration(name)) for name in dict.fromkeys(arguments.models)]
    configurations.sort(key=lambda pair: pair[1].num_parameters)
    names = list(dict.fromkeys(arguments.methods))
    first = [name for name in ("bif", "ekfac") if name in names]
    order = [
        (pair, method)
        for group in (first, [name for name in names if name not in first])
        for pair in configurations
        for method in group
    ]
    sources = {name: weights_of(name, made, arguments.random_weights) for name, made in configurations}
    if "random" in sources.values() and not arguments.random_weights:
        print("random weights: the hub cannot be reached, and cost does not depend on the values", file=sys.stderr)
    specs = []
    for (name, configuration), method in order:
        if configuration.positions < arguments.tokens:
            raise UsageError(f"--tokens {arguments.tokens}: {name} takes at most {configuration.positions}")
        weights = sources[name]
        tokenizer = arguments.tokenizer or (None if weights == "random" else weights)
        text = f"{Path(arguments.text).name}" if arguments.text else "random tokens"
        specs.append(
            {
                "model": name,
                "configuration": asdict(configuration),
                "weights": weights,
                "weights_name": configuration.name if Path(weights).is_dir() else weights,
                "method": method,
                "options": method_options(method, arguments, cuda, weights == "random"),
                "train": arguments.train,
                "query_file": query_file,
                "queries": num_queries,
                "tokens": arguments.tokens,
                "text": arguments.text,
                "text_name": text if tokenizer or not arguments.text else f"{text}, as bytes",
                "text_digest": digest(Path(arguments.text).read_bytes()) if arguments.text else "",
                "query_digest": digest(json.dumps(pairs[:num_queries]).encode()),
                "tokenizer": tokenizer,
                "chains": arguments.chains,
                "draws": -(-arguments.draws // arguments.chains) * arguments.chains,
                "fit_examples": arguments.fit_examples or arguments.train,
                "device": str(device),
                "device_name": describe_device(device),
                "dtype": "bfloat16" if cuda else "float32",
                "seed": arguments.seed,
            }
        )
    return specs


@lru_cache
def cost_fingerprint() -> str:
    """Of the code that decides seconds and bytes: measurements belong to it."""
    files = sorted(
        path for name in COST_FILES for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    )
    return digest(b"".join(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() for path in files))


def point_config(spec: dict[str, Any], budget: tuple[float, float | None] | None) -> dict[str, Any]:
    """The key of a finished point. One measured whole is good for any budget; a projected one for its own."""
    from retrain.train import library_versions

    left_out = ("model", "query_file", "text", "device", "weights_name", "text_name")
    draws_matter, factors_matter = spec["method"] == "bif", spec["method"] == "ekfac"
    identity = {name: value for name, value in spec.items() if name not in left_out}
    if not draws_matter:
        identity |= {"draws": 0, "chains": 0}
    if not factors_matter:
        identity["fit_examples"] = 0
    return {
        "version": POINT_VERSION,
        "point": identity,
        "versions": library_versions("torch", "transformers", "kronfluence", "traker"),
        "code": cost_fingerprint(),
        "cores": os.cpu_count() if spec["dtype"] == "float32" else 0,
        "budget": list(budget) if budget else None,
    }


# ---- measuring, each point in a process of its own ----


class Processes:
    """Starts points; on a GPU the next one's imports run while the present one is measured."""

    def __init__(self, folder: Path, ahead: bool):
        self.folder, self.ahead = folder, ahead
        self.spare: subprocess.Popen[str] | None = None
        self.count = 0

    def _start(self) -> subprocess.Popen[str]:
        self.count += 1
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(self.folder / f"stderr-{self.count}", "w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.scaling_point", "--spec", "-"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True,
                env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        process.errors = Path(errors.name)  # type: ignore[attr-defined]
        return process

    def measure(self, spec: dict[str, Any], limit: float, more: bool) -> dict[str, Any]:
        """The point's result; after `limit` seconds what it had measured until then."""
        process, self.spare = self.spare or self._start(), None
        result = Path(spec["result"])
        try:
            path = result.with_suffix(".spec")
            path.write_text(json.dumps(spec))
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.close()
            if self.ahead and more:
                self.spare = self._start()
            ended = True
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                ended = False
        finally:
            stop(process)
        found: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {"rungs": []}
        if not ended:
            found["stopped"] = f"stopped after {limit:.0f} s"
        elif not found.get("finished") and not found.get("error"):
            found["error"] = how_it_ended(process.returncode, process.errors)  # type: ignore[attr-defined]
        return found

    def close(self) -> None:
        if self.spare is not None:
            stop(self.spare)


def stop(process: subprocess.Popen[str]) -> None:
    """The point and whatever it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def how_it_ended(code: int, errors: Path) -> str:
    if code == -signal.SIGKILL:
        return "out of memory: the system ended the process (signal 9)"
    if code < 0:
        return f"the process was ended by signal {-code}"
    lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return f"the process exited with {code}" + (f": {lines[-1].strip()[:200]}" if lines else "")


def measure_peak(device: str) -> float | None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "bench.scaling_point", "--peak", device]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        return float(json.loads(done.stdout)["flops"])
    except (ValueError, KeyError):
        print(f"the matrix product's peak could not be measured: {done.stderr.strip()[-200:]}", file=sys.stderr)
        return None


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
        peak = measure_peak(self.specs[0]["device"]) if to_do else None
        with tempfile.TemporaryDirectory(prefix="scaling-", dir=self.store.root) as folder:
            processes = Processes(Path(folder), ahead=self.specs[0]["device"].startswith("cuda"))
            try:
                for index, spec in enumerate(self.specs):
                    result = known[index]
                    if result is None:
                        waiting = [later for later in to_do if later >= index]
                        result = self.measure(spec, processes, folder, waiting)
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
            budget, limit = min(budget, left * share), left
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
        self.store.write("scaling", config, {}, {"result": lds.without_nan(result)})


# ---- what the user reads ----


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
                lds.size(row["peak_memory_bytes"]),
                lds.size(row["disk_bytes"]) if row["disk_bytes"] else "-",
                duration(each) if each else "-",
                f"{row['floor_ratio']:.2f}" if row["floor_ratio"] else "-",
            ]
        )
    text = lds.table(header, lines, left=2)
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
        "versions": lds.versions(),
        "commit": lds.code_commit(),
        "code": lds.code_fingerprint(),
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
    lds.write_whole(out / "scaling.json", json.dumps(lds.without_nan(record), indent=1) + "\n")
    lds.write_whole(out / "scaling.csv", pd.DataFrame(sweep.rows, columns=COLUMNS).to_csv(index=False))
    return record


# ---- the command ----


def fill_defaults(arguments: argparse.Namespace) -> None:
    """What was not given, by device; says so where it is not the paper's setting."""
    from retrain.train import choose_device

    cpu = not arguments.estimate and choose_device(arguments.device).type == "cpu"
    changed = []
    for name, value in (ON_CPU if cpu else PAPER).items():
        if getattr(arguments, name) is None:
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
    if not arguments.model:
        raise UsageError(f"--estimate needs --model: one of {', '.join(SUITE)}, or a model folder")
    source = arguments.source or "results/scaling/scaling.csv"
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
        print(json.dumps(lds.without_nan(found), indent=1))
        return 0
    print(show_estimates(found, configuration, setting, source))
    for device, estimator in estimators.items():
        if text := show_crossovers(estimator, crossovers(estimator)):
            print(f"\n{device}, at the measured setting:\n{text}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    command = shlex.join(["python", "-m", "bench.scaling", *argv])
    try:
        fill_defaults(arguments)
        if arguments.estimate:
            return estimate_command(arguments)
        arguments.methods = arguments.methods or list(METHODS)
        lds.check_device(arguments.device)
        lds.check_out(arguments.out)
        sweep = Sweep(arguments, Store(arguments.cache))
        identity = [point_config(spec, sweep.budget()) for spec in sweep.specs]
        run_id = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]
        out = Path(arguments.out)
        sweep.run(lambda: write_results(out, run_id, command, sweep))
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
        print(json.dumps(lds.without_nan(sweep.rows), indent=1))
    else:
        print(show(sweep.rows))
        for device, estimator in by_device(sweep.rows).items():
            if text := show_crossovers(estimator, crossovers(estimator)):
                print(f"\n{device}:\n{text}")
        seconds = time.monotonic() - sweep.started
        print(f"\nrun {run_id} in {seconds:.0f} s ({sweep.num_kept} points were kept); table: {out / 'scaling.csv'}")
    return 1 if all(row["error"] for row in sweep.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
