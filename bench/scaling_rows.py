"""From what a point measured to its row of scaling.csv: taken as it is, or projected along the line of its ladder.

A row is projected where no rung was the whole run. Its seconds then come from the line through at least two sizes, with
their 95 % interval; `projected_from` names the sizes and `max_residual` how far the line misses them. Blocks of a model
are all alike, so EK-FAC's memory and disk are lines in their number too.
"""

from typing import Any

from bench.scaling_fits import Line, bilinear, draw_flops, fit_line
from retrain.models.pythia_suite import Configuration

COLUMNS = [
    "model", "parameters", "method", "load_seconds", "fit_seconds", "score_seconds", "peak_memory_bytes", "disk_bytes",
    "projected", "seconds_low", "seconds_high", "device", "error", "run_id",
    "train", "queries", "tokens", "draws", "fit_examples", "minibatch", "dtype", "weights", "text",
    "token_parameters", "weight_bytes", "peak_reserved_bytes", "host_peak_bytes",
    "seconds_per_draw", "setup_seconds", "floor_seconds_per_draw", "floor_ratio", "peak_flops",
    "eigen_cost", "eigen_seconds", "fit_seconds_per_example", "score_base", "score_per_train", "score_per_query",
    "score_per_pair", "factor_bytes", "projected_from", "max_residual",
]  # fmt: skip


def axis_of(method: str) -> str:
    """What a point of this method has more or less of: see bench/scaling_point.py."""
    return {"bif": "draws", "ekfac": "layers"}.get(method, "train")


def whole_size(spec: dict[str, Any]) -> dict[str, int]:
    """The sizes of the whole run; more fitting examples than training sequences are always projected."""
    return {
        "draws": spec["draws"],
        "layers": spec["configuration"]["layers"],
        "train": spec["train"],
        "fit_examples": min(spec["fit_examples"], spec["train"]),
    }


def make_row(spec: dict[str, Any], result: dict[str, Any], peak_flops: float | None) -> dict[str, Any]:
    """Every column but run_id; a point without usable rungs has its reason in `error`."""
    configuration = Configuration(**spec["configuration"])
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    number_bytes = 4 if spec["dtype"] == "float32" else 2
    row |= {
        "model": configuration.name,
        "parameters": configuration.num_parameters,
        "method": spec["method"],
        "device": result.get("device") or spec["device_name"],
        "projected": False,
        "load_seconds": result.get("load_seconds"),
        **{name: spec[name] for name in ("train", "queries", "tokens", "dtype")},
        "weights": spec["weights_name"],
        "text": spec["text_name"],
        "token_parameters": configuration.num_token_parameters,
        "weight_bytes": configuration.num_parameters * number_bytes,
        "peak_flops": peak_flops,
    }
    if spec["method"] == "bif":
        row |= {"draws": spec["draws"], "minibatch": spec["options"]["minibatch"]}
    if spec["method"] == "ekfac":
        row |= {
            "fit_examples": spec["fit_examples"],
            "eigen_cost": configuration.eigen_cost,
            "factor_bytes": configuration.factor_bytes(number_bytes),
        }
    rungs = result.get("rungs", [])
    axis, whole = axis_of(spec["method"]), whole_size(spec)
    error = result.get("error")
    if not error and not rungs:
        error = "no time left"
    if not error and len(rungs) < 2 and rungs[-1]["size"][axis] < whole[axis]:
        error = "no time left: a projection needs two sizes"
    by_ticks = axis == "draws" and all(rung.get("tick_seconds") for rung in rungs)
    unfinished = bool(rungs) and rungs[-1]["size"][axis] < whole[axis]
    if not error and unfinished and not by_ticks and _total_line(rungs, axis).slope <= 0:
        seconds = ", ".join(f"{rung['fit_seconds'] + rung['score_seconds']:.3g} s" for rung in rungs)
        sizes = ", ".join(str(rung["size"][axis]) for rung in rungs)
        error = f"no projection: {sizes} {axis} took {seconds}; the machine is too busy to tell them apart, run again"
    if error:
        return row | {"error": error}
    if rungs[-1]["size"][axis] >= whole[axis]:
        last = rungs[-1]
        row |= {name: last[name] for name in ("fit_seconds", "score_seconds")}
        row |= {name: last[name] for name in MEMORY}
    else:
        row |= _project(rungs, axis, whole[axis], spec["chains"])
    if spec["method"] == "bif":
        row |= _bif_columns(row, rungs, peak_flops)
    if spec["method"] == "ekfac":
        row |= _ekfac_columns(row, rungs, whole)
    return row


