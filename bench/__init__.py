"""How well training-data attribution methods predict what happens when training data is left out.

From Python, eleven names are enough; each says in its docstring what it takes:

    from bench import Experiment, run, lds

    result = run(Experiment(task="digits", alpha=(0.1,), methods=("ekfac", "gradsim")))
    print(result)                                       # the table of `python -m bench.lds`
    frame = result.frame()                              # a pandas DataFrame
    found = lds(masks, losses, scores)                  # plain arrays: LDS, its interval, the ceiling
    task = OwnModel(model, train=(x, y), queries=(new_x, new_y))     # a model of your own, as it is
    print(scores("ekfac", task).top(10))                # the examples that matter most to its first queries

Names are imported when they are first used, so that a command that needs no torch does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import retrain  # noqa: F401  (transformers can then be imported beside a CPU build of torch)

__version__ = "0.2.0"

_HOMES = {
    "Execution": "bench.experiment",
    "Experiment": "bench.experiment",
    "OwnModel": "retrain.own_model",
    "Result": "bench.runner",
    "lds": "bench.metrics.lds:score_arrays",
    "load_checkpoint": "bench.api",
    "load_results": "bench.records",
    "plot": "bench.api",
    "read_experiment": "bench.experiment",
    "run": "bench.runner",
    "scores": "bench.api",
}
__all__ = [
    "Execution", "Experiment", "OwnModel", "Result", "lds", "load_checkpoint", "load_results", "plot",
    "read_experiment", "run", "scores",
]  # fmt: skip

if TYPE_CHECKING:
    from bench.api import load_checkpoint, plot, scores
    from bench.experiment import Execution, Experiment, read_experiment
    from bench.metrics.lds import score_arrays as lds
    from bench.records import load_results
    from bench.runner import Result, run
    from retrain.own_model import OwnModel


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bench' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
