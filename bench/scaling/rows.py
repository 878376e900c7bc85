"""The rows of scaling.csv: read and checked, made from what points measured, and merged from several sweeps.

    rows = read_rows("results/scaling/scaling.csv")  # a list of dictionaries; an empty cell is None
    rows = merge_rows(read_records(paths))           # one table from the points of several sweeps

A row is one (model, method, setting). Rows with an `error` have no numbers, and every estimate passes over them.

A point is measured at several sizes. A row is projected where none of them was the whole run: its seconds come from
the line through at least two sizes, with their 95 % interval. `held_out_error` is how far a projection from the smaller
sizes alone is from the largest that was measured. A whole run of EK-FAC is covariance + eigendecomposition + lambda +
scores. Covariance and lambda are lines in the fitting sequences; scores are a base and parts a sequence, a query and a
pair; eigendecompositions depend on neither. Below full depth the passes are a base, a part a block, and a part a block
and sequence.
"""

import io
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.scaling import suite
from bench.scaling.lines import LEAST_NOISE, LINEAR_WITHIN, USUAL_NOISE, bilinear, bilinear_at, fit_blocks, fit_line
from bench.scaling.suite import SUITE, Configuration, Setting
from bench.tables import grouped
from retrain.errors import UsageError, error_line
from retrain.safe_files import SafeFileError, one_line, read_json, read_text, write_whole

RATES = Path(__file__).with_name("rates.csv")  # the rows that ship with the package: those of results/scaling
SHAPE_COLUMNS = ("hidden", "layers", "heads", "intermediate", "vocabulary")  # what a model's cost depends on
SCORE_PARTS = ("score_base", "score_per_train", "score_per_query", "score_per_pair")
COLUMNS = [
    "model", "parameters", "method", "load_seconds", "fit_seconds", "score_seconds", "peak_memory_bytes", "disk_bytes",
    "projected", "seconds_low", "seconds_high", "device", "error", "run_id",
    "train", "queries", "tokens", "draws", "fit_examples", "minibatch", "dtype", "weights", "text",
    "token_parameters", *SHAPE_COLUMNS, "weight_bytes", "peak_reserved_bytes", "host_peak_bytes",
    "timed_draws", "seconds_per_draw", "setup_seconds", "floor_seconds_per_draw", "floor_ratio", "peak_flops",
    "token_bytes", "depth", "eigen_cost", "eigen_seconds", "covariance_seconds", "lambda_seconds", "fit_sizes",
    "covariance_base", "covariance_per_example", "lambda_base", "lambda_per_example", "fit_seconds_per_example",
    *SCORE_PARTS, "factor_bytes", "shared_parts",
    "needed_memory_bytes", "needed_disk_bytes", "storage", "projected_from", "max_residual", "held_out",
    "held_out_error", "again_seconds",
]  # fmt: skip
NOT_NUMBERS = {
    "model", "method", "projected", "device", "error", "run_id", "dtype", "weights", "text", "fit_sizes",
    "shared_parts", "storage", "projected_from", "held_out",
}  # fmt: skip
SIZE_COLUMNS = ("parameters", "train", "queries", "tokens", "token_parameters")  # every row has them
NEEDED_COLUMNS = (*SIZE_COLUMNS, "model", "method", "fit_seconds", "score_seconds", "peak_memory_bytes", "device")
_BIF_COLUMNS = ("seconds_per_draw", "minibatch")
_EKFAC_COLUMNS = ("fit_examples", "eigen_seconds", "eigen_cost", "covariance_per_example", "lambda_per_example")
OWN_COLUMNS = {"bif": _BIF_COLUMNS, "bif_tokens": _BIF_COLUMNS, "ekfac": _EKFAC_COLUMNS}  # of a measured row
ABOVE_ZERO = {"score_seconds", "seconds_per_draw", "eigen_seconds", "eigen_cost", "seconds_high", "peak_flops"}
QUERIES_END = "queries"  # how `projected_from` ends in a row whose scores are projected
METHOD_LABELS = {
    "bif": "BIF",
    "ekfac": "EK-FAC",
    "gradsim": "GradSim",
    "trak": "TRAK",
    "bif_tokens": "BIF, every token",
}
# What a draw takes is known to a few per cent; what a run of a few draws takes beside them (capturing, kernels chosen
# on first use) is not, so two totals make a poor line in draws.
LEAST_DRAW_ERROR = 0.05
ONE_SIZE_ERROR = 0.15  # of what a fitting sequence takes, where one fitting set does not tell it from what is fixed
PASS_JITTER = 0.5  # seconds a pass over the fitting sequences differs by from one run to the next, however short it is
SCORE_ERROR = 0.10  # of scores at a number of queries that was not measured, and again a factor of two beyond
PASSES = ("covariance", "lambda")
MEMORY = ("peak_memory_bytes", "peak_reserved_bytes", "host_peak_bytes", "disk_bytes")  # columns of a measured size

