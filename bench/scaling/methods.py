"""The methods of the comparison, with the paper's options, and what a point of each has more or less of.

Any method may be named: a file of `baselines/`, or package.module:Class. Three have their own form here: `ekfac` runs
with kronfluence's extreme memory reduction, part by part, `bif_tokens` records the loss of every token, and `trak`
draws its projection on the device.
"""

from collections.abc import Sequence
from typing import Any

from baselines.method import Method, load_method
from bench.scaling.costs import FIT_BATCH
from bench.scaling.problem import SAMPLED
from retrain.command import options_of
from retrain.models.pythia_suite import Configuration

PLUGINS = {
    "ekfac": "bench.scaling.ekfac:LowMemoryEKFAC",
    "bif_tokens": "bench.scaling.token_bif:TokenBIF",
    "trak": "bench.scaling.trak:LargeTRAK",
}
COMPARED = ("bif", "ekfac", "gradsim", "trak")
GRADIENT_BYTES = 8 * 2**30
FORMER_AXES = {"bif": "draws", "ekfac": "layers"}  # of records from before a specification named its axis
PRIVATE_FIELDS = ("text", "query_file", "tokenizer", "weights", "device")  # of a specification: paths of a machine


def build_method(name: str, options: dict[str, Any]) -> Method:
    return load_method(PLUGINS.get(name, name), **options)


def method_options(
    name: str,
    settings: Sequence[str],
    configuration: Configuration,
    *,
    chains: int,
    cuda: bool,
    random: bool,
) -> dict[str, Any]:
    """The paper's settings, then --set."""
    options: dict[str, Any] = {}
    if name in ("bif", "bif_tokens"):
        options = {
            "sampler": "sgld", "chains": chains, "step_size": 5e-6, "n_beta": 30.0, "gamma": 300.0, "minibatch": 32,
            "parameters": SAMPLED, "batch_size": 64 if cuda else 16, "displacement": "bfloat16" if cuda else "float32",
        }  # fmt: skip
        if random:
            options["divergence_limit"] = 1e9  # a walk from nowhere leads nowhere; its cost is the same
    elif name == "trak":
        # traker holds a batch's gradients in float32.
        together = max(1, min(8, GRADIENT_BYTES // (4 * configuration.num_tracked_parameters)))
        options = {"batch_size": together}
    elif name == "gradsim":
        options = {"batch_size": 8}
    elif name == "kfac":
        options = {"fit_batch_size": FIT_BATCH, "batch_size": 8, "self_influence": False}
    given = options_of(name, settings)
    if given:
        checked = build_method(name, given)
        options |= {option: getattr(checked, option) for option in given}
    return options


def axis_of(name: str, method: Method) -> str:
    """What is repeated, and so linear: draws of a chain, blocks of the model for EK-FAC, else training sequences."""
    if name == "ekfac":
        return "layers"
    return "draws" if hasattr(method, "draws") and hasattr(method, "chains") else "train"


def is_fitted(name: str, method: Method) -> bool:
    """Whether it takes its curvature from a number of fitting sequences that can be chosen."""
    if name == "ekfac":
        return True
    return hasattr(method, "fit_examples") and getattr(method, "localiser", "") != "isotropic"


def sized(spec: dict[str, Any], size: dict[str, int]) -> Method:
    """The method of a specification, as large as `size` says."""
    options = dict(spec["options"])
    if spec["axis"] == "draws":
        options["chains"] = size.get("chains", spec["chains"])
        options["draws"] = -(-size["draws"] // options["chains"])
    if spec["fitted"]:
        options["fit_examples"] = size["fit_examples"]
    return build_method(spec["method"], options)
