"""From what points measured to the rows of scaling.csv: taken as it is, or projected along the line of its sizes.

    rows = merge_rows(records)      # one table from the points of several sweeps: nothing is measured

A point is measured at several sizes. A row is projected where none of them was the whole run: its seconds then come
from the line through at least two sizes, with their 95 % interval; `projected_from` names the sizes and `max_residual`
how far the line misses them. `held_out_error` is how far a projection from the smaller sizes alone is from the largest
that was measured.

A whole run of EK-FAC is covariance + eigendecomposition + lambda + scores. Covariance and lambda are lines in the
fitting sequences; scores are a base and parts a sequence, a query and a pair; eigendecompositions depend on neither.
Where the model was not measured at its full depth, blocks are all alike: the two passes are a base, a part a block, and
a part a block and sequence; scores are a line in the blocks, and the eigendecompositions in proportion to them.
"""

import math
from collections.abc import Sequence
from typing import Any

from bench.scaling.costs import covariance_flops, draw_flops, ekfac_needs, least_lambda_flops
from bench.scaling.lines import (
    LEAST_NOISE,
    LINEAR_WITHIN,
    USUAL_NOISE,
    Line,
    bilinear,
    fit_blocks,
    fit_line,
)
from bench.scaling.rows import COLUMNS, QUERIES_END, SCORE_PARTS, SHAPE_COLUMNS, fit_sizes_of, total_of
from retrain.errors import UsageError
from retrain.models.pythia_suite import Configuration
from retrain.safe_files import SafeFileError, read_json

MEMORY = ("peak_memory_bytes", "peak_reserved_bytes", "host_peak_bytes", "disk_bytes")  # columns of a measured size
# What a draw takes is known to a few per cent; what a run of a few draws takes beside them (capturing, kernels chosen
# on first use) is not, so two totals make a poor line in draws.
LEAST_DRAW_ERROR = 0.05
ONE_SIZE_ERROR = 0.15  # of what a fitting sequence takes, where one fitting set does not tell it from what is fixed
PASS_JITTER = 0.5  # seconds a pass over the fitting sequences differs by from one run to the next, however short it is
SCORE_ERROR = 0.10  # of scores at a number of queries that was not measured, and again a factor of two beyond
NO_PROJECTION = "no projection"  # how the reason begins where more took less
PASSES = ("covariance", "lambda")

Row = dict[str, Any]
Spec = dict[str, Any]


def make_rows(spec: Spec, result: dict[str, Any], peak_flops: float | None) -> list[Row]:
    """Every column but run_id; a point without usable sizes is a row with its reason in `error`."""
    row = _identity(spec, result, peak_flops)
    if spec["axis"] != "layers":
        return [row | _one_row(row, spec, result)]
    sizes = [size for size in result.get("rungs", []) if size.get("phases")]
    if error := _why_not(sizes, spec, result):
        return [row | {"fit_examples": fit, "queries": count, "error": error} for fit, count in asked_rows(spec)]
    projection = EkfacProjection(sizes, spec, peak_flops)
    missing = result.get("error") or no_time_left(result)
    return [row | projection.row(fit, count, missing) for fit, count in asked_rows(spec)]


def asked_rows(spec: Spec) -> list[tuple[int, int]]:
    """(fitting sequences, queries) of each row: a row a fitting set, and one a further number of queries."""
    fit_sets, counts = spec["fit_sets"], spec["query_counts"]
    return [(count, counts[0]) for count in fit_sets] + [(fit_sets[0], count) for count in counts[1:]]


def no_time_left(result: dict[str, Any]) -> str:
    return f"no time left: {result['stopped']}" if result.get("stopped") else "no time left"


