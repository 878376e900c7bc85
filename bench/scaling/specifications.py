"""What a sweep measures: one specification a point, plain data, and the key under which its result is kept.

A specification holds everything a point depends on: the shape, the weights, the method with the paper's options, the
text, the device and the precision. Budgets are no part of it: a point measured whole is good for any. EK-FAC's point
has every fitting set and number of queries in it, since they share one eigendecomposition; every other method has a
point for each.
"""

import hashlib
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.scaling.measuring import CLOCK_FILE
from bench.scaling.methods import axis_of, build_method, is_fitted, method_options
from bench.scaling.problem import load_queries
from bench.scaling.row_values import named_configuration
from bench.scaling.sizes import MOST_FITTED
from retrain.errors import UsageError
from retrain.models.pythia_suite import HUB_PREFIX, Configuration

POINT_VERSION = 3  # raised when what a point measures changes
ROOT = Path(__file__).resolve().parents[2]
SHARED_FILES = (
    *(f"retrain/models/{name}.py" for name in ("causal_lm", "fused_cross_entropy", "fused_cross_entropy_kernels")),
    *(f"retrain/models/{name}.py" for name in ("pretrained", "pythia_suite")),
    *(f"bench/scaling/{name}.py" for name in ("point", "measuring", "problem")),
)
BIF_FILES = ("baselines/bif", "baselines/support", "baselines/gradsim.py")
METHOD_FILES = {
    "bif": BIF_FILES,
    "bif_tokens": (*BIF_FILES, "bench/scaling/token_bif.py"),
    "trak": ("baselines", "bench/scaling/trak.py"),
    "ekfac": ("baselines/ekfac.py", "baselines/support", "bench/scaling/ekfac.py", "bench/scaling/stages.py"),
}


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A sweep, or a part of one: every model with every method, at each fitting set and number of queries."""

    models: tuple[str, ...]
    methods: tuple[str, ...]
    train: int = 400
    queries: tuple[int, ...] = (18,)
    query_file: str | None = None
    tokens: int = 150
    draws: int = 2000
    timed_draws: int = 100  # of BIF: so many are timed, wherever the budget has room for them
    chains: int = 4
    fit_examples: tuple[int, ...] = (400,)
    layers: tuple[int, ...] = ()  # depths EK-FAC is measured at; none: as the budget allows, up to all
    score_parts: bool = True  # also scores of half the sequences and queries, which tell EK-FAC's scoring apart
    random_weights: bool = False
    text: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    seed: int = 1
    settings: tuple[str, ...] = ()  # METHOD.OPTION=VALUE


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


def content_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def specifications(request: SweepRequest) -> list[dict[str, Any]]:
    """One a point: BIF and EK-FAC side by side from the smallest model to the largest, then the other methods."""
    configurations = [(name, named_configuration(name)) for name in dict.fromkeys(request.models)]
    shown = [made.name for _, made in configurations]
    if several := [name for name, made in configurations if shown.count(made.name) > 1]:
        raise UsageError(
            f"{' and '.join(several)} would have one name in every table; name one of them alone, or rename a folder"
        )
    configurations.sort(key=lambda pair: pair[1].num_parameters)
    for name, configuration in configurations:
        if configuration.positions < request.tokens:
            raise UsageError(f"--tokens {request.tokens}: {name} takes at most {configuration.positions}")
    sources = {name: weights_of(name, made, request.random_weights) for name, made in configurations}
    if "random" in sources.values() and not request.random_weights:
        print("random weights: the hub cannot be reached, and cost does not depend on the values", file=sys.stderr)
    names = list(dict.fromkeys(request.methods))
    first = [name for name in ("bif", "ekfac") if name in names]
    shared = _shared(request)
    found = [
        spec
        for group in (first, [name for name in names if name not in first])
        for pair in configurations
        for method in group
        for spec in _of_method(request, pair, sources[pair[0]], method, shared)
    ]
    _tell_what_is_too_many(request, found, names)
    return found


def _tell_what_is_too_many(request: SweepRequest, found: list[dict[str, Any]], names: list[str]) -> None:
    """Larger fitting sets than can be measured are the estimate's to project, but for EK-FAC's."""
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


def _shared(request: SweepRequest) -> dict[str, Any]:
    """What every point of the request has in common."""
    from retrain.units import choose_device, describe_device

    device = choose_device(request.device)
    pairs = load_queries(request.query_file)
    if request.text and not Path(request.text).is_file():
        raise UsageError(f'--text "{request.text}" is no file; expected documents as .jsonl or .jsonl.xz')
    return {
        "train": request.train,
        "query_file": request.query_file,
        "tokens": request.tokens,
        "text": request.text,
        "text_digest": content_digest(Path(request.text).read_bytes()) if request.text else "",
        "query_digest": content_digest(json.dumps(pairs[: max(request.queries)]).encode()),
        "device": str(device),
        "device_name": describe_device(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "seed": request.seed,
    }


def _of_method(
    request: SweepRequest, model: tuple[str, Configuration], weights: str, method: str, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    name, configuration = model
    tokenizer = request.tokenizer or (None if weights == "random" else weights)
    text = f"{Path(request.text).name}" if request.text else "random tokens"
    options = method_options(
        method, request.settings, configuration, chains=request.chains,
        cuda=shared["device"].startswith("cuda"), random=weights == "random",
    )  # fmt: skip
    built = build_method(method, options)
    axis, fitted = axis_of(method, built), is_fitted(method, built)
    chains = getattr(built, "chains", 0) if axis == "draws" else 0
    common = {
        **shared,
        "model": name,
        "configuration": asdict(configuration),
        "weights": weights,
        "weights_name": configuration.name if Path(weights).is_dir() else weights,
        "method": method,
        "options": options,
        "axis": axis,
        "fitted": fitted,
        "text_name": text if tokenizer or not request.text else f"{text}, as bytes",
        "tokenizer": tokenizer,
        "chains": chains,
        "draws": -(-request.draws // chains) * chains if chains else 0,
        "timed_draws": min(request.timed_draws, request.draws) if chains else 0,
        "depths": [],
    }
    fit_sets = sorted(set(request.fit_examples)) if fitted else [0]
    counts = sorted(set(request.queries))
    if method == "ekfac":
        depths = sorted({min(depth, configuration.layers) for depth in request.layers})
        lists = {"fit_sets": fit_sets, "query_counts": counts, "depths": depths, "score_parts": request.score_parts}
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
    files = sorted(
        {path for name in names for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))}
        | {CLOCK_FILE}
    )
    return content_digest(b"".join(f"{path.name}\0".encode() + path.read_bytes() for path in files))


def point_config(spec: dict[str, Any], budget: tuple[float, float | None] | None) -> dict[str, Any]:
    """The key of a finished point. One measured whole is good for any budget; a projected one for its own."""
    from retrain.source import library_versions

    left_out = ("model", "query_file", "text", "device", "weights_name", "text_name", "tokenizer")
    tokenizer = Path(spec["tokenizer"]).name if spec["tokenizer"] else None  # not where it lies
    return {
        "version": POINT_VERSION,
        "point": {name: value for name, value in spec.items() if name not in left_out} | {"tokenizer": tokenizer},
        "versions": library_versions("torch", "transformers", "kronfluence", "traker"),
        "code": cost_fingerprint(spec["method"]),
        "cores": os.cpu_count() if spec["dtype"] == "float32" else 0,
        "budget": list(budget) if budget else None,
    }
