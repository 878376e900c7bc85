"""What a sweep measures: one specification a point, plain data, and the key under which its result is kept.

A specification holds everything a point depends on: the shape, the weights, the method with the paper's options, the
text, the device and the precision. Budgets are no part of it: a point measured whole is good for any.
"""

import argparse
import hashlib
import json
import os
import socket
import sys
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.scaling_problem import SAMPLED, load_queries
from retrain.command import options_of
from retrain.errors import UsageError
from retrain.models.pythia_suite import HUB_PREFIX, Configuration, suite_configuration

POINT_VERSION = 1  # raised when what a point measures changes
COST_FILES = ("baselines", "retrain/models", "bench/runner.py", "bench/scaling_point.py", "bench/scaling_ekfac.py")
ROOT = Path(__file__).resolve().parent.parent


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
    given = options_of(name, arguments.set)
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