Row = dict[str, Any]
Spec = dict[str, Any]


# ---- reading and writing ----


def read_rows(path: str | Path) -> list[Row]:
    """Every row, checked; the first cell that cannot be right is named with its line and what was expected."""
    if not Path(path).exists():
        raise UsageError(f"{path} is not there; measure first: tda-bench scaling --out {Path(path).parent}")
    try:
        frame = pd.read_csv(io.StringIO(text := read_text(path, follow_links=True)), dtype={"fit_sizes": str})
    except (SafeFileError, ValueError) as error:
        raise UsageError(f"{path} is no readable CSV: {error}; expected a sweep's scaling.csv") from None
    if not text.endswith("\n"):
        raise UsageError(f"{path}, line {len(text.splitlines())}: it was cut off; expected the end of a line")
    if missing := [name for name in NEEDED_COLUMNS if name not in frame]:
        raise UsageError(f"{path} lacks the columns {', '.join(missing)}; expected the scaling.csv of bench.scaling")
    frame = frame.reindex(columns=list(dict.fromkeys([*COLUMNS, *frame])))
    measured = frame["score_seconds"].notna() & frame["error"].isna()
    for name in (name for name in COLUMNS if name not in NOT_NUMBERS):
        methods = [method for method, names in OWN_COLUMNS.items() if name in names]
        required = (name in SIZE_COLUMNS) | (measured & frame["method"].isin(methods))
        values = pd.to_numeric(frame[name], errors="coerce")
        expected, right = "a number", np.isfinite(values)
        if name in SIZE_COLUMNS:
            expected, right = "a whole number of at least 1", right & (values >= 1) & (values % 1 == 0)
        elif name in ABOVE_ZERO:
            expected, right = "a number above 0", right & (values > 0)
        elif name != "held_out_error":
            expected, right = "a number of at least 0", right & (values >= 0)
        for row in np.flatnonzero(~right & (frame[name].notna() | required)):
            cell = frame[name][row]
            came = "empty" if pd.isna(cell) else f'"{one_line(str(cell), 40)}"'
            raise UsageError(f"{path}, line {row + 2}: {name} is {came}; expected {expected}")
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    write_whole(path, pd.DataFrame(list(rows), columns=COLUMNS).to_csv(index=False))


# ---- what a row says ----


def total_of(row: Row) -> float:
    """Seconds of the fit and the scores."""
    return (row["fit_seconds"] or 0.0) + (row["score_seconds"] or 0.0)


def fit_sizes_of(row: Row) -> list[int]:
    """Fitting sets that were measured in the point of a row."""
    return [int(size) for size in (row["fit_sizes"] or "").split(", ") if size]


def scores_were_measured(row: Row) -> bool:
    """At the row's own number of queries, at whatever depth."""
    return not (row["projected_from"] or "").endswith(QUERIES_END)


def score_parts(row: Row) -> list[float] | None:
    """What scores are made of, where enough of them were measured to tell."""
    values = [row[name] for name in SCORE_PARTS]
    return values if None not in values and any(values) else None


def setting_of(row: Row) -> Setting:
    """What was asked of the run that a row is about."""
    return Setting(
        train=int(row["train"]), queries=int(row["queries"]), tokens=int(row["tokens"]), draws=int(row["draws"] or 0),
        fit_examples=int(row["fit_examples"] or row["train"]), minibatch=int(row["minibatch"] or 32),
    )  # fmt: skip


def method_label(method: str) -> str:
    return METHOD_LABELS.get(method, method.rpartition(":")[2])


def shape_of(row: Row) -> Configuration:
    """The suite's, or a folder's by the row's own columns."""
    return _shape(str(row["model"]), tuple(row[name] for name in SHAPE_COLUMNS))