def _identity(spec: Spec, result: dict[str, Any], peak_flops: float | None) -> Row:
    """What a row says of its point, whatever came of it."""
    configuration = Configuration(**spec["configuration"])
    number_bytes = 4 if spec["dtype"] == "float32" else 2
    row = dict.fromkeys(COLUMNS) | {
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
    if spec["axis"] == "draws":
        row |= {"draws": spec["draws"], "minibatch": spec["options"].get("minibatch")}
    if spec["fitted"]:
        row["fit_examples"] = spec["fit_examples"]
    if spec["axis"] == "layers":
        needs = result.get("needs", {})
        row |= {
            "eigen_cost": configuration.eigen_cost,
            "factor_bytes": configuration.factor_bytes(number_bytes),
            "needed_memory_bytes": needs.get("memory_bytes"),
            "needed_disk_bytes": needs.get("disk_bytes"),
            "storage": result.get("storage"),
        }
    return row


# ---- a method that is measured at several numbers of draws or of training sequences ----


def _total_line(sizes: list[dict[str, Any]], axis: str) -> Line:
    return fit_line([size["size"][axis] for size in sizes], [total_of(size) for size in sizes])


def _too_busy(known: str, seconds: Sequence[float]) -> str:
    took = ", ".join(f"{second:.3g} s" for second in seconds)
    return f"{NO_PROJECTION}: {known} took {took}; the machine is too busy to tell them apart, run again"


def _one_row(row: Row, spec: Spec, result: dict[str, Any]) -> Row:
    axis, sizes = spec["axis"], result.get("rungs", [])
    target = spec[axis]
    if result.get("error") or not sizes:
        return {"error": result.get("error") or no_time_left(result)}
    last = sizes[-1]
    unfinished = last["size"][axis] < target
    by_ticks = axis == "draws" and all(size.get("tick_seconds") for size in sizes)
    if unfinished and not by_ticks:
        if len(sizes) < 2:
            return {"error": f"{no_time_left(result)}; a projection needs two sizes"}
        if _total_line(sizes, axis).slope <= 0:
            known = ", ".join(str(size["size"][axis]) for size in sizes)
            return {"error": _too_busy(f"{known} {axis}", [total_of(size) for size in sizes])}
    if not unfinished:
        found: Row = {name: last[name] for name in ("fit_seconds", "score_seconds", *MEMORY)}
    elif by_ticks:
        found = _project_draws(sizes, target, spec["chains"])
    else:
        found = _project(sizes, axis, target)
    found["token_bytes"] = last.get("token_bytes")
    if axis == "draws":
        found |= _draw_columns(row, sizes, spec["chains"])
    return found


def _stepping(sizes: list[dict[str, Any]], chains: int) -> list[dict[str, Any]]:
    """A chain of one draw takes no step, so what it says about a draw is left out where another size says more."""
    return [size for size in sizes if size["size"]["draws"] > chains] or sizes


def _at_draws(size: dict[str, Any], draws: int) -> float:
    """What a run of so many draws would take, by this size's own setup and median draw."""
    setup = max(0.0, total_of(size) - size["tick_seconds"] * size["size"]["draws"])
    return setup + size["tick_seconds"] * draws


def _project_draws(sizes: list[dict[str, Any]], target: int, chains: int) -> Row:
    """Setup once and the median time between draws so many times; the interval is what the sizes differ by, doubled."""
    draws = ", ".join(str(size["size"]["draws"]) for size in sizes)
    sizes = _stepping(sizes, chains)
    seconds = [_at_draws(size, target) for size in sizes]
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
        **{name: max(size[name] for size in sizes) for name in MEMORY if sizes[-1][name] is not None},
    }


