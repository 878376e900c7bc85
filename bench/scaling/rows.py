"""From what a point measured to its rows of scaling.csv: taken as it is, or projected along the line of its ladder.

A row is projected where no rung was the whole run. Its seconds then come from the line through at least two sizes, with
their 95 % interval; `projected_from` names the sizes and `max_residual` how far the line misses them. `held_out_error`
is how far a projection from the smaller sizes alone is from the largest that was measured. EK-FAC's rows are in
bench/scaling/ekfac_rows.py.
"""

from typing import Any

from bench.scaling.costs import draw_flops
from bench.scaling.ekfac_rows import NO_PROJECTION, add_ekfac, no_time_left
from bench.scaling.lines import Line, fit_line
from bench.scaling.methods import FORMER_AXES
from bench.scaling.row_values import SHAPE_COLUMNS
from bench.scaling.sizes import MEMORY, whole_size
from retrain.models.pythia_suite import Configuration

POINT_COLUMNS = [
    "model", "parameters", "method", "load_seconds", "fit_seconds", "score_seconds", "peak_memory_bytes", "disk_bytes",
    "projected", "seconds_low", "seconds_high", "device", "error", "run_id",
    "train", "queries", "tokens", "draws", "fit_examples", "minibatch", "dtype", "weights", "text",
    "token_parameters", *SHAPE_COLUMNS, "weight_bytes", "peak_reserved_bytes", "host_peak_bytes",
    "timed_draws", "seconds_per_draw", "setup_seconds", "floor_seconds_per_draw", "floor_ratio", "peak_flops",
    "token_bytes", "depth", "eigen_cost", "eigen_seconds", "covariance_seconds", "lambda_seconds", "fit_sizes",
    "covariance_base", "covariance_per_example", "lambda_base", "lambda_per_example", "fit_seconds_per_example",
    "score_base", "score_per_train", "score_per_query", "score_per_pair", "factor_bytes", "shared_parts",
    "needed_memory_bytes", "needed_disk_bytes", "storage", "projected_from", "max_residual", "held_out",
    "held_out_error", "again_seconds",
]  # fmt: skip


def make_rows(spec: dict[str, Any], result: dict[str, Any], peak_flops: float | None) -> list[dict[str, Any]]:
    """Every column but run_id; a point without usable rungs is one row with its reason in `error`."""
    row = _identity(spec, result, peak_flops)
    if _axis(spec) == "layers":
        return add_ekfac(row, spec, result)
    return [_one_row(row, spec, result, peak_flops)]


def _axis(spec: dict[str, Any]) -> str:
    return spec.get("axis") or FORMER_AXES.get(spec["method"], "train")


def _identity(spec: dict[str, Any], result: dict[str, Any], peak_flops: float | None) -> dict[str, Any]:
    """What a row says of its point, whatever came of it."""
    configuration = Configuration(**spec["configuration"])
    number_bytes = 4 if spec["dtype"] == "float32" else 2
    row = dict.fromkeys(POINT_COLUMNS) | {
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
        **{name: getattr(configuration, name) for name in SHAPE_COLUMNS},
        "weight_bytes": configuration.num_parameters * number_bytes,
        "peak_flops": peak_flops,
    }
    if _axis(spec) == "draws":
        row |= {"draws": spec["draws"], "minibatch": spec["options"].get("minibatch")}
    if spec.get("fitted", spec["method"] == "ekfac"):
        row["fit_examples"] = spec["fit_examples"]
    if _axis(spec) == "layers":
        needs = result.get("needs", {})
        row |= {
            "eigen_cost": configuration.eigen_cost,
            "factor_bytes": configuration.factor_bytes(number_bytes),
            "needed_memory_bytes": needs.get("memory_bytes"),
            "needed_disk_bytes": needs.get("disk_bytes"),
            "storage": result.get("storage"),
        }
    return row


def _one_row(
    row: dict[str, Any], spec: dict[str, Any], result: dict[str, Any], peak_flops: float | None
) -> dict[str, Any]:
    """Of a method that is a ladder of draws or of training sequences."""
    axis, rungs = _axis(spec), result.get("rungs", [])
    whole = whole_size(spec)
    error = result.get("error")
    if not error and not rungs:
        error = no_time_left(result)
    unfinished = bool(rungs) and rungs[-1]["size"][axis] < whole[axis]
    by_ticks = axis == "draws" and all(rung.get("tick_seconds") for rung in rungs)
    if not error and unfinished and len(rungs) < 2 and not by_ticks:
        error = f"{no_time_left(result)}; a projection needs two sizes"
    if not error and unfinished and not by_ticks and _total_line(rungs, axis).slope <= 0:
        seconds = ", ".join(f"{_total(rung):.3g} s" for rung in rungs)
        sizes = ", ".join(str(rung["size"][axis]) for rung in rungs)
        error = f"{NO_PROJECTION}: {sizes} {axis} took {seconds}; the machine is too busy to tell them apart, run again"
    if error:
        return row | {"error": error}
    last = rungs[-1]
    if not unfinished:
        row |= {name: last[name] for name in ("fit_seconds", "score_seconds", *MEMORY)}
    elif by_ticks:
        row |= _project_draws(rungs, whole["draws"], spec["chains"])
    else:
        row |= _project(rungs, axis, whole[axis])
    row["token_bytes"] = last.get("token_bytes")
    if axis == "draws":
        row |= _draw_columns(row, rungs, peak_flops)
        row |= _held_out_draws(rungs, spec["chains"])
    return row