@lru_cache(maxsize=1024)  # laws and crossings ask for each row's thousands of times
def _shape(model: str, shape: tuple[Any, ...]) -> Configuration:
    if model in SUITE:
        return SUITE[model]
    if not all(shape):
        missing = ", ".join(SHAPE_COLUMNS)
        raise UsageError(f'"{model}" is no model of the suite, and its row does not say its {missing}')
    columns: dict[str, Any] = dict(zip(SHAPE_COLUMNS, map(int, shape)))
    return Configuration(name=model, **columns)


def is_of(row: Row, configuration: Configuration) -> bool:
    """Whatever it is called: a folder with a suite model's shape costs what that costs."""
    own = shape_of(row)
    return all(getattr(own, name) == getattr(configuration, name) for name in SHAPE_COLUMNS)


# ---- what points come to ----


def make_rows(spec: Spec, result: dict[str, Any], peak_flops: float | None) -> list[Row]:
    """Every column but run_id; a point without usable sizes is a row with its reason in `error`."""
    shape, whole = Configuration(**spec["configuration"]), spec["configuration"]["layers"]
    number_bytes = 4 if spec["dtype"] == "float32" else 2
    row = dict.fromkeys(COLUMNS) | {
        "model": shape.name, "method": spec["method"], "device": result.get("device") or spec["device_name"],
        "parameters": shape.num_parameters, "token_parameters": shape.num_token_parameters,
        "weight_bytes": shape.num_parameters * number_bytes, "projected": False,
        "load_seconds": result.get("load_seconds"), "peak_flops": peak_flops,
        "weights": spec["weights_name"], "text": spec["text_name"],
        "fit_examples": spec["fit_examples"] if spec["fitted"] else None,
        **{name: spec[name] for name in ("train", "queries", "tokens", "dtype")},
        **{name: getattr(shape, name) for name in SHAPE_COLUMNS},
    }  # fmt: skip
    ended = result.get("error") or ": ".join(filter(None, ["no time left", result.get("stopped")]))
    sizes = result.get("rungs", [])
    if spec["axis"] == "draws":
        row |= {"draws": spec["draws"], "minibatch": spec["options"].get("minibatch")}
    if spec["axis"] != "layers":
        return [row | ({"error": ended} if result.get("error") or not sizes else _one_row(row, spec, sizes, ended))]

    needs = result.get("needs", {})
    row |= {
        "eigen_cost": shape.eigen_cost, "factor_bytes": shape.factor_bytes(number_bytes),
        "needed_memory_bytes": needs.get("memory_bytes"), "needed_disk_bytes": needs.get("disk_bytes"),
        "storage": result.get("storage"),
    }  # fmt: skip
    depths = [size["size"]["layers"] for size in sizes]
    error = None if sizes else ended
    if sizes and depths[-1] < whole and len(sizes) < 2:
        known = f"{depths[0]} of {whole} layers were measured"
        error = result.get("error") or f"{known}, and a projection needs two depths"
    elif sizes and depths[-1] < whole:
        error = _too_busy(depths, "layers", sizes)
    if error:
        return [row | {"fit_examples": fit, "queries": count, "error": error} for fit, count in asked_rows(spec)]
    projection = EkfacProjection(sizes, spec, peak_flops)
    return [row | projection.row(fit, count, ended) for fit, count in asked_rows(spec)]


def asked_rows(spec: Spec) -> list[tuple[int, int]]:
    """(fitting sequences, queries) of each row: a row a fitting set, and one a further number of queries."""
    fit_sets, counts = spec["fit_sets"], spec["query_counts"]
    return [(count, counts[0]) for count in fit_sets] + [(fit_sets[0], count) for count in counts[1:]]


def _too_busy(known: Sequence[int], axis: str, sizes: list[Row]) -> str | None:
    """Why there is no projection, where larger sizes did not take longer."""
    if fit_line(known, [total_of(size) for size in sizes]).slope > 0:
        return None
    took = ", ".join(f"{total_of(size):.3g} s" for size in sizes)
    counts = ", ".join(map(str, known))
    return f"no projection: {counts} {axis} took {took}; the machine is too busy to tell them apart, run again"