def _project(sizes: list[dict[str, Any]], axis: str, target: int) -> Row:
    counts = [size["size"][axis] for size in sizes]

    def at_target(name: str) -> float:
        return fit_line(counts, [size[name] for size in sizes]).at(target)

    total = _total_line(sizes, axis)
    low, high = total.interval(target)
    fit = min(max(0.0, at_target("fit_seconds")), total.at(target)) if sizes[-1]["fit_seconds"] > 1e-3 else 0.0
    bent = "" if total.linear else f"; not linear, {100 * total.residual:.0f} % off"
    return {
        "projected": True,
        "seconds_low": low,
        "seconds_high": high,
        "projected_from": f"{', '.join(map(str, counts))} of {target} {axis}{bent}",
        "max_residual": total.residual,
        "fit_seconds": fit,
        "score_seconds": total.at(target) - fit,
        # More sequences pass through the same memory; what is written of each adds up.
        **{name: max(size[name] for size in sizes) for name in MEMORY if sizes[-1][name] is not None},
        **({"disk_bytes": round(at_target("disk_bytes"))} if sizes[-1]["disk_bytes"] else {}),
    }


def _draw_columns(row: Row, sizes: list[dict[str, Any]], chains: int) -> Row:
    """Seconds a draw: the median between draws of the longest run, else the line's slope; the rest is setup. And the
    largest size as the one before would have projected it."""
    last = sizes[-1]
    draws = last["size"]["draws"]
    each = last.get("tick_seconds")
    if each is None and len(sizes) > 1:
        each = fit_line([size["size"]["draws"] for size in sizes], [size["score_seconds"] for size in sizes]).slope
    elif each is None:
        each = last["score_seconds"] / draws
    setup = max(0.0, total_of(last) - each * draws)
    found: Row = {"timed_draws": draws, "seconds_per_draw": each, "setup_seconds": setup}
    if row["peak_flops"] and row["minibatch"]:
        flops = draw_flops(row["token_parameters"], row["train"], row["queries"], row["minibatch"], row["tokens"])
        found["floor_seconds_per_draw"] = flops / row["peak_flops"]
        found["floor_ratio"] = each / found["floor_seconds_per_draw"]
    known = [size for size in _stepping(sizes, chains) if size.get("tick_seconds")]
    if len(known) > 1:
        before, last = known[-2:]
        draws = last["size"]["draws"]
        found["held_out"] = f"{draws} draws from {before['size']['draws']}"
        found["held_out_error"] = _at_draws(before, draws) / total_of(last) - 1
    return found


# ---- EK-FAC ----


def _why_not(sizes: list[dict[str, Any]], spec: Spec, result: dict[str, Any]) -> str | None:
    if not sizes:
        return result.get("error") or no_time_left(result)
    whole = spec["configuration"]["layers"]
    depths = [size["size"]["layers"] for size in sizes]
    if depths[-1] >= whole:
        return None
    if len(sizes) < 2:
        known = f"{depths[0]} of {whole} layers were measured, and a projection needs two depths"
        return result.get("error") or (f"{no_time_left(result)}; {known}" if result.get("stopped") else known)
    totals = [total_of(size) for size in sizes]
    if fit_line(depths, totals).slope <= 0:
        return _too_busy(f"{', '.join(map(str, depths))} layers", totals)
    return None


