"""All points of one sweep, each in a process of its own; what is finished is kept, and what failed is a row.

A point is one model and one method; EK-FAC's has every fitting set and number of queries in it, since they share one
eigendecomposition. Its specification is plain data that holds everything it depends on: the shape, the
method with the paper's options, the sequences, the device and the precision.

A point that fails (memory, disk, a signal) is a row with its reason, and the next one is begun; it is not kept, so that
the same command tries again.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.records import code_commit, code_fingerprint, versions, without_nan
from bench.scaling.methods import axis_of, build_method, is_fitted, method_options
from bench.scaling.point import MOST_FITTED
from bench.scaling.projection import make_rows
from bench.scaling.report import progress_line
from bench.scaling.rows import named_configuration
from retrain.errors import UsageError
from retrain.jobs.run import terminable
from retrain.models.pythia_suite import Configuration
from retrain.store import Store, canonical_json

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