def _most(sizes: list[Row]) -> Row:
    """More sequences and draws pass through the same memory."""
    return {name: max(size[name] for size in sizes) for name in MEMORY if sizes[-1].get(name) is not None}


# ---- a method that is measured at several numbers of draws or of training sequences ----


def _one_row(row: Row, spec: Spec, sizes: list[Row], ended: str) -> Row:
    axis, target, last = spec["axis"], spec[spec["axis"]], sizes[-1]
    counts = [size["size"][axis] for size in sizes]
    from_sizes = f"{', '.join(map(str, counts))} of {target}"
    if counts[-1] >= target:
        found: Row = {name: last[name] for name in ("fit_seconds", "score_seconds", *MEMORY)}
    elif all(size.get("tick_seconds") for size in sizes):
        # Setup once and the median time between draws so many times; the interval is what sizes differ by, doubled.
        seconds = [_at_draws(size, target) for size in sizes]
        spread = max(abs(value / seconds[-1] - 1) for value in seconds)
        error = max(LEAST_DRAW_ERROR, 2 * spread)
        found = {
            "projected": True, "projected_from": f"the median draw of {from_sizes} draws", "max_residual": spread,
            "fit_seconds": 0.0, "score_seconds": seconds[-1],
            "seconds_low": seconds[-1] * max(0.0, 1 - error), "seconds_high": seconds[-1] * (1 + error),
            **_most(sizes),
        }  # fmt: skip
    elif len(sizes) < 2:
        return {"error": f"{ended}; a projection needs two sizes"}
    elif busy := _too_busy(counts, axis, sizes):
        return {"error": busy}
    else:  # along the line of the seconds; what is written of each sequence adds up
        total = fit_line(counts, [total_of(size) for size in sizes])
        low, high = total.interval(target)
        fit, disk = (
            fit_line(counts, [size[name] for size in sizes]).at(target) for name in ("fit_seconds", "disk_bytes")
        )
        fit = min(fit, total.at(target)) if last["fit_seconds"] > 1e-3 else 0.0
        bent = "" if total.residual <= LINEAR_WITHIN else f"; not linear, {100 * total.residual:.0f} % off"
        found = {
            "projected": True, "projected_from": f"{from_sizes} {axis}{bent}", "max_residual": total.residual,
            "fit_seconds": fit, "score_seconds": total.at(target) - fit, "seconds_low": low, "seconds_high": high,
            **_most(sizes), "disk_bytes": round(disk),
        }  # fmt: skip
    found["token_bytes"] = last.get("token_bytes")
    return found | (_draw_columns(row, sizes) if axis == "draws" else {})


def _at_draws(size: Row, draws: int) -> float:
    """What a run of so many draws would take, by this size's own setup and median draw."""
    return max(0.0, total_of(size) - size["tick_seconds"] * size["size"]["draws"]) + size["tick_seconds"] * draws


def _draw_columns(row: Row, sizes: list[Row]) -> Row:
    """Seconds a draw: the median between draws of the longest run; the rest is setup. And that run as the one before
    would have projected it."""
    last = sizes[-1]
    draws = last["size"]["draws"]
    each = last.get("tick_seconds") or last["score_seconds"] / draws
    setup = max(0.0, total_of(last) - each * draws)
    found: Row = {"timed_draws": draws, "seconds_per_draw": each, "setup_seconds": setup}
    if row["peak_flops"] and row["minibatch"]:
        flops = suite.draw_flops(row["token_parameters"], row["train"], row["queries"], row["minibatch"], row["tokens"])
        found["floor_seconds_per_draw"] = flops / row["peak_flops"]
        found["floor_ratio"] = each / found["floor_seconds_per_draw"]
    if len(sizes) > 1 and sizes[-2].get("tick_seconds"):
        found["held_out"] = f"{draws} draws from {sizes[-2]['size']['draws']}"
        found["held_out_error"] = _at_draws(sizes[-2], draws) / total_of(last) - 1
    return found


# ---- EK-FAC ----


