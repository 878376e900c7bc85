"""Rows of a machine whose costs follow known laws, and points without a machine, for the tests of bench.scaling."""

from dataclasses import asdict
from typing import Any

from bench.scaling import suite
from bench.scaling.rows import COLUMNS
from bench.scaling.suite import SUITE, Configuration, Setting

LAW = Setting(train=400, queries=18, tokens=150, draws=2000, fit_examples=400)
SCORE_LAW = {"score_base": 1e-9, "score_per_train": 1e-11, "score_per_query": 5e-11, "score_per_pair": 1e-13}
FIXED = 2e-10  # seconds a byte of factors


def bif_law(configuration: Configuration, setting: Setting) -> float:
    flops = suite.draw_flops(configuration.num_token_parameters, setting.train, setting.queries, 32, setting.tokens)
    return 2.0 + setting.draws * 1.5 * flops / 7e14


def ekfac_parts(configuration: Configuration, setting: Setting) -> dict[str, float]:
    work = configuration.num_token_parameters * setting.tokens / 100
    return {
        "eigen_seconds": 3e-12 * configuration.eigen_cost,
        "covariance_base": 0.4 * FIXED * configuration.factor_bytes(),
        "covariance_per_example": suite.covariance_flops(configuration, setting.tokens) / 1e14,
        "lambda_base": 0.6 * FIXED * configuration.factor_bytes(),
        "lambda_per_example": suite.lambda_flops(configuration, setting.tokens) / 5e13,
        **{name: value * work for name, value in SCORE_LAW.items()},
    }


def ekfac_law(configuration: Configuration, setting: Setting) -> float:
    parts = ekfac_parts(configuration, setting)
    n, q = setting.train, setting.queries
    score = parts["score_base"] + parts["score_per_train"] * n + parts["score_per_query"] * q
    each = parts["covariance_per_example"] + parts["lambda_per_example"]
    fixed = parts["eigen_seconds"] + parts["covariance_base"] + parts["lambda_base"]
    return fixed + each * setting.fit_examples + score + parts["score_per_pair"] * n * q


def rows_by_law(models: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for name in models:
        configuration = SUITE[name]
        shared = {
            **dict.fromkeys(COLUMNS), "model": name, "parameters": configuration.num_parameters,
            "device": "machine", "token_parameters": configuration.num_token_parameters, "train": 400, "queries": 18,
            "hidden": configuration.hidden, "layers": configuration.layers, "tokens": 150, "projected": False,
            "dtype": "bfloat16", "run_id": "law",
        }  # fmt: skip
        seconds = bif_law(configuration, LAW)
        rows.append(
            shared
            | {
                "method": "bif", "fit_seconds": 0.0, "score_seconds": seconds, "draws": 2000, "minibatch": 32,
                "seconds_per_draw": (seconds - 2.0) / LAW.draws, "setup_seconds": 2.0, "disk_bytes": 0,
                "peak_memory_bytes": 1.1 * suite.chain_bytes(configuration, 32, 150),
            }
        )  # fmt: skip
        parts = ekfac_parts(configuration, LAW)
        covariance, lambdas = (
            parts[f"{part}_base"] + 400 * parts[f"{part}_per_example"] for part in ("covariance", "lambda")
        )
        fit = parts["eigen_seconds"] + covariance + lambdas
        rows.append(
            shared
            | {
                "method": "ekfac", "fit_seconds": fit, "score_seconds": ekfac_law(configuration, LAW) - fit,
                "eigen_cost": configuration.eigen_cost, "fit_examples": 400, "fit_sizes": "200, 400",
                "factor_bytes": configuration.factor_bytes(), "disk_bytes": 1.1 * configuration.factor_bytes(),
                "peak_memory_bytes": 0.9 * suite.ekfac_needs(configuration, 150).memory_bytes, **parts,
            }
        )  # fmt: skip
    return rows


TINY = Configuration(name="tiny", hidden=16, layers=2, heads=2, intermediate=32, vocabulary=64)


def specification(method: str, **changes: Any) -> dict[str, Any]:
    """Of a point of a tiny model on a CPU."""
    axis = {"bif": "draws", "bif_tokens": "draws", "ekfac": "layers"}.get(method, "train")
    chains = 4 if axis == "draws" else 0
    options = {"minibatch": 4, "chains": 4, "step_size": 1e-6, "gamma": 300.0, "n_beta": 30.0} if chains else {}
    spec = {
        "configuration": asdict(TINY), "method": method, "options": options, "axis": axis,
        "fitted": method == "ekfac", "train": 8, "queries": 2, "query_counts": [2], "tokens": 12, "draws": 2000,
        "timed_draws": 100, "chains": chains, "fit_examples": 8, "fit_sets": [8],
        "dtype": "float32", "weights_name": "random",
        "text_name": "random tokens", "device": "cpu", "device_name": "CPU",
        "seed": 0, "cost_code": "x",
    }  # fmt: skip
    return spec | changes


def rung(draws: int, score: float, fit: float = 0.0, peak: int = 100, disk: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "size": {"draws": draws, "layers": 2, "train": 8, "queries": 2, "fit_examples": 8}, "fit_seconds": fit,
        "score_seconds": score, "peak_memory_bytes": peak, "peak_reserved_bytes": None, "host_peak_bytes": peak,
        "disk_bytes": disk, "weight_bytes": 10, **more,
    }  # fmt: skip


def ekfac_rung(layers: int, fits: tuple[int, ...] = (8,), points: bool = True) -> dict[str, Any]:
    """A whole run of so many blocks of a machine where covariance is 1 s and lambda 2 s a block and fitting sequence,
    beside 3 s a block for the files; an eigendecomposition 6 s a block, scores 0.1 s a block and pair."""
    known = [
        {"fit_examples": e, "covariance": layers * (1.0 + e), "eigen": 6.0 * layers, "lambda": layers * (2.0 + 2 * e)}
        for e in fits
    ]
    first = {name: known[0][name] for name in ("covariance", "eigen", "lambda")}
    score = [[n, q, 0.1 * layers * n * q] for n, q in ((8, 2), (4, 2), (8, 1), (4, 1))]
    return {
        **rung(0, score[0][2], sum(first.values()), peak=1000 + 100 * layers, disk=50 * layers),
        "size": {"layers": layers, "fit_examples": fits[0], "train": 8, "queries": 2, "draws": 0},
        "phases": first, "fits": known, "score_points": score if points else score[:1],
    }  # fmt: skip
