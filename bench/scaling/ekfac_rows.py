"""EK-FAC's rows: one a fitting set at the first number of queries, and one a further number of queries.

A whole run is covariance + eigendecomposition + lambda + scores. Covariance and lambda are lines in the fitting
sequences, through every fitting set that was measured; scores are a base and parts a sequence, a query and a pair;
eigendecompositions depend on neither. Where the model was not measured at its full depth, blocks are all alike: the two
passes are a base, a part a block, and a part a block and sequence; scores are a line in the blocks, and the
eigendecompositions in proportion to them.
"""

import math
from typing import Any

from bench.scaling.costs import covariance_flops, ekfac_needs, least_lambda_flops
from bench.scaling.lines import (
    LEAST_NOISE,
    LINEAR_WITHIN,
    USUAL_NOISE,
    BlockPlane,
    Line,
    bilinear,
    fit_blocks,
    fit_line,
)
from bench.scaling.sizes import MEMORY
from retrain.models.pythia_suite import Configuration

ONE_SIZE_ERROR = 0.15  # of what a fitting sequence takes, where one fitting set does not tell it from what is fixed
PASS_JITTER = 0.5  # seconds a pass over the fitting sequences differs by from one run to the next, however short it is
SCORE_ERROR = 0.10  # of scores at a number of queries that was not measured, and again a factor of two beyond
NO_PROJECTION = "no projection"  # how the reason begins where more took less
QUERIES_END = "queries"  # how the origin of a row ends whose scores are projected
SCORE_PARTS = ("score_base", "score_per_train", "score_per_query", "score_per_pair")