MEMORY = ("peak_memory_bytes", "peak_reserved_bytes", "host_peak_bytes", "disk_bytes")


# What a draw takes is known to a few per cent; what a run of a few draws takes beside them (capturing, kernels chosen
# on first use) is not, so two totals make a poor line in draws.
LEAST_DRAW_ERROR = 0.05


def _project_draws(rungs: list[dict[str, Any]], target: int, chains: int) -> dict[str, Any]:
    """Setup once and the median time between draws so many times; the interval is what the rungs differ by, doubled.

    A chain of one draw takes no step, so what its rung says about a draw is left out where another says more.
    """
    draws = ", ".join(str(rung["size"]["draws"]) for rung in rungs)
    rungs = [rung for rung in rungs if rung["size"]["draws"] > chains] or rungs
    each = [rung["tick_seconds"] for rung in rungs]
    totals = [rung["fit_seconds"] + rung["score_seconds"] for rung in rungs]
    setups = [max(0.0, total - tick * rung["size"]["draws"]) for rung, tick, total in zip(rungs, each, totals)]
    seconds = [setup + tick * target for setup, tick in zip(setups, each)]
    spread = max(abs(value / seconds[-1] - 1) for value in seconds)
    error = max(LEAST_DRAW_ERROR, 2 * spread)
    return {
        "projected": True,
        "fit_seconds": 0.0,
        "score_seconds": seconds[-1],
        "seconds_low": seconds[-1] * (1 - error),
        "seconds_high": seconds[-1] * (1 + error),
        "projected_from": f"the median draw of {draws} of {target} draws",
        "max_residual": spread,
        **{name: max(rung[name] for rung in rungs) for name in MEMORY if rungs[-1][name] is not None},
    }


def _project(rungs: list[dict[str, Any]], axis: str, target: int, chains: int) -> dict[str, Any]:
    if axis == "draws" and all(rung.get("tick_seconds") for rung in rungs):
        return _project_draws(rungs, target, chains)
    sizes = [rung["size"][axis] for rung in rungs]
    total = _total_line(rungs, axis)
    low, high = total.interval(target)
    found: dict[str, Any] = {
        "projected": True,
        "seconds_low": low,
        "seconds_high": high,
        "projected_from": f"{', '.join(map(str, sizes))} of {target} {axis}"
        + ("" if total.linear else f"; not linear, {100 * total.residual:.0f} % off"),
        "max_residual": total.residual,
    }
    fit = _line(rungs, sizes, "fit_seconds").at(target) if rungs[-1]["fit_seconds"] > 1e-3 else 0.0
    found["fit_seconds"] = min(max(0.0, fit), total.at(target))
    found["score_seconds"] = total.at(target) - found["fit_seconds"]
    for name in MEMORY:
        if rungs[-1][name] is None:
            continue
        # More blocks take more memory; more draws or sequences pass through the same.
        largest = max(rung[name] for rung in rungs)
        found[name] = round(max(largest, _line(rungs, sizes, name).at(target))) if axis == "layers" else largest
    return found


def _total_line(rungs: list[dict[str, Any]], axis: str) -> Line:
    return fit_line(
        [rung["size"][axis] for rung in rungs], [rung["fit_seconds"] + rung["score_seconds"] for rung in rungs]
    )


def _line(rungs: list[dict[str, Any]], sizes: list[int], name: str) -> Line:
    return fit_line(sizes, [rung[name] for rung in rungs])