class EkfacProjection:
    """The parts of a whole run at full depth, as lines and numbers that any row is made of."""

    def __init__(self, sizes: list[dict[str, Any]], spec: Spec, peak_flops: float | None = None):
        self.sizes, self.spec, self.last = sizes, spec, sizes[-1]
        self.whole: int = spec["configuration"]["layers"]
        self.shape = Configuration(**spec["configuration"])
        # No sequence goes through faster than its arithmetic at the device's peak, whatever two noisy sets say.
        flops = {"covariance": covariance_flops, "lambda": least_lambda_flops}
        tokens = spec["tokens"]
        self.least = {
            kind: count(self.shape, tokens) / peak_flops if peak_flops else 0.0 for kind, count in flops.items()
        }
        self.depths = [size["size"]["layers"] for size in sizes]
        self.deep = self.depths[-1] >= self.whole
        self.fits: list[dict[str, Any]] = self.last["fits"]
        self.train: int = self.last["size"]["train"]
        self.score_points = [(int(n), int(q), float(seconds)) for n, q, seconds in self.last["score_points"]]
        self.planes = {} if self.deep else {kind: self._plane(kind) for kind in PASSES}
        # Pass -> what is fixed, what a sequence takes at full depth, and the line they come from.
        self.passes = {kind: self._pass(kind) for kind in PASSES}
        # How much longer scores take at full depth than at the last that was measured.
        self.score_deeper = 1.0
        if not self.deep:
            line = fit_line(self.depths, [size["score_seconds"] for size in sizes])
            self.score_deeper = max(1.0, line.at(self.whole) / max(self.last["score_seconds"], 1e-9))
        known = bilinear(self.score_points) if len(self.score_points) > 3 else ()
        self.score_parts = tuple(self.score_deeper * value for value in known)

    # ---- the two passes over the fitting sequences ----

    def _plane(self, kind: str) -> Any:
        points = {
            (size["size"]["layers"], fit["fit_examples"]): fit[kind] for size in self.sizes for fit in size["fits"]
        }
        known = [(blocks, count, seconds) for (blocks, count), seconds in points.items()]
        return fit_blocks(known, self.least[kind] / self.whole, PASS_JITTER)

    def _pass(self, kind: str) -> tuple[float, float, Line | None]:
        """One fitting set has no fixed part."""
        if not self.deep:
            plane = self.planes[kind]
            return plane.base + self.whole * plane.fixed, self.whole * plane.each, None
        counts, seconds = [fit["fit_examples"] for fit in self.fits], [fit[kind] for fit in self.fits]
        if len(counts) < 2:
            return 0.0, seconds[0] / counts[0], None
        line = fit_line(counts, seconds, self.least[kind], PASS_JITTER)
        return line.intercept, line.slope, line

    def _own_fit(self, count: int) -> dict[str, Any]:
        return next((fit for fit in self.fits if fit["fit_examples"] == count), {})

    def _pass_seconds(self, kind: str, count: int) -> tuple[float, float]:
        """Seconds at full depth with so many fitting sequences, and their standard deviation."""
        fixed, each, line = self.passes[kind]
        value = fixed + each * count
        if not self.deep:
            unsplit = ONE_SIZE_ERROR * value if len(self.fits) < 2 else 0.0
            return value, math.hypot(self.planes[kind].deviation(self.whole, count), unsplit)
        if own := self._own_fit(count):
            return own[kind], own[kind] * LEAST_NOISE
        if line is None:
            return value, value * ONE_SIZE_ERROR
        return value, (line.interval(count)[1] - line.at(count)) / 1.96

    def _eigen_seconds(self, count: int) -> float:
        """Of the fitting set itself where it has its own, else of the first."""
        if not self.deep:
            # Every block has the same matrices: in proportion to the blocks, nothing else.
            return sum(size["phases"]["eigen"] for size in self.sizes) / sum(self.depths) * self.whole
        return self._own_fit(count).get("eigen") or self.last["phases"]["eigen"]

    def _held_out_fit(self, count: int) -> Row:
        """The fit of a fitting set, without its eigendecomposition, as the smaller ones would have projected it."""
        smaller, own = [fit for fit in self.fits if fit["fit_examples"] < count], self._own_fit(count)
        if len(smaller) < 2 or not own:
            return {}
        counts = [fit["fit_examples"] for fit in smaller]
        predicted = 0.0
        for kind in PASSES:
            least = self.least[kind] * self.depths[-1] / self.whole  # of the blocks that were run
            predicted += fit_line(counts, [fit[kind] for fit in smaller], least, PASS_JITTER).at(count)
        return {
            "held_out": f"{count} fitting sequences from {', '.join(map(str, counts))}",
            "held_out_error": predicted / sum(own[kind] for kind in PASSES) - 1,
        }

    # ---- scores, residuals and memory ----

    def _score_at(self, train: int, queries: int) -> float:
        base, per_train, per_query, per_pair = self.score_parts
        return base + per_train * train + per_query * queries + per_pair * train * queries

    def _score(self, queries: int) -> tuple[float, float] | None:
        """Seconds and their deviation at the point's training sequences; None where it cannot be said."""
        for n, q, seconds in self.score_points:
            if (n, q) == (self.train, queries):
                noise = LEAST_NOISE if self.deep else USUAL_NOISE
                return self.score_deeper * seconds, self.score_deeper * seconds * noise
        if not self.score_parts:
            return None
        value = self._score_at(self.train, queries)
        beyond = max(0.0, math.log2(queries / max(q for _, q, _ in self.score_points)))
        return value, SCORE_ERROR * (1 + beyond) * value

    def _residual(self, measured_fit: bool, measured_score: bool) -> float:
        """How far the lines miss what they rest on, at most: in depth, or at full depth in the fitting sequences; and
        in sequences and queries where those are projected."""
        found = 0.0
        if not self.deep:
            score = fit_line(self.depths, [size["score_seconds"] for size in self.sizes]).residual
            found = max(score, *(plane.residual for plane in self.planes.values()))
        elif not measured_fit:
            lines = [line for _, _, line in self.passes.values() if line is not None]
            both = [
                sum(line.at(fit["fit_examples"]) for line in lines) / (fit["covariance"] + fit["lambda"]) - 1
                for fit in self.fits
            ]
            found = max(map(abs, both)) if lines else 0.0
        if not measured_score:
            misses = [self._score_at(n, q) / self.score_deeper / seconds - 1 for n, q, seconds in self.score_points]
            found = max(found, *map(abs, misses))
        return found

    def _memory(self) -> Row:
        """More blocks take more memory and disk; more sequences pass through the same.

        Disk and host memory are lines in the blocks. On the device another part may hold most in few blocks (an
        eigendecomposition) than in many (lambda's pass), so its peak goes as arithmetic says.
        """
        found: Row = {}
        number_bytes = 4 if self.spec["dtype"] == "float32" else 2
        needs = [
            ekfac_needs(self.shape.with_layers(depth), self.spec["tokens"], number_bytes).memory_bytes
            for depth in (self.whole, self.depths[-1])
        ]
        for name in MEMORY:
            if self.last.get(name) is None:
                continue
            largest = max(size[name] for size in self.sizes)
            if not self.deep and name in ("peak_memory_bytes", "peak_reserved_bytes"):
                largest = round(largest * max(1.0, needs[0] / needs[1]))
            elif not self.deep:
                line = fit_line(self.depths, [size[name] for size in self.sizes])
                largest = round(max(largest, line.at(self.whole)))
            found[name] = largest
        return found

    # ---- a row ----

    def row(self, count: int, queries: int, missing: str) -> Row:
        """Columns of a fitting set and a number of queries."""
        asked: Row = {"fit_examples": count, "queries": queries}
        score = self._score(queries)
        if score is None:
            return asked | {"error": f"{missing}: scores of {queries} queries were not measured"}
        covariance, lambdas = (self._pass_seconds(kind, count) for kind in PASSES)
        eigen = self._eigen_seconds(count)
        fit_seconds = covariance[0] + eigen + lambdas[0]
        own_fit = self._own_fit(count)
        measured_score = any((n, q) == (self.train, queries) for n, q, _ in self.score_points)
        projected = not (self.deep and own_fit and measured_score)
        first = self.fits[0]["fit_examples"]
        shared = [] if own_fit.get("eigen") is not None else ["eigendecomposition"]
        shared += ["scores"] if count != first else []
        found = asked | {
            "projected": projected,
            "fit_seconds": fit_seconds,
            "score_seconds": score[0],
            "covariance_seconds": covariance[0],
            "eigen_seconds": eigen,
            "lambda_seconds": lambdas[0],
            "depth": self.depths[-1],
            "fit_sizes": ", ".join(str(fit["fit_examples"]) for fit in self.fits),
            **{f"{kind}_base": self.passes[kind][0] for kind in PASSES},
            **{f"{kind}_per_example": self.passes[kind][1] for kind in PASSES},
            "fit_seconds_per_example": self.passes["covariance"][1] + self.passes["lambda"][1],
            **dict(zip(SCORE_PARTS, self.score_parts)),
            # Which parts were measured with another row's fitting set.
            "shared_parts": f"{' and '.join(shared)} of {first} fitting sequences" if shared else None,
            **self._memory(),
            **self._held_out_fit(count),
        }
        if projected:
            residual = self._residual(bool(own_fit), measured_score)
            eigen_error = 0.0 if self.deep else USUAL_NOISE * eigen
            # What disturbs one pass over the fitting sequences disturbs the other: their errors add up.
            spread = 1.96 * math.hypot(covariance[1] + lambdas[1], eigen_error, score[1])
            total = fit_seconds + score[0]
            found |= {
                "seconds_low": max(0.0, total - spread),
                "seconds_high": total + spread,
                "max_residual": residual,
                "projected_from": self._origin(count, queries, bool(own_fit), measured_score, residual),
            }
        return found

    def _origin(self, count: int, queries: int, fit: bool, score: bool, residual: float) -> str:
        bent = f"not linear, {100 * residual:.0f} % off" if residual > LINEAR_WITHIN else ""
        texts = []
        if not self.deep:
            text = f"{', '.join(map(str, self.depths))} of {self.whole} layers"
            texts.append(f"{text}; {bent}" if bent else text)
        if not fit:
            sizes = ", ".join(str(known["fit_examples"]) for known in self.fits)
            text = f"{sizes} of {count} fitting sequences"
            texts.append(f"{text}, {bent}" if bent and self.deep else text)
        if not score:
            sizes = ", ".join(str(q) for q in sorted({q for _, q, _ in self.score_points}))
            texts.append(f"{sizes} of {queries} {QUERIES_END}")
        return "; ".join(texts)


