"""The Python API's functions about one method, one checkpoint, one picture; `bench/__init__.py` exports them."""

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from bench.experiment import Execution, Experiment
from bench.ground_truth import base_model
from bench.runner import Result, Session
from retrain.store import Store
from retrain.tasks import load_task


def scores(
    method: str,
    task: str = "digits",
    *,
    seed: int = 1,
    normalised: bool = False,
    execution: Execution | None = None,
    **asked: Any,
) -> np.ndarray:
    """A method's score matrix, (queries, training examples), from the cache or computed and kept there.

    `scores[j, i]` is the predicted change of query j's loss when training example i is included: helpful examples are
    negative. `method` is spelled as on the command line ("ekfac@damping=1e-4"); `asked` are further fields of
    Experiment (alpha_attribution, query_split, queries, task_options, settings).
    """
    asked = {"alpha": (0.5,), **asked}
    session = Session(Experiment(task=task, methods=(method,), seeds=(seed,), **asked), execution or Execution())
    kind = "normalised" if normalised else "raw"
    if not session.active:
        reasons = [*session.skipped.values(), *session.out.problems]
        raise RuntimeError(f"{method} cannot run on {task}: {reasons[0]}")
    variant = next(one for one in session.active if one.rows in ("both", kind))
    (block,) = session.blocks
    scorer = session.scorer(variant, *block)
    scorer.keep_scores = "always"
    scorer.make(())
    attribution = scorer.stored_scores()
    assert attribution is not None
    scaled = attribution.normalised() if normalised else None
    return (attribution.scores if scaled is None else scaled).numpy()


def load_checkpoint(
    task: str = "digits", *, seed: int = 1, number: int = 0, execution: Execution | None = None, **task_options: Any
) -> nn.Module:
    """The base model that methods look at, in eval mode; trained now if it is not cached.

    `number` above 0 gives further checkpoints, trained alike from other seeds.
    """
    execution = execution or Execution()
    return base_model(load_task(task, **task_options), seed, Store(execution.cache), execution.device, number)[0]


def plot(source: Result | str | Path, kind: str = "lds") -> Any:
    """A matplotlib figure of a run, or of a folder of records; `kind` is one of `tda-bench publish figures --list`.

    Where the results allow several figures of that kind (several tasks, say), the first is given.
    """
    from bench.publish.plots import draw_figures

    return draw_figures(source, kind)