def _bif_columns(row: dict[str, Any], rungs: list[dict[str, Any]], peak_flops: float | None) -> dict[str, Any]:
    """Seconds a draw: the median between draws of the longest run, else the line's slope; the rest is setup."""
    last = rungs[-1]
    each = last.get("tick_seconds")
    if each is None:
        sizes = [rung["size"]["draws"] for rung in rungs]
        each = (
            fit_line(sizes, [rung["score_seconds"] for rung in rungs]).slope
            if len(rungs) > 1
            else last["score_seconds"] / sizes[-1]
        )
    seconds = last["fit_seconds"] + last["score_seconds"]
    found: dict[str, Any] = {
        "seconds_per_draw": each,
        "setup_seconds": max(0.0, seconds - each * last["size"]["draws"]),
    }
    if peak_flops:
        flops = draw_flops(row["token_parameters"], row["train"], row["queries"], row["minibatch"], row["tokens"])
        found["floor_seconds_per_draw"] = flops / peak_flops
        found["floor_ratio"] = each / found["floor_seconds_per_draw"]
    return found


def _ekfac_columns(row: dict[str, Any], rungs: list[dict[str, Any]], whole: dict[str, int]) -> dict[str, Any]:
    """Parts of the fit and of the score at full depth, and the fit at all the fitting examples asked for."""
    found: dict[str, Any] = {}
    last = rungs[-1]
    if row["projected"]:
        # Every block has the same matrices: in proportion to the blocks, nothing else.
        blocks = sum(rung["size"]["layers"] for rung in rungs)
        found["eigen_seconds"] = sum(rung["phases"]["eigen"] for rung in rungs) / blocks * whole["layers"]
        found["eigen_seconds"] = min(found["eigen_seconds"], row["fit_seconds"])
    else:
        found["eigen_seconds"] = last["phases"]["eigen"]
    halved = next((rung for rung in reversed(rungs) if "half_phases" in rung), None)
    if halved is None:  # no half was measured: all that is not eigendecomposition is put down to the examples
        found["fit_seconds_per_example"] = (row["fit_seconds"] - found["eigen_seconds"]) / whole["fit_examples"]
        return found
    fitting = [phases["covariance"] + phases["lambda"] for phases in (halved["phases"], halved["half_phases"])]
    slope = max(0.0, (fitting[0] - fitting[1]) / (halved["size"]["fit_examples"] - halved["half_examples"]))
    # What a rung of fewer blocks says about a part is scaled as the whole part is.
    deeper = (row["fit_seconds"] - found["eigen_seconds"]) / max(fitting[0], 1e-9)
    found["fit_seconds_per_example"] = slope * deeper
    coefficients = bilinear(halved["score_points"])
    longer = row["score_seconds"] / max(halved["score_seconds"], 1e-9)
    names = ("score_base", "score_per_train", "score_per_query", "score_per_pair")
    found |= {name: value * longer for name, value in zip(names, coefficients)}
    more = row["fit_examples"] - whole["fit_examples"]
    if more > 0:
        added = more * found["fit_seconds_per_example"]
        before = row["fit_seconds"] + row["score_seconds"]
        low, high = row["seconds_low"] or before, row["seconds_high"] or before
        # Two numbers of examples leave no residual; the line's assumed noise stands for it.
        line = fit_line([halved["half_examples"], halved["size"]["fit_examples"]], [fitting[1], fitting[0]])
        share = line.interval(row["fit_examples"])[1] / max(line.at(row["fit_examples"]), 1e-9) - 1
        origin = row["projected_from"]
        text = f"{halved['half_examples']}, {whole['fit_examples']} of {row['fit_examples']} fitting examples"
        found |= {
            "fit_seconds": row["fit_seconds"] + added,
            "projected": True,
            "seconds_low": max(0.0, low + added * (1 - share)),
            "seconds_high": high + added * (1 + share),
            "projected_from": f"{origin}; {text}" if origin else text,
        }
    return found