# What a draw takes is known to a few per cent; what a run of a few draws takes beside them (capturing, kernels chosen
# on first use) is not, so two totals make a poor line in draws.
LEAST_DRAW_ERROR = 0.05


def _project_draws(rungs: list[dict[str, Any]], target: int, chains: int) -> dict[str, Any]:
    """Setup once and the median time between draws so many times; the interval is what the rungs differ by, doubled."""
    draws = ", ".join(str(rung["size"]["draws"]) for rung in rungs)
    rungs = _stepping(rungs, chains)
    seconds = [_at_draws(rung, target) for rung in rungs]
    spread = max(abs(value / seconds[-1] - 1) for value in seconds)
    error = max(LEAST_DRAW_ERROR, 2 * spread)
    return {
        "projected": True,
        "fit_seconds": 0.0,
        "score_seconds": seconds[-1],
        "seconds_low": seconds[-1] * max(0.0, 1 - error),
        "seconds_high": seconds[-1] * (1 + error),
        "projected_from": f"the median draw of {draws} of {target} draws",
        "max_residual": spread,
        **{name: max(rung[name] for rung in rungs) for name in MEMORY if rungs[-1][name] is not None},
    }


def _stepping(rungs: list[dict[str, Any]], chains: int) -> list[dict[str, Any]]:
    """A chain of one draw takes no step, so what its rung says about a draw is left out where another says more."""
    return [rung for rung in rungs if rung["size"]["draws"] > chains] or rungs


def _at_draws(rung: dict[str, Any], draws: int) -> float:
    """What a run of so many draws would take, by this rung's own setup and median draw."""
    setup = max(0.0, _total(rung) - rung["tick_seconds"] * rung["size"]["draws"])
    return setup + rung["tick_seconds"] * draws


def _held_out_draws(rungs: list[dict[str, Any]], chains: int) -> dict[str, Any]:
    """The largest rung as the one before would have projected it."""
    known = [rung for rung in _stepping(rungs, chains) if rung.get("tick_seconds")]
    if len(known) < 2:
        return {}
    before, last = known[-2:]
    draws = last["size"]["draws"]
    return {
        "held_out": f"{draws} draws from {before['size']['draws']}",
        "held_out_error": _at_draws(before, draws) / _total(last) - 1,
    }


def _project(rungs: list[dict[str, Any]], axis: str, target: int) -> dict[str, Any]:
    sizes = [rung["size"][axis] for rung in rungs]
    total = _total_line(rungs, axis)
    low, high = total.interval(target)
    fit = _line(rungs, sizes, "fit_seconds").at(target) if rungs[-1]["fit_seconds"] > 1e-3 else 0.0
    fit = min(max(0.0, fit), total.at(target))
    return {
        "projected": True,
        "seconds_low": low,
        "seconds_high": high,
        "projected_from": f"{', '.join(map(str, sizes))} of {target} {axis}"
        + ("" if total.linear else f"; not linear, {100 * total.residual:.0f} % off"),
        "max_residual": total.residual,
        "fit_seconds": fit,
        "score_seconds": total.at(target) - fit,
        # More sequences pass through the same memory; what is written of each adds up.
        **{name: max(rung[name] for rung in rungs) for name in MEMORY if rungs[-1][name] is not None},
        **({"disk_bytes": round(_line(rungs, sizes, "disk_bytes").at(target))} if rungs[-1]["disk_bytes"] else {}),
    }


def _total(rung: dict[str, Any]) -> float:
    return rung["fit_seconds"] + rung["score_seconds"]


def _total_line(rungs: list[dict[str, Any]], axis: str) -> Line:
    return fit_line([rung["size"][axis] for rung in rungs], [_total(rung) for rung in rungs])


def _line(rungs: list[dict[str, Any]], sizes: list[int], name: str) -> Line:
    return fit_line(sizes, [rung[name] for rung in rungs])


def _draw_columns(row: dict[str, Any], rungs: list[dict[str, Any]], peak_flops: float | None) -> dict[str, Any]:
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
    found: dict[str, Any] = {
        "timed_draws": last["size"]["draws"],
        "seconds_per_draw": each,
        "setup_seconds": max(0.0, _total(last) - each * last["size"]["draws"]),
    }
    if peak_flops and row["minibatch"]:
        flops = draw_flops(row["token_parameters"], row["train"], row["queries"], row["minibatch"], row["tokens"])
        found["floor_seconds_per_draw"] = flops / peak_flops
        found["floor_ratio"] = each / found["floor_seconds_per_draw"]
    return found
