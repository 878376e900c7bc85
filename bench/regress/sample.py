"""One run of one method, reduced to what the gate compares; and several of them, recorded as a baseline."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import metrics
from bench.prediction import subset_sums
from bench.regress.baseline import MethodBaseline, TaskBaseline, made_by
from bench.regress.clock import Calibration, Clock, Timing
from retrain.errors import UsageError
from retrain.progress import bar
from retrain.store import canonical_json

if TYPE_CHECKING:
    from baselines.method import Attribution, Method
    from retrain.task import Task

REFERENCE_QUERIES, REFERENCE_EXAMPLES = 48, 1000  # of each method's kept scores
FIRST_RECORDED_SEED = 1000  # the gate's own runs use others


@dataclass
class Sample:
    prediction: np.ndarray  # (subsets, queries)
    rows: np.ndarray  # (reference queries, reference examples)
    lds: float
    lds_normalised: float | None
    zeros: float
    num_not_finite: int
    timing: Timing
    diagnostics: dict[str, Any] = field(default_factory=dict)


class Rig:
    """A task at its recorded weights, ready to run methods on one thread, so that the number of cores is no matter."""

    def __init__(self, task: "Task", recorded: TaskBaseline):
        import torch

        if task.config["data"] != recorded.record["task"]["data"]:
            raise UsageError(
                f"the data of task {task.name} are not those of the baseline; record it again with --update, or leave "
                "it out with --tasks"
            )
        self.task, self.recorded = task, recorded
        self.device = torch.device("cpu")
        self.model = task.build_model(0)
        weights = {name: torch.from_numpy(np.array(value)) for name, value in recorded.weights.items()}
        try:
            self.model.load_state_dict(weights)
        except RuntimeError:
            raise UsageError(
                f"the recorded weights do not fit the model of task {task.name}, which has changed; "
                "record its baseline again with --update"
            ) from None
        self.model.eval()
        n, q = len(task.train_data), len(recorded.queries)
        self.reference_queries, self.reference_examples = _evenly(q, REFERENCE_QUERIES), _evenly(n, REFERENCE_EXAMPLES)
        with self._threads():
            self.calibration = Calibration(task, self.model)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """As many as the method gets, so that the calibration is done the same way."""
        import torch

        from retrain.train import one_thread

        with one_thread(self.device):
            torch.set_num_threads(self.task.cpu_threads or 1)
            yield

    def attribute(self, method: "Method", seed: int) -> "tuple[Attribution, Timing]":
        from baselines.method import Problem

        clock = Clock(self.calibration)
        with tempfile.TemporaryDirectory(prefix="tda-bench-gate-") as scratch, self._threads():
            problem = Problem(
                task=self.task,
                model=self.model,
                train=self.task.train_data,
                attributed_indices=np.arange(len(self.task.train_data)),
                queries=self.task.query_data.select(self.recorded.queries),
                seed=seed,
                device=self.device,
                scratch=Path(scratch),
                progress=clock.progress,
            )
            return clock.time(method, problem)

    def sample(self, method: "Method", seed: int) -> Sample:
        return self.reduce(*self.attribute(method, seed))

    def reduce(self, attribution: "Attribution", timing: Timing) -> Sample:
        scores = attribution.scores.numpy()
        losses = self.recorded.losses
        q, n = len(self.recorded.queries), self.recorded.masks.shape[1]
        if scores.shape != (q, n):
            hint = "; they are transposed" if scores.shape == (n, q) else ""
            raise UsageError(
                f"the scores have shape {scores.shape}; expected {(q, n)}: queries x training examples{hint}"
            )
        masks, scaled = self.recorded.masks, attribution.normalised()
        prediction = subset_sums(masks, scores)
        return Sample(
            prediction=prediction,
            rows=scores[np.ix_(self.reference_queries, self.reference_examples)],
            lds=mean_lds(losses, prediction),
            lds_normalised=None if scaled is None else mean_lds(losses, subset_sums(masks, scaled.numpy())),
            zeros=float((scores == 0).mean()),
            num_not_finite=int((~np.isfinite(scores)).sum()),
            timing=timing,
            diagnostics={k: v for k, v in attribution.diagnostics.items() if isinstance(v, int | float | str)},
        )


def _evenly(count: int, at_most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).round().astype(int))


def mean_lds(truth: np.ndarray, prediction: np.ndarray) -> float:
    """An undefined query counts as 0: a method cannot gain by having no opinion."""
    return float(np.nan_to_num(metrics.spearman_per_column(truth, prediction)).mean())


def standardised(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(axis=1, keepdims=True)
    spread = centred.std(axis=1, keepdims=True)
    return centred / np.where(spread > 0, spread, 1)


def agreement(rows: np.ndarray, reference: np.ndarray) -> float:
    """Mean over queries of the correlation across training examples; both (queries, examples)."""
    return float((standardised(rows) * standardised(reference)).mean())


def noise_level(agreements: Sequence[float]) -> np.ndarray:
    """The logarithm of one minus the agreement: twice the noise is as far from once at any level of it."""
    return np.log(np.maximum(1 - np.asarray(agreements, dtype=float), 1e-4))


# ---- recording ----


def record_method(rig: Rig, method: "Method", num_seeds: int) -> MethodBaseline:
    """Runs the method with several seeds."""
    numbers = range(FIRST_RECORDED_SEED, FIRST_RECORDED_SEED + num_seeds)
    seeds = bar(numbers, desc=f"{rig.task.name} {method.name}", unit="seed", leave=False)
    samples = [rig.sample(method, seed) for seed in seeds]
    if bad := sum(sample.num_not_finite for sample in samples):
        raise UsageError(f"{method.name} gave {bad} scores that are not finite; a baseline needs finite ones")
    return baseline_of(samples, numbers, method, rig)


def baseline_of(samples: Sequence[Sample], seeds: Sequence[int], method: "Method", rig: Rig) -> MethodBaseline:
    rows = [standardised(sample.rows) for sample in samples]
    total = np.sum(rows, axis=0)
    values: dict[str, list[Any]] = {
        # Each seed against the mean of the others, as a later run is against the mean of all.
        "agreement": [agreement(row, total - row) for row in rows],
        "lds": [sample.lds for sample in samples],
        "lds_normalised": [sample.lds_normalised for sample in samples if sample.lds_normalised is not None],
        "zeros": [sample.zeros for sample in samples],
        "timing": [asdict(sample.timing) for sample in samples],
    }
    middle = int(np.argsort(values["lds"])[len(samples) // 2])
    prediction = samples[middle].prediction.astype(np.float32)
    record = {
        "method": json.loads(canonical_json(method.config)),
        "task": rig.task.name,
        "seeds": list(seeds),
        "prediction_seed": seeds[middle],
        "values": values,
        "per_query_lds": metrics.spearman_per_column(rig.recorded.losses, prediction).round(4).tolist(),
        "diagnostics": samples[middle].diagnostics,
        **made_by(),
    }
    return MethodBaseline(record, (total / len(rows)).astype(np.float16), prediction)