def add_ekfac(row: dict[str, Any], spec: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    rungs = [rung for rung in result.get("rungs", []) if rung.get("phases")]
    error = _why_not(rungs, spec, result)
    if error:
        return [row | {"fit_examples": fit, "queries": count, "error": error} for fit, count in asked_rows(spec)]
    parts = Parts(rungs, spec, row.get("peak_flops"))
    rows = []
    for fit_examples, queries in asked_rows(spec):
        here = row | {"fit_examples": fit_examples, "queries": queries}
        rows.append(parts.row(here, result.get("error") or no_time_left(result)))
    return rows


def asked_rows(spec: dict[str, Any]) -> list[tuple[int, int]]:
    """(fitting sequences, queries) of each row."""
    fit_sets = spec.get("fit_sets") or [spec["fit_examples"]]
    counts = spec.get("query_counts") or [spec["queries"]]
    return [(count, counts[0]) for count in fit_sets] + [(fit_sets[0], count) for count in counts[1:]]


def fit_sizes_of(row: dict[str, Any]) -> list[int]:
    """Fitting sets that were measured in the point of a row; a column of single ones is read back as numbers."""
    return [int(float(size)) for size in str(row.get("fit_sizes") or "").split(", ") if size]


def scores_were_measured(row: dict[str, Any]) -> bool:
    """At the row's own number of queries, at whatever depth."""
    return not str(row.get("projected_from") or "").endswith(QUERIES_END)


def no_time_left(result: dict[str, Any]) -> str:
    return f"no time left: {result['stopped']}" if result.get("stopped") else "no time left"


def _why_not(rungs: list[dict[str, Any]], spec: dict[str, Any], result: dict[str, Any]) -> str | None:
    if not rungs:
        return result.get("error") or no_time_left(result)
    whole = spec["configuration"]["layers"]
    depths = [rung["size"]["layers"] for rung in rungs]
    if depths[-1] >= whole:
        return None
    if len(rungs) < 2:
        known = f"{depths[0]} of {whole} layers were measured, and a projection needs two depths"
        return result.get("error") or (f"{no_time_left(result)}; {known}" if result.get("stopped") else known)
    totals = [rung["fit_seconds"] + rung["score_seconds"] for rung in rungs]
    if fit_line(depths, totals).slope <= 0:
        seconds = ", ".join(f"{total:.3g} s" for total in totals)
        sizes = ", ".join(map(str, depths))
        return f"{NO_PROJECTION}: {sizes} layers took {seconds}; the machine is too busy to tell them apart, run again"
    return None


class Parts:
    """The parts of a whole run at full depth, as lines and numbers that any row is made of."""

    def __init__(self, rungs: list[dict[str, Any]], spec: dict[str, Any], peak_flops: float | None = None):
        self.rungs, self.spec, self.last = rungs, spec, rungs[-1]
        self.whole: int = spec["configuration"]["layers"]
        self.shape = Configuration(**spec["configuration"])
        # No sequence goes through faster than its arithmetic at the device's peak, whatever two noisy sets say.
        flops = {"covariance": covariance_flops, "lambda": least_lambda_flops}
        self.least = {
            kind: count(self.shape, spec["tokens"]) / peak_flops if peak_flops else 0.0 for kind, count in flops.items()
        }
        self.depths = [rung["size"]["layers"] for rung in rungs]
        self.deep = self.depths[-1] >= self.whole
        phases = self.last["phases"]
        first = {"fit_examples": self.last["size"]["fit_examples"], **phases}
        self.fits: list[dict[str, Any]] = self.last.get("fits") or [first]
        train, queries = self.last["size"]["train"], self.last["size"].get("queries", spec["queries"])
        points = self.last.get("score_points") or [[train, queries, self.last["score_seconds"]]]
        self.score_points = [(int(n), int(q), float(seconds)) for n, q, seconds in points]
        self.planes = {} if self.deep else {kind: self._plane(kind) for kind in ("covariance", "lambda")}
        self.covariance, self.lambdas = (self._line(kind) for kind in ("covariance", "lambda"))
        deeper = self._deeper("score")
        self.score_deeper = deeper
        self.score_parts = tuple(deeper * v for v in bilinear(self.score_points)) if len(self.score_points) > 3 else ()

    # ---- depth ----

    def _of_rung(self, rung: dict[str, Any], kind: str) -> float:
        return rung["score_seconds"] if kind == "score" else rung["phases"][kind]

    def _deeper(self, kind: str) -> float:
        """How much longer a part takes at full depth than at the last that was measured."""
        if self.deep:
            return 1.0
        line = fit_line(self.depths, [self._of_rung(rung, kind) for rung in self.rungs])
        return max(1.0, line.at(self.whole) / max(self._of_rung(self.last, kind), 1e-9))

    def _eigen(self, count: int) -> float:
        """Of the fitting set itself where it has its own, else of the first."""
        if not self.deep:
            # Every block has the same matrices: in proportion to the blocks, nothing else.
            return sum(rung["phases"]["eigen"] for rung in self.rungs) / sum(self.depths) * self.whole
        own = next((fit for fit in self.fits if fit["fit_examples"] == count), {})
        return own.get("eigen") or self.last["phases"]["eigen"]

    def _plane(self, kind: str) -> BlockPlane:
        points = {
            (rung["size"]["layers"], fit["fit_examples"]): fit[kind]
            for rung in self.rungs
            for fit in rung.get("fits") or [{"fit_examples": rung["size"]["fit_examples"], **rung["phases"]}]
        }
        each = self.least[kind] / self.whole
        return fit_blocks([(blocks, count, seconds) for (blocks, count), seconds in points.items()], each, PASS_JITTER)

    def _residual(self) -> float:
        """How far the lines miss what they rest on, at most: in depth, or at full depth in the fitting sequences."""
        if self.deep:
            lines = [line for _, _, line in (self.covariance, self.lambdas) if line is not None]
            both = [
                sum(line.at(fit["fit_examples"]) for line in lines) / (fit["covariance"] + fit["lambda"]) - 1
                for fit in self.fits
            ]
            return max(map(abs, both)) if lines else 0.0
        score = fit_line(self.depths, [rung["score_seconds"] for rung in self.rungs]).residual
        return max(score, *(plane.residual for plane in self.planes.values()))

    # ---- fitting sequences ----

    def _line(self, kind: str) -> tuple[float, float, Line | None]:
        """(fixed, a sequence) at full depth, and the line they come from; one fitting set has no fixed part."""
        if not self.deep:
            plane = self.planes[kind]
            return plane.base + self.whole * plane.fixed, self.whole * plane.each, None
        sizes, seconds = [fit["fit_examples"] for fit in self.fits], [fit[kind] for fit in self.fits]
        if len(sizes) < 2:
            return 0.0, seconds[0] / sizes[0], None
        line = fit_line(sizes, seconds, self.least[kind], PASS_JITTER)
        return line.intercept, line.slope, line

    def _fit_part(self, kind: str, count: int) -> tuple[float, float]:
        """Seconds at full depth with so many fitting sequences, and their standard deviation."""
        fixed, each, line = self.covariance if kind == "covariance" else self.lambdas
        value = fixed + each * count
        if not self.deep:
            unsplit = ONE_SIZE_ERROR * value if len(self.fits) < 2 else 0.0
            return value, math.hypot(self.planes[kind].deviation(self.whole, count), unsplit)
        for fit in self.fits:
            if fit["fit_examples"] == count:
                return fit[kind], fit[kind] * LEAST_NOISE
        if line is None:
            return value, value * ONE_SIZE_ERROR
        return value, (line.interval(count)[1] - line.at(count)) / 1.96

    def _held_out_fit(self, count: int) -> dict[str, Any]:
        """The fit of a fitting set, without its eigendecomposition, as the smaller ones would have projected it."""
        smaller = [fit for fit in self.fits if fit["fit_examples"] < count]
        own = [fit for fit in self.fits if fit["fit_examples"] == count]
        if len(smaller) < 2 or not own:
            return {}
        sizes = [fit["fit_examples"] for fit in smaller]
        kinds = ("covariance", "lambda")
        least = {kind: self.least[kind] * self.depths[-1] / self.whole for kind in kinds}  # of the blocks that were run
        predicted = sum(
            fit_line(sizes, [fit[kind] for fit in smaller], least[kind], PASS_JITTER).at(count) for kind in kinds
        )
        return {
            "held_out": f"{count} fitting sequences from {', '.join(map(str, sizes))}",
            "held_out_error": predicted / sum(own[0][kind] for kind in kinds) - 1,
        }

    # ---- scores ----

    def _score(self, queries: int) -> tuple[float, float] | None:
        """Seconds and their deviation at the point's training sequences; None where it cannot be said."""
        train = self.last["size"]["train"]
        for n, q, seconds in self.score_points:
            if (n, q) == (train, queries):
                noise = LEAST_NOISE if self.deep else USUAL_NOISE
                return self.score_deeper * seconds, self.score_deeper * seconds * noise
        if not self.score_parts:
            return None
        base, per_train, per_query, per_pair = self.score_parts
        value = base + per_train * train + per_query * queries + per_pair * train * queries
        beyond = max(0.0, math.log2(queries / max(q for _, q, _ in self.score_points)))
        return value, SCORE_ERROR * (1 + beyond) * value

    def _score_residual(self) -> float:
        base, per_train, per_query, per_pair = (value / self.score_deeper for value in self.score_parts)
        return max(
            abs((base + per_train * n + per_query * q + per_pair * n * q) / seconds - 1)
            for n, q, seconds in self.score_points
        )

    # ---- a row ----

    def row(self, row: dict[str, Any], missing: str) -> dict[str, Any]:
        count, queries = row["fit_examples"], row["queries"]
        score = self._score(queries)
        if score is None:
            return row | {"error": f"{missing}: scores of {queries} queries were not measured"}
        covariance, lambdas = self._fit_part("covariance", count), self._fit_part("lambda", count)
        eigen = self._eigen(count)
        fit_seconds = covariance[0] + eigen + lambdas[0]
        total = fit_seconds + score[0]
        measured_fit = any(fit["fit_examples"] == count for fit in self.fits)
        measured_score = any((n, q) == (self.last["size"]["train"], queries) for n, q, _ in self.score_points)
        projected = not (self.deep and measured_fit and measured_score)
        found: dict[str, Any] = {
            "projected": projected,
            "fit_seconds": fit_seconds,
            "score_seconds": score[0],
            "covariance_seconds": covariance[0],
            "eigen_seconds": eigen,
            "lambda_seconds": lambdas[0],
            "depth": self.depths[-1],
            "fit_sizes": ", ".join(str(fit["fit_examples"]) for fit in self.fits),
            "covariance_base": self.covariance[0],
            "covariance_per_example": self.covariance[1],
            "lambda_base": self.lambdas[0],
            "lambda_per_example": self.lambdas[1],
            "fit_seconds_per_example": self.covariance[1] + self.lambdas[1],
            **dict(zip(SCORE_PARTS, self.score_parts)),
            **self._memory(),
            **self._held_out_fit(count),
        }
        if projected:
            residual = 0.0 if self.deep and measured_fit else self._residual()
            residual = residual if measured_score else max(residual, self._score_residual())
            eigen_error = 0.0 if self.deep else USUAL_NOISE * eigen
            # What disturbs one pass over the fitting sequences disturbs the other: their errors add up.
            spread = 1.96 * math.hypot(covariance[1] + lambdas[1], eigen_error, score[1])
            found |= {
                "seconds_low": max(0.0, total - spread),
                "seconds_high": total + spread,
                "max_residual": residual,
                "projected_from": self._origin(count, queries, measured_fit, measured_score, residual),
            }
        found["shared_parts"] = self._shared(count, queries)
        return row | found

    def _origin(self, count: int, queries: int, fit: bool, score: bool, residual: float) -> str:
        texts = []
        if not self.deep:
            text = f"{', '.join(map(str, self.depths))} of {self.whole} layers"
            texts.append(text + (f"; not linear, {100 * residual:.0f} % off" if residual > LINEAR_WITHIN else ""))
        if not fit:
            sizes = ", ".join(str(known["fit_examples"]) for known in self.fits)
            bent = f", not linear, {100 * residual:.0f} % off" if self.deep and residual > LINEAR_WITHIN else ""
            texts.append(f"{sizes} of {count} fitting sequences{bent}")
        if not score:
            sizes = ", ".join(str(q) for q in sorted({q for _, q, _ in self.score_points}))
            texts.append(f"{sizes} of {queries} {QUERIES_END}")
        return "; ".join(texts)

    def _shared(self, count: int, queries: int) -> str | None:
        """Which parts were measured with another row's fitting set."""
        own = next((fit for fit in self.fits if fit["fit_examples"] == count), {})
        first = self.fits[0]["fit_examples"]
        parts = [] if own.get("eigen") is not None else ["eigendecomposition"]
        parts += ["scores"] if count != first else []
        return f"{' and '.join(parts)} of {first} fitting sequences" if parts else None

    def _memory(self) -> dict[str, Any]:
        """More blocks take more memory and disk; more sequences pass through the same.

        Disk and host memory are lines in the blocks. On the device another part may hold most in few blocks (an
        eigendecomposition) than in many (lambda's pass), so its peak goes as arithmetic says.
        """
        found: dict[str, Any] = {}
        number_bytes = 4 if self.spec["dtype"] == "float32" else 2
        needs = [
            ekfac_needs(self.shape.with_layers(depth), self.spec["tokens"], number_bytes).memory_bytes
            for depth in (self.whole, self.depths[-1])
        ]
        for name in MEMORY:
            if self.last.get(name) is None:
                continue
            largest = max(rung[name] for rung in self.rungs)
            if not self.deep and name in ("peak_memory_bytes", "peak_reserved_bytes"):
                largest = round(largest * max(1.0, needs[0] / needs[1]))
            elif not self.deep:
                line = fit_line(self.depths, [rung[name] for rung in self.rungs])
                largest = round(max(largest, line.at(self.whole)))
            found[name] = largest
        return found