class EkfacProjection:
    """The parts of a whole run at full depth, as lines and numbers that any row is made of."""

    def __init__(self, sizes: list[Row], spec: Spec, peak_flops: float | None):
        self.sizes, self.spec, self.last = sizes, spec, sizes[-1]
        self.shape = Configuration(**spec["configuration"])
        self.depths = [size["size"]["layers"] for size in sizes]
        self.whole, self.deep = self.shape.layers, self.depths[-1] >= self.shape.layers
        self.fits = {fit["fit_examples"]: fit for fit in self.last["fits"]}
        self.train: int = self.last["size"]["train"]
        # No sequence goes through faster than its arithmetic at the device's peak, whatever two noisy sets say.
        flops = {"covariance": suite.covariance_flops, "lambda": suite.least_lambda_flops}
        self.least = {
            kind: work(self.shape, spec["tokens"]) / peak_flops if peak_flops else 0.0 for kind, work in flops.items()
        }
        # Pass -> what is fixed, what a sequence takes at full depth, and the line or plane they come from.
        self.passes = {kind: self._pass(kind) for kind in PASSES}
        self.scores = {(int(n), int(q)): float(seconds) for n, q, seconds in self.last["score_points"]}
        # How much longer scores take at full depth than at the last that was measured.
        self.score_line = None if self.deep else fit_line(self.depths, [size["score_seconds"] for size in sizes])
        self.score_deeper = 1.0
        if self.score_line:
            self.score_deeper = max(1.0, self.score_line.at(self.whole) / max(self.last["score_seconds"], 1e-9))
        known = bilinear(self.last["score_points"]) if len(self.scores) > 3 else ()
        self.score_parts = tuple(self.score_deeper * value for value in known)

    def _pass(self, kind: str) -> tuple[float, float, Any]:
        if not self.deep:
            points = [
                (size["size"]["layers"], fit["fit_examples"], fit[kind]) for size in self.sizes for fit in size["fits"]
            ]
            plane = fit_blocks(points, self.least[kind] / self.whole, PASS_JITTER)
            base, fixed, each = plane.weights.tolist()
            return base + self.whole * fixed, self.whole * each, plane
        counts, seconds = list(self.fits), [fit[kind] for fit in self.fits.values()]
        if len(counts) < 2:  # one fitting set has no fixed part
            return 0.0, seconds[0] / counts[0], None
        line = fit_line(counts, seconds, self.least[kind], PASS_JITTER)
        return line.intercept, line.slope, line

    def _pass_seconds(self, kind: str, count: int) -> tuple[float, float]:
        """Seconds at full depth with so many fitting sequences, and their standard deviation."""
        fixed, each, line = self.passes[kind]
        value = fixed + each * count
        if not self.deep:
            unsplit = ONE_SIZE_ERROR * value if len(self.fits) < 2 else 0.0
            return value, math.hypot(line.deviation(self.whole, count), unsplit)
        if count in self.fits:
            return self.fits[count][kind], self.fits[count][kind] * LEAST_NOISE
        if line is None:
            return value, value * ONE_SIZE_ERROR
        return value, (line.interval(count)[1] - line.at(count)) / 1.96

    def _score(self, queries: int) -> tuple[float, float] | None:
        """Seconds and their deviation at the point's training sequences; None where it cannot be said."""
        if (self.train, queries) in self.scores:
            seconds = self.score_deeper * self.scores[self.train, queries]
            return seconds, seconds * (LEAST_NOISE if self.deep else USUAL_NOISE)
        if not self.score_parts:
            return None
        value = bilinear_at(self.score_parts, self.train, queries)
        beyond = max(0.0, math.log2(queries / max(q for _, q in self.scores)))
        return value, SCORE_ERROR * (1 + beyond) * value

    def _memory(self) -> Row:
        """More blocks take more memory and disk; more sequences pass through the same.

        Disk and host memory are lines in the blocks. On the device another part may hold most in few blocks (an
        eigendecomposition) than in many (lambda's pass), so its peak goes as arithmetic says.
        """
        found = _most(self.sizes)
        if self.deep:
            return found
        number_bytes = 4 if self.spec["dtype"] == "float32" else 2
        whole, part = (
            suite.ekfac_needs(self.shape.with_layers(depth), self.spec["tokens"], number_bytes).memory_bytes
            for depth in (self.whole, self.depths[-1])
        )
        for name, largest in found.items():
            if name in ("peak_memory_bytes", "peak_reserved_bytes"):
                found[name] = round(largest * max(1.0, whole / part))
            else:
                line = fit_line(self.depths, [size[name] for size in self.sizes])
                found[name] = round(max(largest, line.at(self.whole)))
        return found

    def row(self, count: int, queries: int, ended: str) -> Row:
        """Columns of a fitting set and a number of queries."""
        asked: Row = {"fit_examples": count, "queries": queries}
        score = self._score(queries)
        if score is None:
            return asked | {"error": f"{ended}: scores of {queries} queries were not measured"}
        (covariance, covariance_error), (lambdas, lambda_error) = (self._pass_seconds(kind, count) for kind in PASSES)
        own_eigen, first = self.fits.get(count, {}).get("eigen"), next(iter(self.fits))
        eigen = own_eigen or self.last["phases"]["eigen"]
        if not self.deep:  # every block has the same matrices: in proportion to the blocks, nothing else
            eigen = sum(size["phases"]["eigen"] for size in self.sizes) / sum(self.depths) * self.whole
        shared = ([] if own_eigen is not None else ["eigendecomposition"]) + (["scores"] if count != first else [])
        found = asked | {
            "projected": not (self.deep and count in self.fits and (self.train, queries) in self.scores),
            "fit_seconds": covariance + eigen + lambdas, "score_seconds": score[0],
            "covariance_seconds": covariance, "eigen_seconds": eigen, "lambda_seconds": lambdas,
            "depth": self.depths[-1], "fit_sizes": ", ".join(map(str, self.fits)),
            **{f"{kind}_base": self.passes[kind][0] for kind in PASSES},
            **{f"{kind}_per_example": self.passes[kind][1] for kind in PASSES},
            "fit_seconds_per_example": self.passes["covariance"][1] + self.passes["lambda"][1],
            **dict(zip(SCORE_PARTS, self.score_parts)), **self._memory(),
            # Which parts were measured with another row's fitting set.
            "shared_parts": f"{' and '.join(shared)} of {first} fitting sequences" if shared else None,
        }  # fmt: skip
        smaller = [size for size in self.fits if size < count]
        if count in self.fits and len(smaller) > 1:
            # The fit, without its eigendecomposition, as the smaller fitting sets would have projected it.
            predicted = 0.0
            for kind in PASSES:
                least = self.least[kind] * self.depths[-1] / self.whole  # of the blocks that were run
                known = [self.fits[size][kind] for size in smaller]
                predicted += fit_line(smaller, known, least, PASS_JITTER).at(count)
            found["held_out"] = f"{count} fitting sequences from {', '.join(map(str, smaller))}"
            found["held_out_error"] = predicted / sum(self.fits[count][kind] for kind in PASSES) - 1
        if found["projected"]:
            # What disturbs one pass over the fitting sequences disturbs the other: their errors add up.
            eigen_error = 0.0 if self.deep else USUAL_NOISE * eigen
            spread = 1.96 * math.hypot(covariance_error + lambda_error, eigen_error, score[1])
            total = total_of(found)
            found |= {"seconds_low": max(0.0, total - spread), "seconds_high": total + spread}
            found |= self._origin(count, queries)
        return found

    def _origin(self, count: int, queries: int) -> Row:
        """What a projected row rests on, and how far the lines miss that at most: in depth, or at full depth in the
        fitting sequences; and in sequences and queries where those are projected."""
        residual, texts = 0.0, []
        if self.score_line:
            residual = max(self.score_line.residual, *(plane.residual for _, _, plane in self.passes.values()))
        elif count not in self.fits and len(self.fits) > 1:
            for size, fit in self.fits.items():
                on_lines = sum(line.at(size) for _, _, line in self.passes.values())
                residual = max(residual, abs(on_lines / (fit["covariance"] + fit["lambda"]) - 1))
        if (self.train, queries) not in self.scores:
            for (n, q), seconds in self.scores.items():
                residual = max(residual, abs(bilinear_at(self.score_parts, n, q) / self.score_deeper / seconds - 1))
        bent = f"not linear, {100 * residual:.0f} % off" if residual > LINEAR_WITHIN else ""
        if not self.deep:
            texts.append("; ".join(filter(None, [f"{', '.join(map(str, self.depths))} of {self.whole} layers", bent])))
        if count not in self.fits:
            text = f"{', '.join(map(str, self.fits))} of {count} fitting sequences"
            texts.append(f"{text}, {bent}" if bent and self.deep else text)
        if (self.train, queries) not in self.scores:
            texts.append(f"{', '.join(map(str, sorted({q for _, q in self.scores})))} of {queries} {QUERIES_END}")
        return {"max_residual": residual, "projected_from": "; ".join(texts)}