# ---- one table from several sweeps of one machine ----
#
# The records must agree in versions, and the points of a method in its options and its cost-relevant code, so that they
# could have come from one sweep. Where a row is in several, a measured one counts before a projected one, the faster
# before the slower, and any before one without numbers; a whole run keeps how far fewer blocks were off, and what the
# same run took another time.

SAME_FIELDS = ("train", "tokens", "chains", "device_name", "dtype", "text_digest", "query_digest")
ROW_KEY = ("model", "method", "device", "train", "queries", "tokens", "draws", "fit_examples")


def read_records(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The sweeps' records, if they could have come from one sweep; every point with the id of its sweep."""
    records: list[dict[str, Any]] = []
    first: dict[str, tuple[str, Any]] = {}  # "versions", or a method's field -> where it was seen first, and its value
    for path in paths:
        try:
            records.append(read_json(path, follow_links=True))
            seen = {"versions": records[-1]["versions"]}
            for point in records[-1]["points"]:
                seen |= {f"{point['method']}'s {name}": value for name, value in _identity_of(point).items()}
                point.setdefault("run_id", records[-1]["run_id"])  # a merged record has several
        except (SafeFileError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no scaling.json of python -m bench.scaling: {_what(error)}") from None
        for name, value in seen.items():
            where, other = first.setdefault(name, (path, value))
            if value != other:
                raise UsageError(
                    f"{path} differs from {where} in {name}: {value} against {other}; merge sweeps of one setting, "
                    "with one version of the code and libraries"
                )
    return records


def _identity_of(point: dict[str, Any]) -> dict[str, Any]:
    """What points of one method must agree in; batch sizes depend on the model."""
    spec = point["spec"]
    options = {name: value for name, value in spec["options"].items() if not name.endswith("batch_size")}
    return {"cost_code": point["cost_code"], "options": options, **{name: spec.get(name) for name in SAME_FIELDS}}


def _what(error: Exception) -> str:
    """A missing field by its name; of anything else what it says."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def merge_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows, smallest model first, each with the id of the sweep that measured it."""
    made: dict[tuple[Any, ...], list[Row]] = {}
    for point in (point for record in records for point in record["points"]):
        try:
            rows = make_rows(point["spec"], point, point.get("peak_flops"))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            name = f"{point['model']} {point['method']}"
            raise UsageError(f"the point {name} is damaged: {type(error).__name__}, {_what(error)}") from None
        for row in rows:
            row["run_id"] = point["run_id"]
            made.setdefault(tuple(row[name] for name in ROW_KEY), []).append(row)
    order = {"bif": 0, "ekfac": 1}

    def place(row: Row) -> tuple[Any, ...]:
        group = order.get(row["method"], 2)
        return row["parameters"], group, row["method"], row["queries"], row["fit_examples"] or 0

    return sorted(map(_best_of, made.values()), key=place)


def _best_of(rows: Sequence[Row]) -> Row:
    """The row that counts, whatever order the sweeps are given in, with what the others say of it: the worst check of
    any run, and the seconds of the run that differs most."""

    def rank(row: Row) -> tuple[Any, ...]:
        """Smaller is better: with numbers, measured, deeper, from more draws; of whole runs the faster, as what
        disturbs a run only adds to it; of projections the one from larger fitting sets and more of them."""
        sizes = fit_sizes_of(row)
        seconds = 0.0 if row["error"] or row["projected"] else total_of(row)
        first = (bool(row["error"]), bool(row["projected"]), -(row["depth"] or 0), -(row["timed_draws"] or 0))
        return *first, seconds, -max(sizes, default=0), -len(sizes), row["run_id"]

    runs = sorted(rows, key=rank)
    kept, *others = runs
    checks = [{name: row[name] for name in ("held_out", "held_out_error")} for row in runs if row["held_out"]]
    checks += [found for whole in runs for part in runs if (found := _held_out_depth(whole, part))]
    again: list[float] = []
    if _was_run(kept):
        # A point that two sweeps took from one cache has the same seconds and is no second run.
        own = total_of(kept)
        again = [total_of(row) for row in others if row["depth"] == kept["depth"] and _was_run(row)]
        again = sorted((s for s in again if s != own), key=lambda s: -abs(math.log(s / own)))
    worst: Row = max(checks, key=lambda check: abs(check["held_out_error"]), default={})
    return kept | worst | {"again_seconds": again[0] if again else None}


def _held_out_depth(whole: Row, part: Row) -> Row:
    """A whole run as fewer blocks of the same model would have projected it, where both were run as they stand."""
    depths = [one["depth"] or 0 for one in (whole, part)]
    if whole["error"] or whole["projected"] or not _was_run(part) or not depths[0] > depths[1] > 0:
        return {}
    names = {"covariance": "covariance_seconds", "eigen": "eigen_seconds", "lambda": "lambda_seconds",
             "scores": "score_seconds"}  # fmt: skip
    parts = ", ".join(f"{words} {100 * (part[name] / whole[name] - 1):+.0f} %" for words, name in names.items())
    text = f"{depths[0]} layers from {str(part['projected_from']).partition(' of ')[0]} ({parts})"
    return {"held_out": text, "held_out_error": total_of(part) / total_of(whole) - 1}


def _was_run(row: Row) -> bool:
    """Whether this very setting was run, if only in fewer blocks, rather than reached by a line through others."""
    origin = str(row["projected_from"])
    in_fewer_blocks = origin.partition(";")[0].endswith(" layers") and not ("fitting" in origin or "queries" in origin)
    return not row["error"] and (not row["projected"] or in_fewer_blocks)
