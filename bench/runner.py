"""Names that moved; goes when the last importer has followed."""

from bench.ground_truth import base_model, ground_truth  # noqa: F401
from bench.measure import cpu_threads as _threads  # noqa: F401
from bench.measure import measure  # noqa: F401
from bench.measure import now as _now  # noqa: F401
from bench.measure import resident_peak as _resident_peak  # noqa: F401
from bench.scoring import Question, Scorer, problem_of  # noqa: F401
from retrain.progress import progress_bar  # noqa: F401