# ---- one table from several sweeps of one machine ----
#
# The records must agree in versions, and the points of a method in its options and its cost-relevant code, so that they
# could have come from one sweep. Where a row is in several, a measured one counts before a projected one, the faster
# before the slower, and any before one without numbers; a whole run keeps how far fewer blocks were off, and what the
# same run took another time.

SAME_FIELDS = ("train", "tokens", "chains", "device_name", "dtype")
ROW_KEY = ("model", "method", "device", "train", "queries", "tokens", "draws", "fit_examples")


def read_records(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The sweeps' records, if they could have come from one sweep; every point with the id of its sweep."""
    records: list[dict[str, Any]] = []
    first: dict[str, tuple[str, Any]] = {}  # "versions", or a method's field -> where it was seen first, and its value
    for path in paths:
        try:
            record = read_json(path, follow_links=True)
            seen = {"versions": record["versions"]}
            for point in record["points"]:
                spec, point["run_id"] = point["spec"], point.get("run_id", record["run_id"])  # a merged one has several
                # Batch sizes depend on the model.
                options = {name: v for name, v in spec["options"].items() if not name.endswith("batch_size")}
                same = {"cost_code": point["cost_code"], "options": options} | {n: spec.get(n) for n in SAME_FIELDS}
                seen |= {f"{point['method']}'s {name}": value for name, value in same.items()}
        except (SafeFileError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is no scaling.json of tda-bench scaling: {error_line(error)}") from None
        for name, value in seen.items():
            where, other = first.setdefault(name, (path, value))
            if value != other:
                differs = f"{path} differs from {where} in {name}: {value} against {other}"
                raise UsageError(f"{differs}; merge like with like")
        records.append(record)
    return records


def merge_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows, smallest model first, each with the id of the sweep that measured it."""
    made: list[Row] = []
    for point in (point for record in records for point in record["points"]):
        for row in make_rows(point["spec"], point, point.get("peak_flops")):
            row["run_id"] = point["run_id"]
            made.append(row)
    order = {"bif": 0, "ekfac": 1}

    def place(row: Row) -> tuple[Any, ...]:
        group = order.get(row["method"], 2)
        return row["parameters"], group, row["method"], row["queries"], row["fit_examples"] or 0

    alike = grouped(made, lambda row: tuple(row[name] for name in ROW_KEY))
    return sorted(map(_best_of, alike.values()), key=place)


def _best_of(rows: Sequence[Row]) -> Row:
    """The row that counts, whatever order the sweeps are given in, with what the others say of it: the worst check of
    any run, and the seconds of the run that differs most."""

    def rank(row: Row) -> tuple[Any, ...]:
        """Smaller is better: with numbers, measured, deeper, from more draws; of whole runs the faster, as what
        disturbs a run only adds to it; of projections the one from larger fitting sets and more of them."""
        sizes = fit_sizes_of(row)
        seconds = 0.0 if row["error"] or row["projected"] else total_of(row)
        first = (bool(row["error"]), row["projected"], -(row["depth"] or 0), -(row["timed_draws"] or 0))
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
    fewer = (whole["depth"] or 0) > (part["depth"] or 0) > 0
    if whole["error"] or whole["projected"] or not fewer or not _was_run(part):
        return {}
    names = {"covariance": "covariance_seconds", "eigen": "eigen_seconds", "lambda": "lambda_seconds"}
    names["scores"] = "score_seconds"
    parts = ", ".join(f"{words} {100 * (part[name] / whole[name] - 1):+.0f} %" for words, name in names.items())
    text = f"{whole['depth']} layers from {part['projected_from'].partition(' of ')[0]} ({parts})"
    return {"held_out": text, "held_out_error": total_of(part) / total_of(whole) - 1}


def _was_run(row: Row) -> bool:
    """Whether this very setting was run, if only in fewer blocks, rather than reached by a line through others."""
    origin = row["projected_from"] or ""
    in_fewer_blocks = origin.partition(";")[0].endswith(" layers") and not ("fitting" in origin or "queries" in origin)
    return not row["error"] and (not row["projected"] or in_fewer_blocks)
